"""Saves of the offload core: chooses blocks to store, and holds them during the save (B4, B5).

"Offer" means: add a block to a save job. A block is offered in the step that fills the block: in
prefill, recomputation or decode. Workers copy the block after that step's compute. Until every
worker has reported the copy, the core holds an additional reference to the block in the engine's
block pool. So the engine does not overwrite the block, even if the request ends, is preempted or
moves its sliding window. Two alternatives are worse. If each step waited for its copies, every step
would take longer by the copy and two round trips. If the end of each request waited for its copies,
blocks that the engine frees before the end of the request would not be protected.

Blocks found in the engine's own prefix cache are offered too. The server answers "present" for
blocks that it has. If the server has lost a block (eviction, restart), the block is stored again
(B4.15). A block that a worker could not store is offered again at growing intervals, and when the
request ends (B3.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from ...protos.backoff import Backoff
from .model import (
    BlockPool,
    BlockTables,
    CacheGeometry,
    CacheGroup,
    CacheGroupKind,
    ContentOf,
    EngineRequest,
    FreeBlock,
    SaveJob,
)

__all__ = ["DueRequests", "EndedSave", "SavePlanner", "SaveProgress", "store_backoff"]

# Up to this time it is cheaper to wait for a save than to recompute a preempted request.
_SHORT_WAIT_S = 0.5

store_backoff = partial(Backoff, 1.0, 30.0)
"""Wait before blocks that could not be stored are offered again."""


@dataclass
class SaveProgress:
    """Records which blocks of one request have been offered.

    ``next_position``: per group, the first position that was not offered.
    ``next_full_at``: number of computed tokens at which the next block is full.
    ``loaded``: tokens loaded from the server, whose blocks are not offered. The range is empty if a
    tier must receive all blocks of the request (B1.1).
    ``audited``: tokens of a hit that are computed again; workers compare their blocks.
    ``ends``: token counts at which both a step and a block of a state group ended.
    ``missed``: per group, positions that were offered but not stored. ``backoff`` says when to
    offer these again.
    """

    next_position: dict[int, int] = field(default_factory=dict)
    next_full_at: int = 0
    loaded: range = range(0)
    audited: range = range(0)
    ends: set[int] = field(default_factory=set)
    missed: dict[int, set[int]] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=store_backoff)

    def restart(self) -> None:
        """Offers every block again after a preemption (B4.12) or a reset of the store (B3.19)."""
        self.next_position.clear()
        self.next_full_at = 0
        self.ends.clear()
        self.missed.clear()
        self.loaded = self.audited = range(0)

    def cursor(self, group_index: int) -> int:
        return self.next_position.get(group_index, 0)

    def miss(self, group_index: int, position: int, now: float) -> None:
        """Records an offered block that was not stored, so that it is offered again.

        Ignores positions from the cursor on, because they are offered anyway.
        """
        if position >= self.cursor(group_index):
            return
        if not self.missed:
            self.backoff.start(now)
        self.missed.setdefault(group_index, set()).add(position)

    def stored(self) -> None:
        """Resets the backoff after a successful store, unless a missed block still waits for it."""
        if not self.missed:
            self.backoff.reset()

    def take_missed(self, group_index: int, end: int) -> list[int]:
        """Removes and returns the missed positions before ``end``."""
        missed = self.missed.get(group_index, set())
        due = sorted(position for position in missed if position < end)
        missed.difference_update(due)
        if not missed:
            self.missed.pop(group_index, None)
        return due


class DueRequests:
    """Requests that may have a block to offer, so that a step need not look at all requests.

    A request waits here until it may fill its next block. The clock counts tokens: in each step it
    advances by the largest number of tokens that a waiting request may have gained.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._due: set[str] = set()
        # Clock at which a waiting request becomes due, and a heap of these. Only the latest entry
        # of a request counts.
        self._due_at: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def add(self, request_id: str) -> None:
        """The request is due until `postpone` or `discard` is called."""
        self._due.add(request_id)

    def postpone(self, request_id: str, tokens: int) -> None:
        """The request can fill no block before it has gained ``tokens`` more tokens."""
        self._due.discard(request_id)
        due_at = self._clock + tokens
        if self._due_at.get(request_id) != due_at:
            self._due_at[request_id] = due_at
            heappush(self._heap, (due_at, request_id))

    def discard(self, request_id: str) -> None:
        self._due.discard(request_id)
        self._due_at.pop(request_id, None)

    def of_step(self, new_tokens: Mapping[str, int], usual: int) -> list[str]:
        """Returns the requests among ``new_tokens`` that are due or gain more than ``usual``."""
        most = max(new_tokens.values(), default=0)
        self._clock += min(most, usual)
        while self._heap and self._heap[0][0] <= self._clock:
            due_at, request_id = heappop(self._heap)
            if self._due_at.get(request_id) == due_at:
                del self._due_at[request_id]
                self._due.add(request_id)
        if most <= usual and not self._due:
            return []
        return [name for name, count in new_tokens.items() if count > usual or name in self._due]


