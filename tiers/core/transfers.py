"""How blocks flow between the CPU tier and the tiers below: cascades down, promotions up.

Every block of a job is pinned until the job has ended (B3.8), so that its slots stay where they are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..base import Outcome, SecondaryTier
from ..stats.eviction_history import EvictionHistory
from ..types import JobId, MissReason
from .block import Block
from .bulk_eviction import SecondaryTierSource
from .catalog import CatalogEntry, EntryState, UsedElsewhere
from .commands import Command, LoadFromTier, RemoveFromTier, StoreInTier
from .requests import Request
from .residency import ResidencyIndex
from .secondary import Name, SecondaryTierState
from .settings import TierSettings

__all__ = ["FinishedJob", "JobKind", "StallChange", "TransferScheduler"]

JOB_BYTES = 32 << 20
"""How much one job moves at most: enough for transactions to pay off, little enough for results to come in time."""


class JobKind(enum.Enum):
    """Which way a job moves blocks."""

    STORE = enum.auto()
    LOAD = enum.auto()


@dataclass(frozen=True, slots=True)
class _Job:
    lane: SecondaryTierState
    kind: JobKind
    blocks: Sequence[Block]
    entries: Sequence[CatalogEntry]


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """What became of a job: which of its blocks succeeded, and the requests that it was owed to."""

    kind: JobKind
    results: list[tuple[Block, bool]]
    paid: list[Request]


@dataclass(slots=True)
class StallChange:
    """What follows from a tier's standing still, or being back.

    Attributes:
        given_up: blocks that it is reading, for which nobody waits any longer.
        paid: requests that it owes nothing any more.
        is_back: whether it stood still and does not any more.
    """

    is_back: bool
    given_up: list[Block] = field(default_factory=list)
    paid: list[Request] = field(default_factory=list)


class TransferScheduler:
    """Plans jobs for the secondary tiers and takes in their results."""

    def __init__(
        self,
        tiers: Sequence[SecondaryTier],
        keeping: TierSettings,
        now: float,
        max_queued_bytes: int,
        unpin: Callable[[Iterable[Block]], None],
        command: Callable[[Command], None],
        history: EvictionHistory,
    ) -> None:
        """`max_queued_bytes` bounds, per tier, what may be pinned in the CPU tier while it waits to be stored.

        Raises:
            ValueError: `keeping` does not fit what a tier can hold.
        """
        self.lanes = [
            SecondaryTierState(
                number,
                tier,
                keeping.lines(tier.name, tier.capacity_bytes, now),
                max_queued_bytes,
                history.left,
                keeping.new_admission(tier.name),
            )
            for number, tier in enumerate(tiers, start=1)
        ]
        self._choosy = [lane for lane in self.lanes if lane.admission is not None]
        self._unpin = unpin
        self._left = history.left
        self._command = command
        self._jobs: dict[JobId, _Job] = {}
        self._last_id = 0
        self.whereabouts = ResidencyIndex(self.lanes, self._next_id, command)
        """Which of the tiers has a block."""

    def recover(self) -> None:
        """Takes in what the tiers kept from an earlier life; removes what no longer fits."""
        for lane in self.lanes:
            lane.doomed += lane.catalog.recover(lane.tier.entries())
            self._advance(lane)

    def stocks(self, used_in_cpu: UsedElsewhere) -> list[SecondaryTierSource]:
        """Returns what the tiers hold, in lookup order, to be parted with."""
        return [SecondaryTierSource(lane, used_in_cpu, self._advance) for lane in self.lanes]

    def tick(self, now: float, used_in_cpu: UsedElsewhere) -> bool:
        """Lets time pass in the tiers; returns whether the time of more blocks is over than were looked at."""
        for lane in self.lanes:
            lane.tick(now, used_in_cpu)
            self._advance(lane)
        return any(lane.catalog.lines.overdue for lane in self.lanes)

    def cascade(self, blocks: Sequence[Block], user: Hashable, *, even_if_busy: bool = False) -> None:
        """Stores ready blocks in every tier that lacks them; a tier that is too far behind is left out (B3.7, B3.10).

        `user` is the request that used the blocks, by the name that eviction policies know it by. What a tier does not
        admit yet may go there when it is used again (`used`).
        """
        blocks = [block for block in blocks if not block.private]
        for block in blocks:
            block.left_out = None
        for lane in self.lanes:
            for block in blocks:
                if lane.catalog.get(block.namespace, block.key) is None:
                    if not even_if_busy and not lane.admits(block, user):
                        block.left_out = MissReason.POLICY
                        continue
                    limit = None if even_if_busy else lane.max_queued_bytes
                    if not self._enqueue(lane, block, limit):
                        block.left_out = MissReason.STORE_FAILED
                        lane.dropped += 1
            lane.use(blocks, user)
            self._advance(lane)

    def used(self, blocks: Sequence[Block], user: Hashable) -> None:
        """Offers blocks that a request has found in the CPU tier to the tiers that choose what they take in."""
        blocks = [block for block in blocks if not block.private] if self._choosy else blocks
        for lane in self._choosy:
            taken = []
            for block in blocks:
                if block.ready and lane.catalog.get(block.namespace, block.key) is None and lane.admits(block, user):
                    if self._enqueue(lane, block, lane.max_queued_bytes):
                        block.left_out = None
                        taken.append(block)
                    else:
                        block.left_out = MissReason.STORE_FAILED
                        lane.dropped += 1
            lane.use(taken, user)
            self._advance(lane)

    def cascade_for(self, request: Request, blocks: Sequence[Block]) -> None:
        """Stores ready blocks in the tiers that insist on this request, and keeps account of what they are owed (B3.6).

        They may fall behind twice as far as others; what is beyond that makes the request incomplete, and it is said (B3.10).
        """
        blocks = [block for block in blocks if not block.private]
        for lane in self.lanes:
            if lane.index not in request.insisting:
                continue
            for block in blocks:
                entry = lane.catalog.get(block.namespace, block.key)
                if entry is not None and entry.state is EntryState.HELD:
                    continue
                # What a tier is at work on that does not come back may never be there.
                if lane.stalled or (entry is None and not self._enqueue(lane, block, 2 * lane.max_queued_bytes)):
                    lane.dropped += entry is None
                    request.incomplete += 1
                    continue
                request.owed += 1
                lane.owed.setdefault((block.namespace, block.key), []).append(request)
            lane.use(blocks, request.user)
            self._advance(lane)

    def promote(self, found: Sequence[tuple[SecondaryTierState, Block]], user: Hashable) -> None:
        """Loads blocks whose slots are reserved, one batch after another per tier (B3.16)."""
        for lane in self.lanes:
            blocks = [block for where, block in found if where is lane]
            while blocks:
                batch = _batch(blocks)
                del blocks[: len(batch)]
                for block in batch:
                    block.pins += 1
                job = self._begin(lane, JobKind.LOAD, batch)
                for entry in job.entries:
                    entry.loads += 1
                    lane.catalog.recount(entry)
                lane.use(batch, user)

    def retain(self, blocks: Sequence[Block]) -> None:
        """Retains blocks in the tiers that have them, for as long as each wants to stay."""
        for lane in self.lanes:
            lane.retain(blocks)

    def user_finished(self, user: Hashable) -> None:
        """Takes note that a request uses nothing any more."""
        for lane in self.lanes:
            lane.catalog.finish(user)

    def finish(self, job_id: JobId, outcomes: Sequence[Outcome]) -> FinishedJob | None:
        """Takes in a job's result; returns what became of it, or None for a job that is not known.

        The pins of a load's blocks are the caller's from here on; those of a store are dropped.
        """
        job = self._jobs.pop(job_id, None)
        if job is None:
            return None
        job.lane.jobs -= 1
        paid: list[Request] = []
        take = self._finish_store if job.kind is JobKind.STORE else self._finish_load
        results = []
        for number, (block, entry) in enumerate(zip(job.blocks, job.entries, strict=True)):
            # A tier that reports fewer outcomes than it was given blocks has failed for the rest.
            outcome = outcomes[number] if number < len(outcomes) else Outcome.FAILED
            if job.kind is JobKind.LOAD and outcome is Outcome.DONE and entry.nbytes != block.nbytes:
                # It has listed the block with another size than it fills now: one of the two is not true.
                outcome = Outcome.CORRUPT
                job.lane.doomed.append(entry)
            block.stuck = False
            take(job.lane, block, entry, outcome)
            results.append((block, outcome is Outcome.DONE))
            if job.kind is JobKind.STORE:
                paid += self._pay(job.lane, block.name, stored=outcome is Outcome.DONE)
        if job.kind is JobKind.STORE:
            job.lane.storing = False
        self._advance(job.lane)
        return FinishedJob(job.kind, results, paid)

    def lost(self, tier: int, names: Iterable[Name]) -> None:
        """Forgets blocks that a tier has put out of use because they are damaged.

        The tier is told to remove them all the same. By the time that this is heard it may have been given another block
        of that name, which nobody would know of:

            check    quarantines K
            loop     evicts K, stores K anew: the catalog has it again
            loop     hears that K is lost, and takes the new one for it
        """
        lane = self.lanes[tier - 1]
        for name in names:
            lane.damaged += 1
            lane.questions.forget(name)
            entry = lane.catalog.held(*name)
            if entry is None:  # or it is just being stored: what comes is sound
                continue
            lane.catalog.drop(entry)
            entry.state = EntryState.LOST
            self._left(*name, MissReason.LOAD_FAILED)
            if not entry.loads:  # else the end of the load sees to it: nothing is removed while it is being loaded
                lane.doomed.append(entry)
        self._advance(lane)

    def stall(self, tier: int, *, stalled: bool) -> StallChange:
        """Takes note of whether a tier comes back from its jobs.

        Jobs that run keep their pins: the tier may still read and write there. Whatever else waits is let go, or engines
        would soon have no room left in the CPU tier.
        """
        lane = self.lanes[tier - 1]
        change = StallChange(is_back=lane.stalled and not stalled)
        if lane.stalled == stalled:
            return change
        lane.stalled = stalled
        running = [job for job in self._jobs.values() if job.lane is lane]
        if stalled:
            for block in chain.from_iterable(job.blocks for job in running):
                block.stuck = True  # until its job has ended
            change.given_up += (b for job in running if job.kind is JobKind.LOAD for b in job.blocks if not b.retired)
            change.paid += self._let_go(lane)
        self._advance(lane)
        return change

    def catch_up(self, tier: int, blocks: Sequence[Block]) -> None:
        """Stores in a tier what it missed while it did not come back, as far as may wait for it; the last used first."""
        lane = self.lanes[tier - 1]
        for block in blocks:
            if lane.catalog.get(block.namespace, block.key) is not None:
                continue
            if not self._enqueue(lane, block, lane.max_queued_bytes):
                break
            block.left_out = None
            lane.use([block], None)
        self._advance(lane)

    def _let_go(self, lane: SecondaryTierState) -> list[Request]:
        """Lets go of what waits for a tier; returns the requests that it was owed to."""
        paid: list[Request] = []
        for block in lane.queue:
            entry = lane.entry_of(block)
            lane.catalog.drop(entry)
            lane.queued_bytes -= entry.nbytes
            lane.dropped += 1
            block.left_out = MissReason.STORE_FAILED
            self._unpin([block])
        lane.queue.clear()
        for name in list(lane.owed):
            paid += self._pay(lane, name, stored=False)
        return paid

    def _finish_store(self, lane: SecondaryTierState, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        lane.queued_bytes -= entry.nbytes
        if outcome is Outcome.DONE:
            entry.state = EntryState.HELD
            lane.catalog.recount(entry)
        else:
            block.left_out = MissReason.STORE_FAILED
            lane.catalog.drop(entry)
            # Nobody knows how far it came: what may be left of it must not take room that is not accounted for.
            lane.doomed.append(entry)
            if outcome is Outcome.NO_SPACE:
                # The storage holds less than was reckoned with (its disk is shared, say): without room it would stay stuck.
                lane.doomed += lane.catalog.make_room(entry.namespace, entry.nbytes)
        self._unpin([block])

    def _finish_load(self, lane: SecondaryTierState, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        entry.loads -= 1
        lane.catalog.recount(entry)
        if entry.state is EntryState.LOST:
            if (
                not entry.loads and lane.catalog.get(block.namespace, block.key) is None
            ):  # else it was stored anew meanwhile
                lane.doomed.append(entry)
                self._advance(lane)
            return
        lane.damaged += outcome is Outcome.CORRUPT
        if outcome in (Outcome.MISSING, Outcome.CORRUPT):
            lane.questions.forget(entry.name)
            if lane.catalog.get(block.namespace, block.key) is entry:
                lane.catalog.drop(entry)

    def _enqueue(self, lane: SecondaryTierState, block: Block, limit: int | None) -> bool:
        """Lets a block wait for a tier, unless more than `limit` bytes would, or it has no room or stalls; returns whether."""
        if lane.stalled or (limit is not None and lane.queued_bytes + block.nbytes > limit):
            return False
        victims = lane.catalog.begin_store(block.namespace, block.key, block.nbytes)
        if victims is None:
            return False
        lane.doomed += victims
        lane.queued_bytes += block.nbytes
        block.pins += 1
        lane.queue.append(block)
        return True

    def _pay(self, lane: SecondaryTierState, name: Name, *, stored: bool) -> list[Request]:
        """Takes a block off the account of the requests that a tier owed it to."""
        requests = lane.owed.pop(name, [])
        for request in requests:
            request.owed -= 1
            request.incomplete += not stored
        return requests

    def _advance(self, lane: SecondaryTierState) -> None:
        """Starts the next store of a tier, unless one runs: so what comes in meanwhile goes out in one batch."""
        if lane.storing or lane.stalled:
            return
        if lane.doomed:
            self._command(RemoveFromTier(lane.index, lane.take_doomed()))
        if lane.queue:
            batch = _batch(lane.queue)
            for _ in batch:
                lane.queue.popleft()
            lane.storing = True
            self._begin(lane, JobKind.STORE, batch)

    def _begin(self, lane: SecondaryTierState, kind: JobKind, blocks: Sequence[Block]) -> _Job:
        job_id = self._next_id()
        entries = [lane.entry_of(block) for block in blocks]
        job = self._jobs[job_id] = _Job(lane, kind, blocks, entries)
        lane.jobs += 1
        make = StoreInTier if kind is JobKind.STORE else LoadFromTier
        self._command(make(job_id, lane.index, blocks))
        return job

    def _next_id(self) -> JobId:
        self._last_id += 1
        return JobId(self._last_id)


def _batch(blocks: Iterable[Block]) -> list[Block]:
    """Returns as many of the first blocks as make up a job, at least one."""
    batch: list[Block] = []
    nbytes = 0
    for block in blocks:
        nbytes += block.nbytes
        if batch and nbytes > JOB_BYTES:
            break
        batch.append(block)
    return batch
