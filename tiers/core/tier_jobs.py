"""Jobs of tiers: stores to and loads from the secondary tiers, in batches, and their results.

Every block of a job is pinned until the job has ended (B3.8), so that the slots stay valid.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat

from ..secondary_tier import NamespaceId, Outcome, SecondaryTier
from ..stats.eviction_history import EvictionHistory
from ..types import JobId, MissReason
from .block import Block
from .bulk_eviction import SecondaryTierSource
from .catalog import CatalogEntry, EntryState, UsedElsewhere
from .commands import Command, LoadFromTier, RemoveFromTier, StoreInTier
from .cpu_tier import CpuTier
from .event_log import EventLog
from .presence_cache import Name
from .requests import Request
from .residency import ResidencyIndex
from .secondary_state import SecondaryTierState
from .settings import TierSettings
from .write_back import WriteBack

__all__ = ["FinishedJob", "JobKind", "StallChange", "TierJobs"]

JOB_BYTES = 32 << 20
"""Size limit of a job: large enough for efficient transactions, small enough for quick results."""
JOB_BLOCKS = 1024
"""Limit of the blocks of a job. The event loop ends a job, and begins the next one, in one piece:
4 µs per block."""

MAX_EVICTED_IN_VAIN = 0.25
"""Largest part of a tier that is evicted while the tier refuses every block for lack of space."""


class JobKind(enum.Enum):
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
    """Result of a job: success per block, and the requests whose pending stores it ended."""

    kind: JobKind
    results: list[tuple[Block, bool]]
    acknowledged: list[Request]


@dataclass(slots=True)
class StallChange:
    """Consequences of a tier that has stalled or recovered.

    Attributes:
        abandoned: blocks that the tier is loading; readers no longer wait for them.
        acknowledged: requests whose pending stores in the tier have ended.
        is_back: whether the tier has recovered.
    """

    is_back: bool
    abandoned: list[Block] = field(default_factory=list)
    acknowledged: list[Request] = field(default_factory=list)


class TierJobs:
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
        events: EventLog | None = None,
    ) -> None:
        """`max_queued_bytes` limits each write-back queue, because queued blocks are pinned.

        Raises ValueError if the quotas of a tier exceed its capacity.
        """
        self.secondaries = [
            SecondaryTierState(
                index=index,
                tier=tier,
                queues=settings.new_queues(tier.name, tier.capacity_bytes, now),
                max_queued_bytes=max_queued_bytes,
                history=history,
                new_admission=settings.new_admission(tier.name),
                events=events,
            )
            for index, tier in enumerate(tiers, start=1)
        ]
        self.write_back = WriteBack(self.secondaries, cpu_tier, self._advance)
        self._cpu_tier = cpu_tier
        self._history = history
        self._commands = commands
        self._jobs: dict[JobId, _Job] = {}
        self._wrong: set[Block] = set()
        """Blocks that no tier may keep, although a store of them may be queued or running."""
        self._last_id = 0
        self.residency = ResidencyIndex(self.secondaries, new_id=self._next_id, commands=commands)

    def store_missing(self, blocks: Sequence[Block]) -> None:
        """Stores ready blocks in each local tier that lacks them and has room for them.

        A tier with an admission filter may lack them because of its filter.
        """
        for secondary in self.write_back.storing:
            catalog, lacking = secondary.catalog, list[Block]()
            room = catalog.capacity_bytes - catalog.used_bytes
            for block in blocks if secondary.admission is None and not secondary.tier.shared else ():
                if block.ready and not block.invalidated and catalog.get(block.namespace, block.key) is None:
                    room -= block.nbytes
                    if room < 0:
                        break
                    lacking.append(block)
            if lacking:
                self.write_back.replay_skipped(secondary.index, lacking)

    def recover(self) -> None:
        """Adds the blocks that tiers kept from an earlier run; removes blocks that do not fit."""
        for secondary in self.secondaries:
            secondary.pending_removals += secondary.catalog.recover(secondary.tier.entries())
            self._advance(secondary)

    def sources(self, used_in_cpu: UsedElsewhere) -> list[SecondaryTierSource]:
        """Returns, per tier in lookup order, the object that lists and evicts the tier's blocks."""
        return [SecondaryTierSource(secondary, used_in_cpu, self._advance) for secondary in self.secondaries]

    def tick(self, now: float, used_in_cpu: UsedElsewhere) -> bool:
        """Advances the time, handles some expired entries; returns whether any are left."""
        for secondary in self.secondaries:
            secondary.tick(now, used_in_cpu)
            self._advance(secondary)
        return any(secondary.catalog.queues.overdue for secondary in self.secondaries)

    def promote(self, found: Sequence[tuple[SecondaryTierState, Block]], user: Hashable) -> None:
        """Loads blocks with reserved slots, in batches per tier (B3.16)."""
        for secondary in self.secondaries:
            blocks = [block for where, block in found if where is secondary]
            while blocks:
                batch = _batch(blocks)
                del blocks[: len(batch)]
                for block in batch:
                    block.pins += 1
                job = self._begin(secondary, JobKind.LOAD, batch)
                secondary.catalog.recount(job.entries, loads=1)
                secondary.use(batch, user)

    def retain(self, blocks: Sequence[Block]) -> None:
        for secondary in self.secondaries:
            secondary.retain(blocks)

    def retire(self, namespace: NamespaceId) -> None:
        """Makes a namespace's blocks the first victims of every tier."""
        for secondary in self.secondaries:
            secondary.catalog.retire(namespace)

    def request_finished(self, user: Hashable) -> None:
        for secondary in self.secondaries:
            secondary.catalog.finish(user)

    def finish(self, job_id: JobId, outcomes: Sequence[Outcome]) -> FinishedJob | None:
        """Handles a job's result; returns None for an unknown job.

        Unpins the blocks of a store. The caller must unpin the blocks of a load.
        """
        job = self._jobs.pop(job_id, None)
        if job is None:
            return None
        secondary, acknowledged = job.secondary, list[Request]()
        secondary.jobs -= 1
        # Missing outcomes count as failures.
        outcomes = list(islice(chain(outcomes, repeat(Outcome.FAILED)), len(job.blocks)))
        if self._wrong and job.kind is JobKind.STORE:
            wrong, self._wrong = self._wrong, {block for block in self._wrong if block.pins}
            pairs = zip(job.blocks, outcomes, strict=True)
            outcomes = [Outcome.CORRUPT if block in wrong else outcome for block, outcome in pairs]
        for block in job.blocks:
            block.stalled = False
        if job.kind is JobKind.LOAD:
            self._finish_loads(job, outcomes)
        results = [(block, outcome is Outcome.DONE) for block, outcome in zip(job.blocks, outcomes, strict=True)]
        moved = sum([entry.nbytes for entry, (_, done) in zip(job.entries, results, strict=True) if done])
        if job.kind is JobKind.LOAD:
            secondary.loaded_bytes += moved
        else:
            for block, entry, outcome in zip(job.blocks, job.entries, outcomes, strict=True):
                self._finish_store(secondary, block, entry, outcome)
                acknowledged += self.write_back.acknowledge(secondary, block.name, stored=outcome is Outcome.DONE)
            secondary.stored_bytes += moved
            secondary.stores -= 1
        self._advance(secondary)
        return FinishedJob(job.kind, results, acknowledged)

    def lost(self, tier: int, names: Collection[Name]) -> None:
        """Drops entries of blocks that a tier has quarantined because they are damaged.

        The damage is reported late: the tier may already hold a new block of the same name when
        this call runs. The call cannot tell the two blocks apart and drops the entry of the new
        block. The tier must then remove the new block too; otherwise its bytes would stay in the
        tier without an entry.
        """
        self.secondaries[tier - 1].damaged += len(names)
        self.drop(tier, names)

    def remove_wrong(self, blocks: Sequence[Block]) -> None:
        """Removes blocks that the CPU tier does not have any more from all tiers.

        A tier that is storing a block removes it after the store.
        """
        self._wrong.update(block for block in blocks if block.pins)
        for tier in range(1, 1 + len(self.secondaries)):
            self.drop(tier, [block.name for block in blocks])

    def drop(self, tier: int, names: Iterable[Name]) -> None:
        """Drops the entries of blocks, and removes the blocks from the tier at this position."""
        secondary = self.secondaries[tier - 1]
        for name in names:
            secondary.presence_cache.forget(name)
            entry = secondary.catalog.held(*name)
            if entry is None:  # unknown, or being stored again: the new block is intact
                continue
            secondary.catalog.drop(entry)
            entry.state = EntryState.LOST
            self._history.record(*name, MissReason.LOAD_FAILED)
            # While a load runs, the block is not removed; the end of the load removes it.
            if not entry.loads:
                secondary.pending_removals.append(entry)
        self._advance(secondary)

    def stall(self, tier: int, *, stalled: bool) -> StallChange:
        """Called when a job of a tier takes too long, and when the tier has recovered.

        Blocks of running jobs stay pinned, because the tier may still access them. The write-back
        queue is discarded, because its pinned blocks would soon fill the CPU tier.
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
            change.abandoned += (
                b for job in running if job.kind is JobKind.LOAD for b in job.blocks if not b.invalidated
            )
            change.acknowledged += self.write_back.abandon_queue(secondary)
        self._advance(secondary)
        return change

    def _finish_store(self, secondary: SecondaryTierState, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        secondary.queued_bytes -= entry.nbytes
        if outcome is Outcome.DONE:
            secondary.catalog.stored(entry)
            secondary.evicted_in_vain_bytes = 0
            if secondary.tier.shared:
                secondary.presence_cache.set(entry.name, there=True, now=secondary.catalog.queues.now)
        else:
            block.skip_reason = MissReason.STORE_FAILED
            secondary.catalog.drop(entry)
            # The tier must remove bytes that it may have written: the catalog does not count them.
            secondary.pending_removals.append(entry)
            if outcome is Outcome.NO_SPACE:
                secondary.dropped += 1
                if not secondary.tier.shared:
                    self._evict_for_space(secondary, entry)
        self._cpu_tier.unpin([block])

    @staticmethod
    def _evict_for_space(secondary: SecondaryTierState, refused: CatalogEntry) -> None:
        """Evicts as many bytes as a block that the tier had no space for.

        The storage has less room than configured, e.g. on a shared disk. The catalog still sees
        free space and would not evict by itself. If evictions do not help, they end after
        `MAX_EVICTED_IN_VAIN`. The next stored block allows further evictions.
        """
        in_vain, catalog = secondary.evicted_in_vain_bytes, secondary.catalog
        if in_vain > MAX_EVICTED_IN_VAIN * (in_vain + catalog.used_bytes):
            return
        evicted = catalog.make_room(refused.namespace, refused.nbytes)
        secondary.evicted_in_vain_bytes += sum(entry.nbytes for entry in evicted)
        secondary.pending_removals += evicted

    def _finish_loads(self, job: _Job, outcomes: list[Outcome]) -> None:
        """Ends the loads of a job. Changes the outcomes of blocks with a wrong size."""
        secondary, done = job.secondary, Outcome.DONE
        secondary.catalog.recount(job.entries, loads=-1)
        for number, (block, entry) in enumerate(zip(job.blocks, job.entries, strict=True)):
            if outcomes[number] is done and entry.nbytes != block.nbytes:
                # The entry that the tier had listed has another size than the loaded block.
                outcomes[number] = Outcome.CORRUPT
                secondary.pending_removals.append(entry)
            if outcomes[number] is not done or entry.state is EntryState.LOST or secondary.tier.on_demand:
                self._finish_load(secondary, block, entry, outcomes[number])

    def _finish_load(self, secondary: SecondaryTierState, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        if entry.state is EntryState.LOST:
            # If the catalog has a new block of this name, a removal would delete the new block.
            if not entry.loads and secondary.catalog.get(block.namespace, block.key) is None:
                secondary.pending_removals.append(entry)
                self._advance(secondary)
            return
        secondary.damaged += outcome is Outcome.CORRUPT
        if outcome is not Outcome.DONE or secondary.tier.on_demand:
            secondary.presence_cache.forget(entry.name)
        gone = outcome in (Outcome.MISSING, Outcome.CORRUPT)
        if gone and secondary.catalog.get(block.namespace, block.key) is entry:
            secondary.catalog.drop(entry)

    def _advance(self, secondary: SecondaryTierState) -> None:
        """Sends removals and starts stores, as many as the tier permits, unless it is stalled."""
        if secondary.stores >= secondary.tier.parallel_stores or secondary.stalled:
            return
        if secondary.pending_removals:
            names = secondary.take_pending_removals()
            if not secondary.tier.shared:
                self._commands.append(RemoveFromTier(secondary.index, names))
        while secondary.write_back_queue and secondary.stores < secondary.tier.parallel_stores:
            if secondary.is_gathering():
                return
            batch = _batch(secondary.write_back_queue)
            secondary.dequeue(batch)
            secondary.stores += 1
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
    """Returns the first blocks up to the size of a job, at least one."""
    batch: list[Block] = []
    nbytes = 0
    for block in blocks:
        nbytes += block.nbytes
        if batch and (nbytes > JOB_BYTES or len(batch) == JOB_BLOCKS):
            break
        batch.append(block)
    return batch