class EndedSave(NamedTuple):
    """A save that all workers have reported, or that expired.

    ``not_stored``: indices of the keys in ``job.keys`` that were not stored.
    ``suspect``: the server has changed since the save began, so the server may lack the blocks.
    ``was_free``: the blocks were free before the save. The planner has not released them; the
    caller must call ``BlockPool.put_back``.
    """

    job: SaveJob
    not_stored: frozenset[int]
    suspect: bool = False
    was_free: bool = False


class _Offer(NamedTuple):
    progress: SaveProgress
    group_index: int
    position: int


@dataclass
class _JobState:
    job: SaveJob
    was_free: bool
    sent_at: float = math.inf
    workers: int = 0
    """Bit n is set if worker n has reported the job."""
    not_stored: set[int] = field(default_factory=set)
    suspect: bool = False


class SavePlanner:
    """Plans save jobs and holds their blocks. For the arguments see ``OffloadOptions``."""

    def __init__(
        self,
        geometry: CacheGeometry,
        world_size: int,
        max_held_fraction: float,
        lost_after_s: float,
        pool: BlockPool,
        content_of: ContentOf | None = None,
    ) -> None:
        self._null_block = geometry.null_block
        # Full attention comes last. If the hold budget is exhausted, its blocks can be offered in a
        # later step, because the engine keeps them until the request ends.
        self._groups = sorted(geometry.groups, key=lambda group: group.kind is CacheGroupKind.FULL)
        self._state_sizes = {group.block_tokens for group in geometry.groups if group.is_state}
        self._world_size = world_size
        self._max_held_fraction = max_held_fraction
        self._lost_after_s = lost_after_s
        self._pool = pool
        self._content_of = content_of
        self._jobs: dict[int, _JobState] = {}
        # Offers of the blocks in flight, by block id and key (B5). Two blocks can have the same
        # key, and a block held for a peer may have two keys.
        self._in_flight: dict[tuple[int, bytes], list[_Offer]] = {}
        self._next_job_id = 1

    @property
    def pending(self) -> bool:
        return bool(self._jobs)

    @property
    def hold_budget(self) -> int:
        """How many more blocks may be held now."""
        return max(0, int(self._pool.num_blocks * self._max_held_fraction) - len(self._in_flight))

    def blocks_awaiting_save_only(self, now: float) -> bool:
        """Whether the end of a save will free a block, because nothing else references the block.

        False if the oldest save has been running for more than half a second.
        """
        first = next(iter(self._jobs.values()), None)
        if first is None or now - first.sent_at > _SHORT_WAIT_S:
            return False
        return any(self._pool.references(block_id) == 1 for block_id, _ in self._in_flight)

    def step_ends(self, progress: SaveProgress, tokens: int) -> None:
        """Records that this step has no draft tokens and computes a request up to ``tokens``."""
        if any(tokens % size == 0 for size in self._state_sizes):
            # Drops older ends, because the engine may have overwritten the states in their blocks.
            progress.ends = {end for end in progress.ends if end + max(self._state_sizes) >= tokens} | {tokens}

    def plan(
        self,
        request: EngineRequest,
        progress: SaveProgress,
        computed_tokens: int,
        read_table: Callable[[], BlockTables | None],
        now: float,
        *,
        last: bool = False,
    ) -> SaveJob | None:
        """Returns the job for full blocks that were not offered yet, or offered but not stored.

        ``read_table`` is called only if there is a block to offer. If the limit of held blocks is
        reached, the other blocks are offered in a later step. ``last``: there is no later step, so
        missed blocks are offered now, and blocks above the limit are never stored.
        """
        if (computed_tokens < progress.next_full_at and not progress.missed) or self.hold_budget <= 0:
            return None
        retry = bool(progress.missed) and (last or progress.backoff.is_over(now))
        ends: dict[int, int] = {}
        for group in self._groups:
            end = min(computed_tokens // group.block_tokens, request.final_blocks(group))
            if end > progress.cursor(group.index) or (retry and group.index in progress.missed):
                ends[group.index] = end
        if not ends:
            progress.next_full_at = self._next_full_at(progress)
            return None
        tables = read_table()
        if tables is None:
            return None
        if retry:
            progress.backoff.grow()
            progress.backoff.start(now)
        job = SaveJob(self._next_job_id, request.server_name)
        for group in self._groups:
            if group.index in ends:
                table = tables[group.index]
                end = min(ends[group.index], len(table))
                missed = progress.take_missed(group.index, end) if retry else []
                self._offer(job, request, progress, group, missed, table[:end], now)
        progress.next_full_at = self._next_full_at(progress)
        return self._hold(job)

    def plan_named(self, blocks: Iterable[FreeBlock], *, was_free: bool = False) -> SaveJob | None:
        """Returns the job for blocks with given keys, except blocks in flight with the same key."""
        job = SaveJob(self._next_job_id, "")
        for block in blocks:
            if block.key is not None and (block.block_id, block.key) not in self._in_flight:
                self._in_flight[block.block_id, block.key] = []
                job.add(block.key, block.group_index, block.block_id)
        return self._hold(job, was_free=was_free)

    def sent(self, jobs: Iterable[SaveJob], now: float) -> None:
        """Records when jobs are sent to the workers; ``expire`` measures from this time."""
        for job in jobs:
            self._jobs[job.job_id].sent_at = now

    def report(
        self, ended: Mapping[int, int], not_stored: Mapping[int, Collection[int]], now: float
    ) -> list[EndedSave]:
        """Records workers' reports; removes and returns the jobs that all workers have ended.

        ``ended``: per job id, one bit per worker. A worker that reports a job twice counts once.
        """
        complete = []
        for job_id, workers in ended.items():
            state = self._jobs.get(job_id)
            if state is None:
                continue
            state.workers |= workers
            state.not_stored.update(not_stored.get(job_id, ()))
            if state.workers.bit_count() >= self._world_size:
                complete.append(state)
        return [self._end(state, now) for state in complete]

    def expire(self, now: float) -> list[EndedSave]:
        """Removes and returns jobs with overdue reports. Their blocks count as not stored."""
        if not self._jobs:
            return []
        lost = []
        for state in self._jobs.values():
            if state.sent_at + self._lost_after_s > now:
                # Jobs are in the order of sending, so no later job is overdue.
                break
            state.not_stored.update(range(len(state.job.keys)))
            lost.append(state)
        return [self._end(state, now) for state in lost]

    def mark_suspect(self) -> None:
        """The server has changed: when a job in flight ends, all its blocks are offered again."""
        for state in self._jobs.values():
            state.suspect = True

    def _next_full_at(self, progress: SaveProgress) -> int:
        return min((progress.cursor(group.index) + 1) * group.block_tokens for group in self._groups)

    def _end(self, state: _JobState, now: float) -> EndedSave:
        job = state.job
        del self._jobs[job.job_id]
        for index, name in enumerate(zip(job.block_ids, job.keys, strict=True)):
            for progress, group_index, position in self._in_flight.pop(name, []):
                if state.suspect or index in state.not_stored:
                    progress.miss(group_index, position, now)
                else:
                    progress.stored()
        if not state.was_free:
            # Engines evict blocks in the order of release. A head of a prefix without its tail is
            # still useful, so the tail is released first.
            self._pool.release(job.block_ids[::-1])
        return EndedSave(job, frozenset(state.not_stored), state.suspect, state.was_free)

    def _offer(
        self,
        job: SaveJob,
        request: EngineRequest,
        progress: SaveProgress,
        group: CacheGroup,
        missed: Iterable[int],
        table: Sequence[int],
        now: float,
    ) -> None:
        """Adds blocks to ``job``: ``missed`` positions and those from the cursor on."""
        cursor, end, budget = progress.cursor(group.index), len(table), self.hold_budget
        for position in (*missed, *range(cursor, end)):
            block_id = table[position]
            if block_id == self._null_block or position * group.block_tokens in progress.loaded:
                continue
            if group.is_state and not self._has_state(request, progress, group, position, block_id):
                continue
            offer, key = _Offer(progress, group.index, position), request.key(group, position)
            if (block_id, key) in self._in_flight:
                self._in_flight[block_id, key].append(offer)
            elif budget > 0:
                budget -= 1
                self._in_flight[block_id, key] = [offer]
                if position * group.block_tokens in progress.audited:
                    job.audits.append(len(job.keys))
                job.add(key, group.index, block_id)
                if self._content_of is not None:
                    content = self._content_of(request, group, position)
                    job.contents += [content] if content is not None else []
            elif position < cursor:
                progress.miss(group.index, position, now)
            else:
                end = position
                break
        progress.next_position[group.index] = max(cursor, end)

    def _has_state(
        self, request: EngineRequest, progress: SaveProgress, group: CacheGroup, position: int, block_id: int
    ) -> bool:
        """Whether the block contains the state after its last token, not after another token."""
        end = (position + 1) * group.block_tokens
        return end in progress.ends or self._pool.cached_key(block_id) == request.key(group, position)

    def _hold(self, job: SaveJob, *, was_free: bool = False) -> SaveJob | None:
        if not job.block_ids:
            return None
        self._next_job_id += 1
        self._pool.hold(job.block_ids)
        self._jobs[job.job_id] = _JobState(job, was_free)
        return job
