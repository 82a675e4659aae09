"""Which computed blocks to store, and keeping them from reuse until that is done (BEHAVIOUR B4, B5).

A block is offered in the step that fills it, as soon as its hash is known, whatever made it full: prompt, recomputation after a
preemption, or decoding. The worker copies it after that step's compute. Until every worker has reported the copy, the block
carries one more reference in the engine's own block pool, so that it can be freed, preempted or fall out of a sliding window and
still not be overwritten. (The alternatives are worse: copying inside ``wait_for_save`` puts the copy and two round trips into
every step; holding requests back at their end does not cover blocks that go earlier, by preemption or out of the window.)

Blocks found in the engine's own prefix cache are offered too: the server answers "present" for what it has, and what it has lost
since (eviction, restart) is filled again instead of leaving a hole for ever (B4.15). What a worker could not store (no room, a
server that went away) is offered again while the request lives, at growing intervals and once more at its end (B3.5).
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ... import make_key
from .announcements import server_name
from .compat import resolve_block_hashes
from .groups import CacheGeometry
from .metadata import SaveJob

__all__ = ["SavePlanner", "SaveProgress"]

NULL_BLOCK = 0
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0


@dataclass
class SaveProgress:
    """How far a request's blocks have been offered: per group, the first position not looked at.

    ``loaded`` is the range of tokens that came from the server: not worth offering again, unless a tier asks for the whole request
    (B1.1; then it is left empty). ``missed`` are the positions behind the
    cursor that were offered and not stored; they are offered again from ``retry_at`` on, ``retry_s`` after that, and so on.
    """

    next_position: dict[int, int] = field(default_factory=dict)
    loaded: range = range(0)
    missed: dict[int, set[int]] = field(default_factory=dict)
    retry_at: float = 0.0
    retry_s: float = _FIRST_RETRY_S

    def restart(self) -> None:
        """Look at every block again: the store was emptied (B3.19)."""
        self.next_position.clear()
        self.missed.clear()
        self.loaded = range(0)

    def miss(self, group_index: int, position: int) -> None:
        """Note that a block was not stored."""
        if not self.missed:
            self.retry_at = time.monotonic() + self.retry_s
        self.missed.setdefault(group_index, set()).add(position)

    def take_missed(self, group_index: int, end: int) -> list[int]:
        """Returns, and forgets, the positions before ``end`` that are to be offered again."""
        missed = self.missed.get(group_index, set())
        due = sorted(position for position in missed if position < end)
        missed.difference_update(due)
        if not missed:
            self.missed.pop(group_index, None)
        return due


class _Place(NamedTuple):
    """A block as one request knows it."""

    progress: SaveProgress
    group_index: int
    position: int


@dataclass
class _Pinned:
    block_ids: list[int]
    reports: int = 0
    not_stored: set[int] = field(default_factory=set)


class SavePlanner:
    """Plans save jobs and holds their blocks. All calls on the scheduler's thread."""

    def __init__(self, geometry: CacheGeometry, world_size: int, max_held_fraction: float) -> None:
        self._geometry = geometry
        self._world_size = world_size
        self._max_held_fraction = max_held_fraction
        self._pool: Any = None
        self._jobs: dict[int, _Pinned] = {}
        # B5: by block id and for the scheduler's life; two blocks with equal content are two blocks. With each, the requests that
        # offered it meanwhile: they are told when it was not stored.
        self._in_flight: dict[int, list[_Place]] = {}
        self._next_job_id = 1

    def bind_pool(self, block_pool: Any) -> None:
        """The engine's block pool; without it nothing is saved."""
        self._pool = block_pool

    @property
    def pending(self) -> bool:
        """Whether any save has not been reported yet."""
        return bool(self._jobs)

    def holds_only_reference(self) -> bool:
        """Whether some block would be free by now, were it not for a save in flight."""
        return any(self._pool.blocks[block_id].ref_cnt == 1 for block_id in self._in_flight)

    def plan(
        self, request: Any, progress: SaveProgress, computed_tokens: int, read_table: Any, *, last: bool = False
    ) -> SaveJob | None:
        """The job for the request's blocks that are full at ``computed_tokens`` and were not offered yet, or not stored.

        ``read_table()`` returns the block ids per group; it is called only when there is something to offer. When too many blocks
        are held already, the cursor stays and the rest is offered in a later step. ``last``: there is no later step.
        """
        if self._pool is None:
            return None
        retry = bool(progress.missed) and (last or time.monotonic() >= progress.retry_at)
        ready = {}
        for group in self._geometry.groups:
            hashes = resolve_block_hashes(request.block_hashes, self._geometry.hash_tokens, group.block_tokens)
            # A hash exists only for tokens that are final, so drafts that may be rejected are never offered (B4.6).
            end = min(computed_tokens // group.block_tokens, len(hashes))
            if end > progress.next_position.get(group.index, 0) or (retry and group.index in progress.missed):
                ready[group.index] = (end, hashes)
        tables = read_table() if ready else None
        if tables is None:
            return None
        if retry:
            progress.retry_s = min(2 * progress.retry_s, _LAST_RETRY_S)
            progress.retry_at = time.monotonic() + progress.retry_s
        job = SaveJob(self._next_job_id, server_name(request.request_id))
        for group_index, (end, hashes) in ready.items():
            end_of_table = min(end, len(tables[group_index]))
            missed = progress.take_missed(group_index, end_of_table) if retry else []
            self._offer(job, progress, group_index, missed, end_of_table, hashes, tables[group_index])
        return self._pin(job)

    def report(
        self, ended_saves: Mapping[int, int], not_stored: Mapping[int, AbstractSet[int]] | None = None
    ) -> dict[int, int]:
        """Workers have ended these jobs; unpins a job's blocks when all of them have.

        Returns the jobs that all workers have ended, each with the number of its blocks that were not stored.
        """
        ended: dict[int, int] = {}
        for job_id, count in ended_saves.items():
            pinned = self._jobs.get(job_id)
            if pinned is None:
                continue
            pinned.reports += count
            pinned.not_stored |= (not_stored or {}).get(job_id, frozenset())
            if pinned.reports >= self._world_size:
                del self._jobs[job_id]
                ended[job_id] = len(pinned.not_stored)
                self._end(pinned)
        return ended

    def _end(self, pinned: _Pinned) -> None:
        for index, block_id in enumerate(pinned.block_ids):
            places = self._in_flight.pop(block_id, [])
            for progress, group_index, position in places:
                if index in pinned.not_stored:
                    progress.miss(group_index, position)
                elif not progress.missed:
                    progress.retry_s = _FIRST_RETRY_S
        # Tail first, like vLLM itself: the tail of a prefix is to be evicted before its head.
        self._pool.free_blocks(self._blocks(reversed(pinned.block_ids)))

    def _offer(
        self,
        job: SaveJob,
        progress: SaveProgress,
        group_index: int,
        missed: Sequence[int],
        end: int,
        hashes: Sequence[bytes],
        table: Sequence[int],
    ) -> None:
        """Adds to ``job`` what is to be stored of the ``missed`` positions, and from the cursor to ``end``."""
        block_tokens = self._geometry.groups[group_index].block_tokens
        held_limit = int(self._pool.num_gpu_blocks * self._max_held_fraction)
        cursor = progress.next_position.get(group_index, 0)
        for position in (*missed, *range(cursor, end)):
            block_id = table[position]
            if block_id != NULL_BLOCK and position * block_tokens not in progress.loaded:
                place = _Place(progress, group_index, position)
                if block_id in self._in_flight:
                    self._in_flight[block_id].append(place)
                elif len(self._in_flight) < held_limit:
                    self._in_flight[block_id] = [place]
                    job.keys.append(make_key(hashes[position], group_index))
                    job.groups.append(group_index)
                    job.block_ids.append(block_id)
                elif position < cursor:
                    progress.miss(group_index, position)
                else:
                    end = position
                    break
        progress.next_position[group_index] = max(cursor, end)

    def _pin(self, job: SaveJob) -> SaveJob | None:
        if not job.block_ids:
            return None
        self._next_job_id += 1
        self._pool.touch(self._blocks(job.block_ids))
        self._jobs[job.job_id] = _Pinned(job.block_ids)
        return job

    def _blocks(self, block_ids: Iterable[int]) -> list[Any]:
        return [self._pool.blocks[block_id] for block_id in block_ids]
