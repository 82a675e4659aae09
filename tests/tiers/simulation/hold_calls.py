"""Simulated publications and claims: calls that step their operations in slices."""

from __future__ import annotations

from typing import Any, ClassVar

from kvtier.tiers import errors
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.holds import Hold, HoldClaim
from kvtier.tiers.core.holds import SlicedPublication as State
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.types import HandoffDirection, HoldEnd, HoldName, KeyStatus

from . import inspect as inside
from .actors import HOLD_SECONDS, Actors
from .calls import Call
from .holds import HoldRecord
from .ledger import Client, LeaseRecord
from .model import HELD_REQUESTS, REQUESTS, Invariant, private_key

__all__ = ["Claim", "Publication"]

DURATIONS = (3.0, 30.0, 30.0, 480.0)


class Publication(Call):
    """A publication: it pins all blocks, opens the hold, and prepares it."""

    kind: ClassVar[str] = "publications"
    event: ClassVar[str] = "publish"

    def __init__(self, actors: Actors, client: Client) -> None:
        super().__init__(actors, client)
        self.request_id, self.keys = actors.rng.choice(HELD_REQUESTS), actors.some_keys(self.session)
        if actors.rng.random() < 0.5:
            self.keys = [*self.keys, private_key(self.session.engine_id, self.request_id)]
        self.name: HoldName = (*self.session.engine, self.request_id)
        self.direction = actors.rng.choice(list(HandoffDirection))
        self.duration = actors.rng.choice(DURATIONS)
        self.record: HoldRecord | None = None
        self.publication: State | None = None
        """The state of the call; None before the first step."""

    def begin(self) -> Operation[Any]:
        return self.world.core.publish(
            self.session,
            self.request_id,
            self.keys,
            range(len(self.keys)),
            num_tokens=len(self.keys),
            direction=self.direction,
            duration=self.duration,
            now=self.world.environment.latest,
            slice_keys=self.size,
        )

    @property
    def pinned(self) -> list[Block]:
        """The blocks that the publication has pinned, and that no hold owns."""
        return self.publication.blocks if self.publication is not None and self.publication.result is None else []

    def step(self) -> bool:
        core, now, book = self.world.core, self.world.environment.latest, self.world.ledger.holds
        if self.operation is None:
            self.operation = self.begin()
            self.publication = inside.state_of(self.operation, "publication")
        publication = self.publication
        assert publication is not None
        if self.record is not None and book.open.get(self.name) is not self.record:
            more = self.next_step(now)
            self.world.must(Invariant.HELD, not more, "a publication continues after its hold has ended")
            self.world.saw("holds ended during their publication")
            return False
        known, prepared = book.open.get(self.name), publication.prepared
        more = self.next_step(now)
        is_opening = self.record is None
        if is_opening and known is not None and known.hold.record.end is HoldEnd.REPLACED:
            book.end(self.name)
            self.world.saw("holds replaced")
        hold = publication.result
        self.world.must(Invariant.HELD, more or self.answer is hold, "an answer with another hold")
        if hold is None:
            self.world.must(Invariant.HELD, more, "a publication without a result")
            return more
        if not isinstance(hold, Hold):
            self.world.must(Invariant.HELD, not more, "a refused publication continues")
            self.world.saw("holds declined")
            return more
        if is_opening:
            self.record = HoldRecord(hold, self.duration, now + self.duration)
            book.over.discard(self.name)
            book.open[self.name] = self.record
        assert self.record is not None
        self.record.prepared = publication.prepared
        self.world.must(Invariant.HELD, more == self.record.is_preparing, "a hold that is not prepared")
        blocks = [block for block in hold.items[prepared : publication.prepared] if block is not None]
        if core.resetting(self.session):
            loading = any(block.promoting for block in blocks)
            self.world.must(Invariant.RESET, not loading, "a publication is promoted during a reset")
        self.actors.used(self.session, [block for block in blocks if not block.invalidated], 0.0, 0)
        self.world.saw("holds published before their blocks", bool(hold.pending) and not more)
        return more

    def abandon(self) -> None:
        book = self.world.ledger.holds
        if self.record is not None and book.open.get(self.name) is self.record:
            book.end(self.name)
        super().abandon()


