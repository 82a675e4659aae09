"""How blocks flow between the CPU tier and the tiers below: cascades down, promotions up.

Every block of a job is pinned until the job has ended (B3.8), so that its slots stay where they are.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ..base import Outcome, SecondaryTier
from ..stats.eviction_history import EvictionHistory
from ..types import JobId, MissReason
from .block import Block
from .bulk_eviction import SecondaryTierSource
from .catalog import CatalogEntry, EntryState, UsedElsewhere
from .commands import Command, LoadFromTier, RemoveFromTier, StoreInTier
from .cpu_tier import CpuTier
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
    secondary: SecondaryTierState
    kind: JobKind
    blocks: Sequence[Block]
    entries: Sequence[CatalogEntry]


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """What became of a job: which of its blocks succeeded, and the requests that it was owed to."""

    kind: JobKind
    results: list[tuple[Block, bool]]
    acknowledged: list[Request]


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
    acknowledged: list[Request] = field(default_factory=list)


class TransferScheduler:
    """Plans jobs for the secondary tiers and takes in their results."""

    def __init__(
        self,
        *,
        tiers: Sequence[SecondaryTier],
        settings: TierSettings,
        now: float,
        max_queued_bytes: int,
        cpu_tier: CpuTier,
        history: EvictionHistory,
        commands: list[Command],
    ) -> None:
        """`max_queued_bytes` limits, per tier, the bytes pinned in the CPU tier by blocks that wait to be stored.

        Raises:
            ValueError: the quotas of a tier exceed its capacity.
        """
        self.secondaries = [
            SecondaryTierState(
                index=index,
                tier=tier,
                queues=settings.new_queues(tier.name, tier.capacity_bytes, now),
                max_queued_bytes=max_queued_bytes,
                history=history,
                new_admission=settings.new_admission(tier.name),
            )
            for index, tier in enumerate(tiers, start=1)
        ]
        self._choosy = [secondary for secondary in self.secondaries if secondary.admission is not None]
        self._cpu_tier = cpu_tier
        self._history = history
        self._commands = commands
        self._jobs: dict[JobId, _Job] = {}
        self._last_id = 0
        self.residency = ResidencyIndex(self.secondaries, new_id=self._next_id, commands=commands)
        """Which of the tiers has a block."""

    def recover(self) -> None:
        """Takes in what the tiers kept from an earlier life; removes what no longer fits."""
        for secondary in self.secondaries:
            secondary.pending_removals += secondary.catalog.recover(secondary.tier.entries())
            self._advance(secondary)

    def sources(self, used_in_cpu: UsedElsewhere) -> list[SecondaryTierSource]:
        """Returns what the tiers hold, in lookup order, to be parted with."""
        return [SecondaryTierSource(secondary, used_in_cpu, self._advance) for secondary in self.secondaries]

    def tick(self, now: float, used_in_cpu: UsedElsewhere) -> bool:
        """Lets time pass in the tiers; returns whether the time of more blocks is over than were looked at."""
        for secondary in self.secondaries:
            secondary.tick(now, used_in_cpu)
            self._advance(secondary)
        return any(secondary.catalog.queues.overdue for secondary in self.secondaries)

    def cascade(self, blocks: Sequence[Block], user: Hashable, *, even_if_busy: bool = False) -> None:
        """Stores ready blocks in every tier that lacks them; a tier that is too far behind is left out (B3.7, B3.10).

        `user` is the request that used the blocks, by the name that eviction policies know it by. What a tier does not
        admit yet may go there when it is used again (`used`).
        """
        blocks = [block for block in blocks if not block.hold_only]
        for block in blocks:
            block.skip_reason = None
        for secondary in self.secondaries:
            for block in blocks:
                if secondary.catalog.get(block.namespace, block.key) is None:
                    if not even_if_busy and not secondary.admits(block, user):
                        block.skip_reason = MissReason.POLICY
                        continue
                    limit = None if even_if_busy else secondary.max_queued_bytes
                    if not self._enqueue(secondary, block, limit):
                        block.skip_reason = MissReason.STORE_FAILED
                        secondary.dropped += 1
            secondary.use(blocks, user)
            self._advance(secondary)

    def used(self, blocks: Sequence[Block], user: Hashable) -> None:
        """Offers blocks that a request has found in the CPU tier to the tiers that choose what they take in."""
        blocks = [block for block in blocks if not block.hold_only] if self._choosy else blocks
        for secondary in self._choosy:
            taken = []
            for block in blocks:
                if (
                    block.ready
                    and secondary.catalog.get(block.namespace, block.key) is None
                    and secondary.admits(block, user)
                ):
                    if self._enqueue(secondary, block, secondary.max_queued_bytes):
                        block.skip_reason = None
                        taken.append(block)
                    else:
                        block.skip_reason = MissReason.STORE_FAILED
                        secondary.dropped += 1
            secondary.use(taken, user)
            self._advance(secondary)

    def cascade_for(self, request: Request, blocks: Sequence[Block]) -> None:
        """Stores ready blocks in the tiers that insist on this request, and keeps account of what they are owed (B3.6).

        They may fall behind twice as far as others; what is beyond that makes the request incomplete, and it is said (B3.10).
        """
        blocks = [block for block in blocks if not block.hold_only]
        for secondary in self.secondaries:
            if secondary.index not in request.request_level_tiers:
                continue
            for block in blocks:
                entry = secondary.catalog.get(block.namespace, block.key)
                if entry is not None and entry.state is EntryState.HELD:
                    continue
                # What a tier is at work on that does not come back may never be there.
                if secondary.stalled or (
                    entry is None and not self._enqueue(secondary, block, 2 * secondary.max_queued_bytes)
                ):
                    secondary.dropped += entry is None
                    request.incomplete += 1
                    continue
                request.pending_stores += 1
                secondary.pending_stores.setdefault((block.namespace, block.key), []).append(request)
            secondary.use(blocks, request.user)
            self._advance(secondary)

    def promote(self, found: Sequence[tuple[SecondaryTierState, Block]], user: Hashable) -> None:
        """Loads blocks whose slots are reserved, one batch after another per tier (B3.16)."""
        for secondary in self.secondaries:
            blocks = [block for where, block in found if where is secondary]
            while blocks:
                batch = _batch(blocks)
                del blocks[: len(batch)]
                for block in batch:
                    block.pins += 1
                job = self._begin(secondary, JobKind.LOAD, batch)
                for entry in job.entries:
                    entry.loads += 1
                    secondary.catalog.recount(entry)
                secondary.use(batch, user)

    def retain(self, blocks: Sequence[Block]) -> None:
        """Retains blocks in the tiers that have them, for as long as each wants to stay."""
        for secondary in self.secondaries:
            secondary.retain(blocks)

    def user_finished(self, user: Hashable) -> None:
        """Takes note that a request uses nothing any more."""
        for secondary in self.secondaries:
            secondary.catalog.finish(user)

    def finish(self, job_id: JobId, outcomes: Sequence[Outcome]) -> FinishedJob | None:
        """Takes in a job's result; returns what became of it, or None for a job that is not known.

        The pins of a load's blocks are the caller's from here on; those of a store are dropped.
        """
        job = self._jobs.pop(job_id, None)
        if job is None:
            return None
        job.secondary.jobs -= 1
        acknowledged: list[Request] = []
        take = self._finish_store if job.kind is JobKind.STORE else self._finish_load
        results = []
        for number, (block, entry) in enumerate(zip(job.blocks, job.entries, strict=True)):
            # A tier that reports fewer outcomes than it was given blocks has failed for the rest.
            outcome = outcomes[number] if number < len(outcomes) else Outcome.FAILED
            if job.kind is JobKind.LOAD and outcome is Outcome.DONE and entry.nbytes != block.nbytes:
                # It has listed the block with another size than it fills now: one of the two is not true.
                outcome = Outcome.CORRUPT
                job.secondary.pending_removals.append(entry)
            block.stalled = False
            take(job.secondary, block, entry, outcome)
            results.append((block, outcome is Outcome.DONE))
            if job.kind is JobKind.STORE:
                acknowledged += self._acknowledge(job.secondary, block.name, stored=outcome is Outcome.DONE)
        if job.kind is JobKind.STORE:
            job.secondary.storing = False
        self._advance(job.secondary)
        return FinishedJob(job.kind, results, acknowledged)

    def lost(self, tier: int, names: Iterable[Name]) -> None:
        """Forgets blocks that a tier has put out of use because they are damaged.

        The tier is told to remove them all the same. By the time that this is heard it may have been given another block
        of that name, which nobody would know of:

            check    quarantines K
            loop     evicts K, stores K anew: the catalog has it again
            loop     hears that K is lost, and takes the new one for it
        """
        secondary = self.secondaries[tier - 1]
        for name in names:
            secondary.damaged += 1
            secondary.presence_cache.forget(name)
            entry = secondary.catalog.held(*name)
            if entry is None:  # or it is just being stored: what comes is sound
                continue
            secondary.catalog.drop(entry)
            entry.state = EntryState.LOST
            self._history.record(*name, MissReason.LOAD_FAILED)
            if not entry.loads:  # else the end of the load sees to it: nothing is removed while it is being loaded
                secondary.pending_removals.append(entry)
        self._advance(secondary)

    def stall(self, tier: int, *, stalled: bool) -> StallChange:
        """Takes note of whether a tier comes back from its jobs.

        Jobs that run keep their pins: the tier may still read and write there. Whatever else waits is let go, or engines
        would soon have no room left in the CPU tier.
        """
        secondary = self.secondaries[tier - 1]
        change = StallChange(is_back=secondary.stalled and not stalled)
        if secondary.stalled == stalled:
            return change
        secondary.stalled = stalled
        running = [job for job in self._jobs.values() if job.secondary is secondary]
        if stalled:
            for block in chain.from_iterable(job.blocks for job in running):
                block.stalled = True  # until its job has ended
            change.given_up += (
                b for job in running if job.kind is JobKind.LOAD for b in job.blocks if not b.invalidated
            )
            change.acknowledged += self._abandon_queue(secondary)
        self._advance(secondary)
        return change

    def catch_up(self, tier: int, blocks: Sequence[Block]) -> None:
        """Stores in a tier what it missed while it did not come back, as far as may wait for it; the last used first."""
        secondary = self.secondaries[tier - 1]
        for block in blocks:
            if secondary.catalog.get(block.namespace, block.key) is not None:
                continue
            if not self._enqueue(secondary, block, secondary.max_queued_bytes):
                break
            block.skip_reason = None
            secondary.use([block], None)
        self._advance(secondary)

    def _abandon_queue(self, secondary: SecondaryTierState) -> list[Request]:
        """Lets go of what waits for a tier; returns the requests that it was owed to."""
        acknowledged: list[Request] = []
        for block in secondary.write_back_queue:
            entry = secondary.entry_of(block)
            secondary.catalog.drop(entry)
            secondary.queued_bytes -= entry.nbytes
            secondary.dropped += 1
            block.skip_reason = MissReason.STORE_FAILED
            self._cpu_tier.unpin([block])
        secondary.write_back_queue.clear()
        for name in list(secondary.pending_stores):
            acknowledged += self._acknowledge(secondary, name, stored=False)
        return acknowledged

    def _finish_store(self, secondary: SecondaryTierState, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        secondary.queued_bytes -= entry.nbytes
        if outcome is Outcome.DONE:
            entry.state = EntryState.HELD
            secondary.catalog.recount(entry)
        else:
            block.skip_reason = MissReason.STORE_FAILED
            secondary.catalog.drop(entry)
            # Nobody knows how far it came: what may be left of it must not take room that is not accounted for.
            secondary.pending_removals.append(entry)
            if outcome is Outcome.NO_SPACE:
                # The storage holds less than was reckoned with (its disk is shared, say): without room it would stay stuck.
                secondary.pending_removals += secondary.catalog.make_room(entry.namespace, entry.nbytes)
        self._cpu_tier.unpin([block])

    def _finish_load(self, secondary: SecondaryTierState, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        entry.loads -= 1
        secondary.catalog.recount(entry)
        if entry.state is EntryState.LOST:
            if (
                not entry.loads and secondary.catalog.get(block.namespace, block.key) is None
            ):  # else it was stored anew meanwhile
                secondary.pending_removals.append(entry)
                self._advance(secondary)
            return
        secondary.damaged += outcome is Outcome.CORRUPT
        if outcome in (Outcome.MISSING, Outcome.CORRUPT):
            secondary.presence_cache.forget(entry.name)
            if secondary.catalog.get(block.namespace, block.key) is entry:
                secondary.catalog.drop(entry)

    def _enqueue(self, secondary: SecondaryTierState, block: Block, limit: int | None) -> bool:
        """Lets a block wait for a tier, unless more than `limit` bytes would, or it has no room or stalls; returns whether."""
        if secondary.stalled or (limit is not None and secondary.queued_bytes + block.nbytes > limit):
            return False
        victims = secondary.catalog.begin_store(block.namespace, block.key, block.nbytes)
        if victims is None:
            return False
        secondary.pending_removals += victims
        secondary.queued_bytes += block.nbytes
        block.pins += 1
        secondary.write_back_queue.append(block)
        return True

    def _acknowledge(self, secondary: SecondaryTierState, name: Name, *, stored: bool) -> list[Request]:
        """Takes a block off the account of the requests that a tier owed it to."""
        requests = secondary.pending_stores.pop(name, [])
        for request in requests:
            request.pending_stores -= 1
            request.incomplete += not stored
        return requests

    def _advance(self, secondary: SecondaryTierState) -> None:
        """Starts the next store of a tier, unless one runs: so what comes in meanwhile goes out in one batch."""
        if secondary.storing or secondary.stalled:
            return
        if secondary.pending_removals:
            self._commands.append(RemoveFromTier(secondary.index, secondary.take_pending_removals()))
        if secondary.write_back_queue:
            batch = _batch(secondary.write_back_queue)
            for _ in batch:
                secondary.write_back_queue.popleft()
            secondary.storing = True
            self._begin(secondary, JobKind.STORE, batch)

    def _begin(self, secondary: SecondaryTierState, kind: JobKind, blocks: Sequence[Block]) -> _Job:
        job_id = self._next_id()
        entries = [secondary.entry_of(block) for block in blocks]
        job = self._jobs[job_id] = _Job(secondary, kind, blocks, entries)
        secondary.jobs += 1
        make = StoreInTier if kind is JobKind.STORE else LoadFromTier
        self._commands.append(make(job_id, secondary.index, blocks))
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
