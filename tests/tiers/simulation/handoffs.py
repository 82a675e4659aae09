"""Simulated engines that publish requests for each other, and readers that claim them."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.tiers import errors
from kvtier.tiers.core.handoffs import EXPIRY_MARGIN_SECONDS
from kvtier.tiers.core.operations import run_to_end
from kvtier.tiers.types import HandoffDirection

from .actors import Actors
from .hold_calls import Claim, Publication
from .holds import HoldRecord
from .ledger import Client
from .model import HELD_REQUESTS, Invariant

__all__ = ["Handoffs"]


class Handoffs(Actors):
    """Events of engines that hand over requests."""

    def actions(self) -> dict[Callable[[], None], float]:
        return {
            self.publish: 4,
            self.publish_invalid: 0.3,
            self.claim: 5,
            self.wait_for_blocks: 3,
            self.renew_hold: 2,
            self.release_hold: 1.5,
        }

    def publish(self) -> None:
        if client := self.pick_client():
            self.world.calls.begin(Publication(self, client))

    def publish_invalid(self) -> None:
        """A refused publication changes nothing, also not an existing hold of that name."""
        if client := self.pick_client():
            core, now = self.world.core, self.world.environment.latest
            for keys, positions, error in (
                ([b"no such group" + (7).to_bytes(4, "big")], [0], errors.InvalidKey),
                (self.some_keys(client.session), [0] * 30, errors.InvalidItem),
            ):
                self.world.refused(
                    error,
                    lambda keys=keys, positions=positions: run_to_end(  # type: ignore[misc]
                        core.publish(
                            client.session,
                            HELD_REQUESTS[0],
                            keys,
                            positions,
                            num_tokens=1,
                            direction=HandoffDirection.PREFILL_TO_DECODE,
                            duration=30.0,
                            now=now,
                        )
                    ),
                )

    def claim(self) -> None:
        """A client claims a hold of its namespace that is open, unknown or expired."""
        if (client := self.pick_client()) is None:
            return
        record = self._pick(client)
        name = record.hold.name if record else (client.session.namespace.id, self.rng.choice("xyz"), "unheard of")
        now, core, book = self.world.environment.latest, self.world.core, self.world.ledger.holds
        error: type[errors.CoreError] | None = None
        if record is None:
            over = [name for name in book.over if name[0] == client.session.namespace.id]
            name = self.rng.choice(sorted(over)) if over and self.rng.random() < 0.7 else name
            error = errors.HoldExpired if name in over else errors.HoldNotFound
        elif record.expires_at - EXPIRY_MARGIN_SECONDS <= now:
            error = errors.HoldExpired
        if record is not None and error is None:
            self.world.calls.begin(Claim(self, client, record, self.rng.choice(([], [], [2], [0, 4]))))
            return
        assert error is not None
        self.world.refused(
            error,
            lambda: core.claim(client.session, name, first_positions=[], request_id="r1", lease_seconds=30, now=now),
        )
        self.world.saw("holds claimed too late", error is errors.HoldExpired)

    def wait_for_blocks(self) -> None:
        """A claim waits until all or some blocks of a hold are settled."""
        client = self.pick_client()
        record = self._pick(client) if client is not None else None
        preparing = [each for each in self.world.ledger.holds.open.values() if each.is_preparing]
        if preparing and self.rng.random() < 0.5:
            record = self.rng.choice(preparing)
        if record is None:
            return
        total = len(record.hold.items)
        blocks = self.rng.choice((0, 1, record.settled + 1, total, total + 1))
        settled = self.world.core.is_settled(record.hold, blocks)
        told_at = min(blocks, total) if blocks else total
        is_late = not self.world.core_view.unsettled.isdisjoint(record.hold.awaited)
        is_right = settled == (record.settled >= told_at) or (not settled and (record.is_preparing or is_late))
        self.world.must(Invariant.HELD, is_right, f"{blocks} blocks are settled")
        if not settled:
            record.told_at = told_at if record.told_at is None else min(record.told_at, told_at)
            self.world.saw("holds waited for in parts", told_at < total)

    def renew_hold(self) -> None:
        """Any client of the namespace sends a heartbeat."""
        client = self.pick_client()
        record = self._pick(client) if client is not None else None
        if record is not None:
            now, extension = self.world.environment.latest, self.rng.choice((None, 1.0, 100.0))
            renewed = self.world.core.renew_hold(record.hold.name, now, extension)
            self.world.must(Invariant.HELD, renewed == (record.expires_at > now), "an expired hold is renewed")
            seconds = 2 * record.duration / 3 if extension is None else extension
            if renewed:
                record.expires_at = max(record.expires_at, now + seconds)
                self.world.saw("holds renewed")

    def release_hold(self) -> None:
        """The reader releases a hold, sometimes twice."""
        client = self.pick_client()
        record = self._pick(client) if client is not None else None
        if record is not None:
            name, now = record.hold.name, self.world.environment.latest
            self.world.ledger.holds.end(name)
            released = self.world.core.release_hold(name, now)
            self.world.must(Invariant.HELD, released, "an unknown hold")
            again = self.world.core.release_hold(name, now)
            self.world.must(Invariant.HELD, not again, "a hold that ends twice")

    def _pick(self, client: Client) -> HoldRecord | None:
        book, namespace = self.world.ledger.holds, client.session.namespace.id
        mine = [record for name, record in book.open.items() if name[0] == namespace]
        return self.rng.choice(mine) if mine and self.rng.random() < 0.9 else None
