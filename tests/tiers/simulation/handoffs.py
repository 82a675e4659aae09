"""Simulated engines that publish requests for each other, and readers that claim them."""

from __future__ import annotations

from collections.abc import Callable

from kvtier.tiers import errors
from kvtier.tiers.core.handoffs import EXPIRY_MARGIN_SECONDS
from kvtier.tiers.core.holds import Hold, HoldClaim
from kvtier.tiers.types import HandoffDirection, HoldName, KeyStatus

from .actors import HOLD_SECONDS, Actors
from .holds import HoldRecord
from .ledger import Client, LeaseRecord
from .model import HELD_REQUESTS, REQUESTS, Invariant, private_key

__all__ = ["Handoffs"]

DURATIONS = (3.0, 30.0, 30.0, 480.0)


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
        if (client := self.pick_client()) is None:
            return
        session, book, request_id = client.session, self.world.ledger.holds, self.rng.choice(HELD_REQUESTS)
        keys, duration, now = self.some_keys(session), self.rng.choice(DURATIONS), self.world.environment.latest
        if self.rng.random() < 0.5:
            keys = [*keys, private_key(session.engine_id, request_id)]
        name: HoldName = (*session.engine, request_id)
        if name in book.open:
            book.end(name)
            self.world.saw("holds replaced")
        hold = self.world.core.handoffs.publish(
            session,
            request_id,
            keys,
            range(len(keys)),
            num_tokens=len(keys),
            direction=self.rng.choice(list(HandoffDirection)),
            duration=duration,
            now=now,
        )
        if not isinstance(hold, Hold):
            self.world.saw("holds declined")
            return
        if self.world.core.resetting(session):
            loading = any(block is not None and block.promoting for block in hold.items)
            self.world.must(Invariant.RESET, not loading, "a publication is promoted during a reset")
        self.used(session, [block for block in hold.items if block is not None], 0.0, 0)
        book.over.discard(name)
        book.open[name] = HoldRecord(hold, duration, now + duration, was_awaited=bool(hold.awaited))
        self.world.saw("holds published before their blocks", bool(hold.awaited))

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
                    lambda keys=keys, positions=positions: core.handoffs.publish(  # type: ignore[misc]
                        client.session,
                        HELD_REQUESTS[0],
                        keys,
                        positions,
                        num_tokens=1,
                        direction=HandoffDirection.PREFILL_TO_DECODE,
                        duration=30.0,
                        now=now,
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
        first = self.rng.choice(([], [], [2], [0, 4]))
        request_id, expires_at = self.rng.choice(REQUESTS), self.world.now + self.rng.choice(HOLD_SECONDS)

        def ask() -> HoldClaim:
            return core.handoffs.claim(
                client.session, name, first_positions=first, request_id=request_id, expires_at=expires_at, now=now
            )

        if error is not None:
            self.world.refused(error, ask)
            self.world.saw("holds claimed too late", error is errors.HoldExpired)
        elif record is not None:
            claim = ask()
            self._check_claim(record, claim, first)
            if claim.lease is not None:
                self._claimed(client, LeaseRecord(claim.lease, client, request_id, expires_at, [], waiting=False))

    def wait_for_blocks(self) -> None:
        """A claim waits until all or some blocks of a hold are settled."""
        client = self.pick_client()
        record = self._pick(client) if client is not None else None
        if record is None:
            return
        total = len(record.hold.items)
        blocks = self.rng.choice((0, 1, record.settled + 1, total, total + 1))
        settled = self.world.core.handoffs.is_settled(record.hold, blocks)
        told_at = min(blocks, total) if blocks else total
        self.world.must(Invariant.HELD, settled == (record.settled >= told_at), f"{blocks} blocks are settled")
        if not settled:
            record.told_at = told_at if record.told_at is None else min(record.told_at, told_at)
            self.world.saw("holds waited for in parts", told_at < total)

    def _check_claim(self, record: HoldRecord, claim: HoldClaim, first: list[int]) -> None:
        must = self.world.must
        for item, (block, status) in enumerate(zip(record.hold.items, claim.statuses, strict=True)):
            group = int.from_bytes(record.hold.keys[item][-4:], "big")
            if group < len(first) and item < first[group]:
                must(Invariant.HELD, not status, "a block that was not wanted")
                continue
            right = KeyStatus.MISS if block is None else KeyStatus.HIT if block.ready else KeyStatus.HIT_PENDING
            must(Invariant.HELD, status == right, f"item {item} is said to be {status}")
            must(Invariant.HELD, item not in record.at or status == KeyStatus.HIT, "a held block was evicted")
        must(Invariant.HELD, claim.settled == record.settled, f"{claim.settled} blocks are said to be settled")
        must(Invariant.HELD, (claim.lease is None) == (KeyStatus.HIT not in claim.statuses), "a lease on the hits")

    def _claimed(self, client: Client, record: LeaseRecord) -> None:
        self.world.saw("holds claimed")
        found = [block for block in record.lease.items if block is not None]
        gone = self.world.ledger.gone.get(client.session.namespace.id, set())
        self.world.must(Invariant.RESET, gone.isdisjoint(found), "a claim of blocks from before a reset")
        self.used(client.session, found, 0.0, 0)
        self.world.ledger.leases[record.lease.id] = record

    def renew_hold(self) -> None:
        """Any client of the namespace sends a heartbeat."""
        client = self.pick_client()
        record = self._pick(client) if client is not None else None
        if record is not None:
            now, extension = self.world.environment.latest, self.rng.choice((None, 1.0, 100.0))
            renewed = self.world.core.handoffs.renew(record.hold.name, now, extension)
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
            released = self.world.core.handoffs.release(name, now)
            self.world.must(Invariant.HELD, released, "an unknown hold")
            again = self.world.core.handoffs.release(name, now)
            self.world.must(Invariant.HELD, not again, "a hold that ends twice")

    def _pick(self, client: Client) -> HoldRecord | None:
        book, namespace = self.world.ledger.holds, client.session.namespace.id
        mine = [record for name, record in book.open.items() if name[0] == namespace]
        return self.rng.choice(mine) if mine and self.rng.random() < 0.9 else None
