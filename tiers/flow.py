"""How blocks flow between the CPU tier and the tiers below: cascades down, promotions up.

Every block of a job is pinned until the job has ended (B3.8), so that its slots stay where they are.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .base import NamespaceId, Outcome, SecondaryTier
from .blocks import Block
from .catalog import Catalog, CatalogEntry, EntryState
from .commands import Command, JobId, LoadFromTier, RemoveFromTier, StoreInTier
from .policies import DEFAULT_POLICY, POLICIES
from .requests import Request
from .stats import TierStats

__all__ = ["Finished", "JobKind", "Lane", "TierFlow"]

JOB_BYTES = 32 << 20
"""How much one job moves at most: enough for transactions to pay off, little enough for results to come in time."""


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


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a job: which of its blocks succeeded, and the requests that it was owed to."""

    kind: JobKind
    results: list[tuple[Block, bool]]
    paid: list[Request]


class Lane:
    """One secondary tier as the core sees it: its catalog, its queue, its counters."""

    def __init__(self, index: int, tier: SecondaryTier, max_queued_bytes: int, policy: str) -> None:
        self.index = index
        """Position in the lookup order; the CPU tier is 0."""
        self.tier = tier
        self.catalog = Catalog(tier.capacity_bytes, POLICIES[policy])
        self.max_queued_bytes = max_queued_bytes
        self.queue: deque[Block] = deque()
        """Blocks that wait to be stored; each is pinned, and has its entry in the catalog."""
        self.doomed: list[CatalogEntry] = []
        """Evicted entries that the tier still has to remove, before the next store."""
        self.storing = False
        self.owed: dict[tuple[NamespaceId, bytes], list[Request]] = {}
        """Blocks on their way that requests insist on."""
        self.queued_bytes = 0
        """Size of what waits or is being stored."""
        self.jobs = 0
        self.hits = 0
        self.asked = 0
        self.dropped = 0
        """Blocks whose cascade was dropped: the queue or the tier was full."""
        self.damaged = 0
        """Blocks that the tier lost because they were damaged."""

    def use(self, blocks: Iterable[Block], user: Hashable) -> None:
        """Takes note that a request used these blocks, as far as they are here, given head first."""
        entries = (self.catalog.get(block.namespace, block.key) for block in blocks)
        self.catalog.use([entry for entry in entries if entry is not None], user)

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
            damaged=self.damaged,
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
        eviction: Mapping[str, str],
    ) -> None:
        """`max_queued_bytes` bounds, per tier, what may be pinned in the CPU tier while it waits to be stored."""
        self.lanes = [
            Lane(number, tier, max_queued_bytes, eviction.get(tier.name, DEFAULT_POLICY))
            for number, tier in enumerate(tiers, start=1)
        ]
        self._unpin = unpin
        self._command = command
        self._jobs: dict[JobId, _Job] = {}
        self._last_id = 0

    def recover(self) -> None:
        """Takes in what the tiers kept from an earlier life; removes what no longer fits."""
        for lane in self.lanes:
            lane.doomed += lane.catalog.recover(lane.tier.entries())
            self._advance(lane)

    def find(self, namespace: NamespaceId, key: bytes) -> Lane | None:
        """Returns the first tier that can load this block."""
        for lane in self.lanes:
            lane.asked += 1
            if lane.catalog.held(namespace, key) is not None:
                return lane
        return None

    def cascade(self, blocks: Sequence[Block], user: Hashable, *, even_if_busy: bool = False) -> None:
        """Stores ready blocks in every tier that lacks them; a tier that is too far behind is left out (B3.7, B3.10).

        `user` is the request that used the blocks, by the name that eviction policies know it by.
        """
        for lane in self.lanes:
            for block in blocks:
                if lane.catalog.get(block.namespace, block.key) is None:
                    limit = None if even_if_busy else lane.max_queued_bytes
                    block.left_out = not self._enqueue(lane, block, limit)
                    lane.dropped += block.left_out
            lane.use(blocks, user)
            self._advance(lane)

    def cascade_for(self, request: Request, blocks: Sequence[Block]) -> None:
        """Stores ready blocks in the tiers that insist on this request, and keeps account of what they are owed (B3.6).

        They may fall behind twice as far as others; what is beyond that makes the request incomplete, and it is said (B3.10).
        """
        for lane in self.lanes:
            if lane.index not in request.insisting:
                continue
            for block in blocks:
                entry = lane.catalog.get(block.namespace, block.key)
                if entry is not None and entry.state is EntryState.HELD:
                    continue
                if entry is None and not self._enqueue(lane, block, 2 * lane.max_queued_bytes):
                    lane.dropped += 1
                    request.incomplete += 1
                    continue
                request.owed += 1
                lane.owed.setdefault((block.namespace, block.key), []).append(request)
            lane.use(blocks, request.user)
            self._advance(lane)

    def promote(self, found: Sequence[tuple[Lane, Block]], user: Hashable) -> None:
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
                lane.catalog.use(job.entries, user)

    def user_finished(self, user: Hashable) -> None:
        """Takes note that a request uses nothing any more."""
        for lane in self.lanes:
            lane.catalog.finish(user)

    def finish(self, job_id: JobId, outcomes: Sequence[Outcome]) -> Finished | None:
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
            take(job.lane, block, entry, outcome)
            results.append((block, outcome is Outcome.DONE))
            if job.kind is JobKind.STORE:
                paid += self._pay(job.lane, block, stored=outcome is Outcome.DONE)
        if job.kind is JobKind.STORE:
            job.lane.storing = False
            self._advance(job.lane)
        return Finished(job.kind, results, paid)

    def lost(self, tier: int, names: Iterable[tuple[NamespaceId, bytes]]) -> None:
        """Forgets blocks that a tier has put out of use because they are damaged.

        The tier is told to remove them all the same. By the time that this is heard it may have been given another block
        of that name, which nobody would know of:

            check    quarantines K
            loop     evicts K, stores K anew: the catalog has it again
            loop     hears that K is lost, and takes the new one for it
        """
        lane = self.lanes[tier - 1]
        for namespace, key in names:
            lane.damaged += 1
            entry = lane.catalog.held(namespace, key)
            if entry is None:  # or it is just being stored: what comes is sound
                continue
            lane.catalog.drop(entry)
            if not entry.loads:  # else the end of the load sees to it: nothing is removed while it is being loaded
                lane.doomed.append(entry)
        self._advance(lane)

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
            lane.doomed.append(entry)
            if outcome is Outcome.NO_SPACE:
                # The storage holds less than was reckoned with (its disk is shared, say): without room it would stay stuck.
                lane.doomed += lane.catalog.make_room(entry.nbytes)
        self._unpin(block)

    def _finish_load(self, lane: Lane, block: Block, entry: CatalogEntry, outcome: Outcome) -> None:
        entry.loads -= 1
        known = lane.catalog.get(block.namespace, block.key)
        lane.damaged += outcome is Outcome.CORRUPT and known is entry
        if known is None and not entry.loads:  # lost while it was being loaded
            lane.doomed.append(entry)
            self._advance(lane)
        elif known is entry and outcome in (Outcome.MISSING, Outcome.CORRUPT):
            lane.catalog.drop(entry)

    def _enqueue(self, lane: Lane, block: Block, limit: int | None) -> bool:
        """Lets a block wait for a tier, unless more than `limit` bytes would, or the tier has no room; returns whether."""
        if limit is not None and lane.queued_bytes + block.nbytes > limit:
            return False
        victims = lane.catalog.begin_store(block.namespace, block.key, block.nbytes)
        if victims is None:
            return False
        lane.doomed += victims
        lane.queued_bytes += block.nbytes
        block.pins += 1
        lane.queue.append(block)
        return True

    def _pay(self, lane: Lane, block: Block, *, stored: bool) -> list[Request]:
        """Takes a block off the account of the requests that a tier owed it to."""
        requests = lane.owed.pop((block.namespace, block.key), [])
        for request in requests:
            request.owed -= 1
            request.incomplete += not stored
        return requests

    def _advance(self, lane: Lane) -> None:
        """Starts the next store of a tier, unless one runs: so what comes in meanwhile goes out in one batch."""
        if lane.storing:
            return
        if lane.doomed:
            self._command(RemoveFromTier(lane.index, [(entry.namespace, entry.key) for entry in lane.doomed]))
            lane.doomed = []
        if lane.queue:
            batch = _batch(lane.queue)
            for _ in batch:
                lane.queue.popleft()
            lane.storing = True
            self._begin(lane, JobKind.STORE, batch)

    def _begin(self, lane: Lane, kind: JobKind, blocks: Sequence[Block]) -> _Job:
        self._last_id += 1
        job_id = JobId(self._last_id)
        entries = [entry for block in blocks if (entry := lane.catalog.get(block.namespace, block.key))]
        job = self._jobs[job_id] = _Job(lane, kind, blocks, entries)
        lane.jobs += 1
        make = StoreInTier if kind is JobKind.STORE else LoadFromTier
        self._command(make(job_id, lane.index, blocks))
        return job


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
