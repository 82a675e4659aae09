"""Which computed blocks to store, and keeping them from reuse until that is done (BEHAVIOUR B4, B5).

A block is offered in the step that fills it, as soon as its hash is known, whatever made it full: prompt, recomputation after a
preemption, or decoding. The worker copies it after that step's compute. Until every worker has reported the copy, the block
carries one more reference in the engine's own block pool, so that it can be freed, preempted or fall out of a sliding window and
still not be overwritten. (The alternatives are worse: copying inside ``wait_for_save`` puts the copy and two round trips into
every step; holding requests back at their end does not cover blocks that go earlier, by preemption or out of the window.)

Blocks found in the engine's own prefix cache are offered too: the server answers "present" for what it has, and what it has lost
since (eviction, restart) is filled again instead of leaving a hole for ever (B4.15).
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import make_key
from .compat import resolve_block_hashes
from .groups import CacheGeometry
from .metadata import SaveJob

__all__ = ["SavePlanner", "SaveProgress"]

NULL_BLOCK = 0


@dataclass
class SaveProgress:
    """How far a request's blocks have been offered: per group, the first position not looked at.

    ``loaded`` is the range of tokens that came from the server: not worth offering again.
    """

    next_position: dict[int, int] = field(default_factory=dict)
    loaded: range = range(0)


@dataclass
class _Pinned:
    block_ids: list[int]
    reports: int = 0


class SavePlanner:
    """Plans save jobs and holds their blocks. All calls on the scheduler's thread."""

    def __init__(self, geometry: CacheGeometry, world_size: int, max_held_fraction: float) -> None:
        self._geometry = geometry
        self._world_size = world_size
        self._max_held_fraction = max_held_fraction
        self._pool: Any = None
        self._jobs: dict[int, _Pinned] = {}
        # B5: by block id and for the scheduler's life; two blocks with equal content are two blocks.
        self._in_flight: set[int] = set()
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

    def plan(self, request: Any, progress: SaveProgress, computed_tokens: int, read_table: Any) -> SaveJob | None:
        """The job for the request's blocks that are full at ``computed_tokens`` and were not offered yet.

        ``read_table()`` returns the block ids per group; it is called only when there is something to offer. When too many blocks
        are held already, the cursor stays and the rest is offered in a later step.
        """
        if self._pool is None:
            return None
        ready = {}
        for group in self._geometry.groups:
            hashes = resolve_block_hashes(request.block_hashes, self._geometry.hash_tokens, group.block_tokens)
            # A hash exists only for tokens that are final, so drafts that may be rejected are never offered (B4.6).
            end = min(computed_tokens // group.block_tokens, len(hashes))
            if end > progress.next_position.get(group.index, 0):
                ready[group.index] = (end, hashes)
        tables = read_table() if ready else None
        if tables is None:
            return None
        job = SaveJob(self._next_job_id, request.request_id)
        for group_index, (end, hashes) in ready.items():
            self._offer(job, progress, group_index, end, hashes, tables[group_index])
        return self._pin(job)

    def report(self, ended_saves: dict[int, int]) -> None:
        """Workers have ended these jobs; unpins a job's blocks when all of them have."""
        for job_id, count in ended_saves.items():
            pinned = self._jobs.get(job_id)
            if pinned is None:
                continue
            pinned.reports += count
            if pinned.reports >= self._world_size:
                del self._jobs[job_id]
                self._in_flight.difference_update(pinned.block_ids)
                # Tail first, like vLLM itself: the tail of a prefix is to be evicted before its head.
                self._pool.free_blocks(self._blocks(reversed(pinned.block_ids)))

    def _offer(
        self,
        job: SaveJob,
        progress: SaveProgress,
        group_index: int,
        end: int,
        hashes: Sequence[bytes],
        table: Sequence[int],
    ) -> None:
        block_tokens = self._geometry.groups[group_index].block_tokens
        held_limit = int(self._pool.num_gpu_blocks * self._max_held_fraction)
        position = progress.next_position.get(group_index, 0)
        end = min(end, len(table))
        while position < end:
            block_id = table[position]
            wanted = (
                block_id != NULL_BLOCK
                and block_id not in self._in_flight
                and position * block_tokens not in progress.loaded
            )
            if wanted:
                if len(self._in_flight) >= held_limit:
                    break
                self._in_flight.add(block_id)
                job.keys.append(make_key(hashes[position], group_index))
                job.groups.append(group_index)
                job.block_ids.append(block_id)
            position += 1
        progress.next_position[group_index] = position

    def _pin(self, job: SaveJob) -> SaveJob | None:
        if not job.block_ids:
            return None
        self._next_job_id += 1
        self._pool.touch(self._blocks(job.block_ids))
        self._jobs[job.job_id] = _Pinned(job.block_ids)
        return job

    def _blocks(self, block_ids: Iterable[int]) -> list[Any]:
        return [self._pool.blocks[block_id] for block_id in block_ids]