class Claim(Call):
    """A claim. Its lease is in the ledger from the first hit on."""

    kind: ClassVar[str] = "claims"
    event: ClassVar[str] = "claim"

    def __init__(self, actors: Actors, client: Client, hold: HoldRecord, first_positions: list[int]) -> None:
        super().__init__(actors, client)
        self.hold, self.first_positions, self.request_id = hold, first_positions, actors.rng.choice(REQUESTS)
        self.seconds = actors.rng.choice(HOLD_SECONDS)
        self.record: LeaseRecord | None = None
        self.time = self.world.environment.latest
        self.operation = self.begin()  # before other events can end the hold
        self.claim: HoldClaim = inside.state_of(self.operation, "claim")

    def begin(self) -> Operation[Any]:
        return self.world.core.claim(
            self.session,
            self.hold.hold.name,
            first_positions=self.first_positions,
            request_id=self.request_id,
            lease_seconds=self.seconds,
            now=self.time,
            slice_keys=self.size,
        )

    def step(self) -> bool:
        if self.has_begun:
            self.time = self.world.environment.latest
        claim, hold = self.claim, self.hold.hold
        start, settled = len(claim.statuses), claim.settled
        if self._is_over():
            return self._continue_without_hold()
        more = self.next_step(self.time)
        self.world.must(Invariant.HELD, more or self.answer is claim, "an answer of another claim")
        end = len(claim.statuses)
        self._check(start, settled)
        self.world.must(Invariant.HELD, more == (end < len(hold.keys)), "a status per block")
        if claim.lease is not None:
            self._leased(claim, start)
        return more

    def _continue_without_hold(self) -> bool:
        """The hold or the lease has ended: the claim fails, and its lease ends."""
        if not self.has_begun and len(self.hold.hold.keys) > self.size:
            return self.next_step(self.time)  # it waits for its first turn
        self._forget_lease()
        try:
            self.next_step(self.time)
        except errors.HoldNotFound:
            self.world.saw("claims ended with their hold or lease")
        else:
            self.world.must(Invariant.REFUSALS, False, "a claim continues after its hold or lease has ended")
        return False

    def _is_over(self) -> bool:
        ledger = self.world.ledger
        is_leased = self.record is None or ledger.leases.get(self.record.lease.id) is self.record
        return not is_leased or ledger.holds.open.get(self.hold.hold.name) is not self.hold

    def _check(self, start: int, settled_before: int) -> None:
        must, claim, first = self.world.must, self.claim, self.claim.first_positions
        items, statuses = self.hold.hold.items[start : len(claim.statuses)], claim.statuses[start:]
        for item, (block, status) in enumerate(zip(items, statuses, strict=True), start):
            group = int.from_bytes(self.hold.hold.keys[item][-4:], "big")
            if group < len(first) and item < first[group]:
                must(Invariant.HELD, not status, "a block that was not wanted")
                continue
            right = KeyStatus.MISS if block is None else KeyStatus.HIT if block.ready else KeyStatus.HIT_PENDING
            must(Invariant.HELD, status == right, f"item {item} is said to be {status}")
            must(Invariant.HELD, item not in self.hold.at or status == KeyStatus.HIT, "a held block was evicted")
        settled = sum(block is None or block.ready for block in items)
        must(
            Invariant.HELD, claim.settled - settled_before == settled, f"{claim.settled} blocks are said to be settled"
        )
        must(Invariant.HELD, (claim.lease is None) == (KeyStatus.HIT not in claim.statuses), "a lease on the hits")

    def _leased(self, claim: HoldClaim, start: int) -> None:
        """Updates the ledger by the hits of a slice."""
        lease, ledger = claim.lease, self.world.ledger
        assert lease is not None
        if self.record is None:
            self.record = LeaseRecord(lease, self.client, self.request_id, 0.0, [], waiting=False)
            ledger.leases[lease.id] = self.record
            self.world.saw("holds claimed")
        hits = [n for n, status in enumerate(claim.statuses[start:], start) if status == KeyStatus.HIT]
        if hits:
            self.record.expires_at = max(self.record.expires_at, self.time + self.seconds)
        found = [block for item in hits if (block := claim.hold.items[item]) is not None]
        self.world.must(Invariant.FOUND, lease.blocks(hits) == found, "a reader gets other blocks of the hold")
        gone = ledger.gone.get(self.session.namespace.id, set())
        self.world.must(Invariant.RESET, gone.isdisjoint(found), "a claim of blocks from before a reset")
        self.actors.used(self.session, [block for block in found if not block.invalidated], 0.0, 0)

    def abandon(self) -> None:
        self._forget_lease()
        super().abandon()

    def _forget_lease(self) -> None:
        leases = self.world.ledger.leases
        if self.record is not None and leases.get(self.record.lease.id) is self.record:
            del leases[self.record.lease.id]
