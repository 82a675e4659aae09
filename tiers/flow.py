"""How blocks flow between the CPU tier and the tiers below: cascades down, promotions up.

Every block of a job is pinned until the job has ended (B3.8), so that its slots stay where they are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .base import NamespaceId, Outcome, SecondaryTier
from .blocks import Block
from .catalog import Catalog, CatalogEntry, EntryState
from .commands import Command, JobId, LoadFromTier, RemoveFromTier, StoreInTier
from .policies import LRU
from .stats import TierStats

__all__ = ["JobKind", "Lane", "TierFlow"]

JOB_BYTES = 32 << 20
"""How much one job moves: large enough for one LMDB transaction to pay off, small enough for results to come in time."""


class JobKind(enum.Enum):
    """Which way a job moves blocks."""

    STORE = enum.auto()
    LOAD = enum.auto()


@dataclass(frozen=True, slots=True)
class _Job:
    lane: Lane
    kind: JobKind
    blocks: Sequence[Block]
    entries: Sequence[CatalogEntry]


class Lane:
    """One secondary tier as the core sees it: its catalog, its queue, its counters."""

    def __init__(self, index: int, tier: SecondaryTier, max_queued_bytes: int) -> None:
        self.index = index
        """Position in the lookup order; the CPU tier is 0."""
        self.tier = tier
        self.catalog = Catalog(tier.capacity_bytes, LRU)
        self.max_queued_bytes = max_queued_bytes
        self.queued_bytes = 0
        self.jobs = 0
        self.hits = 0
        self.asked = 0
        self.dropped = 0
        """Blocks whose cascade was dropped: the queue or the tier was full."""

    def stats(self) -> TierStats:
        """Returns the figures of this moment."""
        return TierStats(
            name=self.tier.name,
            type=self.tier.type,
            capacity_bytes=self.catalog.capacity_bytes,
            available_bytes=self.catalog.capacity_bytes,
            used_bytes=self.catalog.used_bytes,
            blocks=len(self.catalog),
            hits=self.hits,
            misses=self.asked - self.hits,
            evictions=self.catalog.evictions,
            dropped=self.dropped,
            jobs=self.jobs,
            healthy=self.tier.trouble is None,
            trouble=self.tier.trouble or "",
        )


class TierFlow:
    """Plans jobs for the secondary tiers and takes in their results."""

    def __init__(
        self,
        tiers: Sequence[SecondaryTier],
        max_queued_bytes: int,
        unpin: Callable[[Block], None],
        command: Callable[[Command], None],
    ) -> None:
        """`max_queued_bytes` bounds, per tier, what may be pinned in the CPU tier while it waits to be stored."""
        self.lanes = [Lane(number + 1, tier, max_queued_bytes) for number, tier in enumerate(tiers)]
        self._unpin = unpin
        self._command = command
        self._jobs: dict[JobId, _Job] = {}
        self._last_id = 0

    def recover(self) -> None:
        """Takes in what the tiers kept from an earlier life; removes what no longer fits."""
        for lane in self.lanes:
            self._remove(lane, lane.catalog.recover(lane.tier.entries()))

    def find(self, namespace: NamespaceId, key: bytes) -> Lane | None:
        """Returns the first tier that can load this block."""
        for lane in self.lanes:
            lane.asked += 1
            if lane.catalog.held(namespace, key) is not None:
                return lane
        return None

    def cascade(self, blocks: Sequence[Block], *, even_if_busy: bool = False) -> None:
        """Stores ready blocks in every tier that lacks them; a tier that is too far behind is left out (B3.7)."""
        for lane in self.lanes:
            planned: list[Block] = []
            evicted: list[CatalogEntry] = []
            for block in blocks:
                if lane.catalog.get(block.namespace, block.key) is not None:
                    continue
                busy = lane.queued_bytes + block.nbytes > lane.max_queued_bytes and not even_if_busy
                victims = None if busy else lane.catalog.begin_store(block.namespace, block.key, block.nbytes)
                if victims is None:
                    lane.dropped += 1
                    continue
                evicted += victims
                lane.queued_bytes += block.nbytes
                planned.append(block)
            self._remove(lane, evicted)
            for batch in _batches(planned):
                self._submit(lane, JobKind.STORE, batch)

    def promote(self, found: Sequence[tuple[Lane, Block]]) -> None:
        """Loads blocks whose slots are reserved, one batch after another per tier (B3.16)."""
        for lane in self.lanes:
            blocks = [block for where, block in found if where is lane]
            for batch in _batches(blocks):
                self._submit(lane, JobKind.LOAD, batch)

    def finish(self, job_id: JobId, outcomes: Sequence[Outcome]) -> tuple[JobKind, list[tuple[Block, bool]]] | None:
        """Takes in a job's result; returns its kind and which blocks succeeded, or None for a job that is not known.

        The pins of a load's blocks are the caller's from here on; those of a store are dropped.
        """
        job = self._jobs.pop(job_id, None)
        if job is None:
            return None
        job.lane.jobs -= 1
        take = self._finish_store if job.kind is JobKind.STORE else self._finish_load
        results = []
        for number, (block, entry) in enumerate(zip(job.blocks, job.entries, strict=True)):
            # A tier that reports fewer outcomes than it was given blocks has failed for the rest.
            outcome = outcomes[number] if number < len(outcomes) else Outcome.FAILED
            take(job.lane, block, entry, outcome)
            results.append((block, outcome is Outcome.DONE))
        return job.kind, results

    def is_durable(self, namespace: NamespaceId, key: bytes) -> bool:
        """Returns whether a tier that survives restarts holds this block."""
        return any(lane.tier.durable and lane.catalog.held(namespace, key) for lane in self.lanes)

    def is_becoming_durable(self, namespace: NamespaceId, key: bytes) -> bool:
        """Returns whether a store to a tier that survives restarts is on its way."""
        return any(lane.tier.durable and lane.catalog.get(namespace, key) for lane in self.lanes)

    def _finish_store(self, lane: Lane, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        lane.queued_bytes -= entry.nbytes
        if outcome is Outcome.DONE:
            entry.state = EntryState.HELD
        else:
            lane.catalog.drop(entry)
            # Nobody knows how far it came: what may be left of it must not take room that is not accounted for.
            self._remove(lane, [entry])
        self._unpin(block)

    def _finish_load(self, lane: Lane, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        entry.loads -= 1
        if outcome in (Outcome.MISSING, Outcome.CORRUPT) and lane.catalog.get(block.namespace, block.key) is entry:
            lane.catalog.drop(entry)

    def _submit(self, lane: Lane, kind: JobKind, blocks: Sequence[Block]) -> None:
        self._last_id += 1
        job_id = JobId(self._last_id)
        entries = [entry for block in blocks if (entry := lane.catalog.get(block.namespace, block.key))]
        for block in blocks:
            block.pins += 1
        if kind is JobKind.LOAD:
            for entry in entries:
                entry.loads += 1
            lane.catalog.touch(entries)
        self._jobs[job_id] = _Job(lane, kind, blocks, entries)
        lane.jobs += 1
        make = StoreInTier if kind is JobKind.STORE else LoadFromTier
        self._command(make(job_id, lane.index, blocks))

    def _remove(self, lane: Lane, entries: Sequence[CatalogEntry]) -> None:
        if entries:
            self._command(RemoveFromTier(lane.index, [(entry.namespace, entry.key) for entry in entries]))


def _batches(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    batch: list[Block] = []
    nbytes = 0
    for block in blocks:
        if batch and nbytes + block.nbytes > JOB_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(block)
        nbytes += block.nbytes
    if batch:
        yield batch
