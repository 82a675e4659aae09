"""Which computed blocks to store, and keeping them from reuse until that is done (BEHAVIOUR B4, B5).

A block is offered in the step that fills it, as soon as it has a key, whatever made it full: prompt, recomputation after a
preemption, or decoding. Workers copy it after that step's compute. Until every worker has reported the copy, the block carries
one more reference in the engine's own block pool, so that it can be freed, preempted or fall out of a sliding window and still
not be overwritten. (The alternatives are worse: copying inside the step puts the copy and two round trips into every step;
holding requests back at their end does not cover blocks that go earlier, by preemption or out of the window.)

Blocks found in the engine's own prefix cache are offered too: the server answers "present" for what it has, and what it has lost
since (eviction, restart) is filled again instead of leaving a hole for ever (B4.15). What a worker could not store (no room, a
server that went away) is offered again while the request lives, at growing intervals and once more at its end (B3.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .model import (
    Backoff,
    BlockPool,
    BlockTables,
    CacheGeometry,
    CacheGroup,
    CacheGroupKind,
    EngineRequest,
    FreeBlock,
    SaveJob,
)

__all__ = ["EndedSave", "SavePlanner", "SaveProgress"]

# Waiting for saves beats computing a preempted request again only if it is short.
_PROMPT_S = 0.5


@dataclass
class SaveProgress:
    """How far a request's blocks have been offered: per group, the first position not looked at.

    ``loaded`` is the range of tokens that came from the server: not worth offering again, unless a tier asks for the whole request
    (B1.1). ``ends`` is where steps ended, if at the end of a state group's block. ``missed`` are the positions behind the cursor
    that were offered and not stored; ``backoff`` says when they are offered again. Below ``quiet_until`` computed tokens no block
    is full that was not looked at: most steps of most requests end there.
    """

    next_position: dict[int, int] = field(default_factory=dict)
    quiet_until: int = 0
    loaded: range = range(0)
    ends: set[int] = field(default_factory=set)
    missed: dict[int, set[int]] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff)

    def restart(self) -> None:
        """Look at every block again: they are others now (B4.12), or the store was emptied (B3.19)."""
        self.next_position.clear()
        self.quiet_until = 0
        self.ends.clear()
        self.missed.clear()
        self.loaded = range(0)

    def cursor(self, group_index: int) -> int:
        """The first position that was not looked at."""
        return self.next_position.get(group_index, 0)

    def miss(self, group_index: int, position: int, now: float) -> None:
        """Note that a block was not stored; one that the cursor has yet to reach (again) needs no note."""
        if position >= self.cursor(group_index):
            return
        if not self.missed:
            self.backoff.start(now)
        self.missed.setdefault(group_index, set()).add(position)

    def stored(self) -> None:
        """Note that a block was stored: the server takes blocks."""
        if not self.missed:
            self.backoff.reset()

    def take_missed(self, group_index: int, end: int) -> list[int]:
        """Returns, and forgets, the positions before ``end`` that are to be offered again."""
        missed = self.missed.get(group_index, set())
        due = sorted(position for position in missed if position < end)
        missed.difference_update(due)
        if not missed:
            self.missed.pop(group_index, None)
        return due


class EndedSave(NamedTuple):
    """A job that all workers have ended, or of which nothing was heard for too long.

    ``doubtful``: what it did store may have been stored by a server that is not there any more. ``were_free``: its blocks are yet
    to be put back to where they were taken from.
    """

    job: SaveJob
    not_stored: frozenset[int]
    doubtful: bool = False
    were_free: bool = False


class _Place(NamedTuple):
    """A block as one request knows it."""

    progress: SaveProgress
    group_index: int
    position: int


@dataclass
class _Held:
    job: SaveJob
    were_free: bool
    sent_at: float = math.inf
    reports: int = 0
    not_stored: set[int] = field(default_factory=set)
    doubtful: bool = False


class SavePlanner:
    """Plans save jobs and holds their blocks.

    ``max_held_fraction``: the share of the engine's blocks that jobs in flight may hold. ``lost_after_s``: a job that is not
    reported by then never will be; workers must have stopped by then to read its blocks, or to publish what they read (B5.6).
    """

    def __init__(
        self, geometry: CacheGeometry, world_size: int, max_held_fraction: float, lost_after_s: float, pool: BlockPool
    ) -> None:
        self._null_block = geometry.null_block
        # First those whose blocks go while the request runs, out of their window; full attention's are there in the next step too.
        self._groups = sorted(geometry.groups, key=lambda group: group.kind is CacheGroupKind.FULL)
        self._state_sizes = {group.block_tokens for group in geometry.groups if group.is_state}
        self._world_size = world_size
        self._max_held_fraction = max_held_fraction
        self._lost_after_s = lost_after_s
        self._pool = pool
        self._jobs: dict[int, _Held] = {}
        # B5: by block id, and for the scheduler's life; two blocks with equal content are two blocks. And by key: what is held for
        # a peer may go by another name than the content's. With each, the requests that offered it meanwhile: they are told when
        # it was not stored. (Lazy mode would not need it, B5.8: held blocks are not found free again; but whole requests offer
        # theirs in lazy mode too.)
        self._in_flight: dict[tuple[int, bytes], list[_Place]] = {}
        self._next_job_id = 1

    @property
    def pending(self) -> bool:
        """Whether any save has not been reported yet."""
        return bool(self._jobs)

    @property
    def room(self) -> int:
        """How many more blocks may be held now."""
        return max(0, int(self._pool.num_blocks * self._max_held_fraction) - len(self._in_flight))

    def holds_only_reference(self, now: float) -> bool:
        """Whether some block would be free by now, were it not for a save in flight; False while saves are slow to end."""
        first = next(iter(self._jobs.values()), None)
        if first is None or now - first.sent_at > _PROMPT_S:
            return False
        return any(self._pool.references(block_id) == 1 for block_id, _ in self._in_flight)

    def step_ends(self, progress: SaveProgress, tokens: int) -> None:
        """The step that is being planned computes a request up to here, whatever it finds: no tokens that may be rejected."""
        if any(tokens % size == 0 for size in self._state_sizes):
            # Earlier ones say nothing any more: an engine may have put another block in their place.
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
        """The job for the request's blocks that are full at ``computed_tokens`` and were not offered yet, or not stored.

        ``read_table()`` is called only when there is something to offer. When too many blocks are held already, the cursor stays
        and the rest is offered in a later step. ``last``: there is no later step.
        """
        if (computed_tokens < progress.quiet_until and not progress.missed) or self.room <= 0:
            return None
        retry = bool(progress.missed) and (last or progress.backoff.is_over(now))
        ends: dict[int, int] = {}
        for group in self._groups:
            end = min(computed_tokens // group.block_tokens, request.final_blocks(group))
            if end > progress.cursor(group.index) or (retry and group.index in progress.missed):
                ends[group.index] = end
        if not ends:
            progress.quiet_until = min((progress.cursor(g.index) + 1) * g.block_tokens for g in self._groups)
        tables = read_table() if ends else None
        if tables is None:
            return None
        if retry:
            progress.backoff.grow(now)
        job = SaveJob(self._next_job_id, request.server_name)
        for group in self._groups:
            if group.index in ends:
                table = tables[group.index]
                end = min(ends[group.index], len(table))
                missed = progress.take_missed(group.index, end) if retry else []
                self._offer(job, request, progress, group, missed, table[:end], now)
        return self._hold(job)

    def plan_free(self, blocks: Sequence[FreeBlock]) -> SaveJob | None:
        """The job for blocks that no request uses (lazy mode)."""
        return self._hold(self._named(blocks), were_free=True)

    def plan_named(self, blocks: Collection[FreeBlock]) -> SaveJob | None:
        """The job for blocks that somebody else has named; without those that are being stored under that very name."""
        return self._hold(self._named(blocks))

    def offered(self, progress: SaveProgress, tables: BlockTables, confirmed_tokens: int) -> set[int]:
        """Returns the blocks that were offered, and stored as far as is known, or that came from the server.

        Of those that are full of confirmed tokens: one that turned out not to be goes by another name.
        """
        blocks: set[int] = set()
        for group in self._groups:
            end = min(progress.cursor(group.index), confirmed_tokens // group.block_tokens)
            missed = progress.missed.get(group.index, ())
            blocks.update(block for n, block in enumerate(tables[group.index][:end]) if n not in missed)
        return blocks

    def sent(self, jobs: Iterable[SaveJob], now: float) -> None:
        """These are given to the workers now: from now on their reports are waited for."""
        for job in jobs:
            self._jobs[job.job_id].sent_at = now

    def report(
        self, ended: Mapping[int, int], not_stored: Mapping[int, Collection[int]], now: float
    ) -> list[EndedSave]:
        """Workers have ended these jobs (so many of them); returns, and lets go of, those that all workers have ended."""
        complete = []
        for job_id, count in ended.items():
            held = self._jobs.get(job_id)
            if held is None:
                continue
            held.reports += count
            held.not_stored.update(not_stored.get(job_id, ()))
            if held.reports >= self._world_size:
                complete.append(held)
        return [self._end(held, now) for held in complete]

    def expire(self, now: float) -> list[EndedSave]:
        """Lets go of the jobs whose reports were lost; returns them, as not stored (B5.6)."""
        lost = []
        for held in self._jobs.values():
            if held.sent_at + self._lost_after_s > now:
                # Later jobs were sent later, or have yet to be.
                break
            held.not_stored.update(range(len(held.job.keys)))
            lost.append(held)
        return [self._end(held, now) for held in lost]

    def doubt(self) -> None:
        """The server has changed: whatever will be reported of the jobs in flight, their blocks are to be offered again."""
        for held in self._jobs.values():
            held.doubtful = True

    def _end(self, held: _Held, now: float) -> EndedSave:
        job = held.job
        del self._jobs[job.job_id]
        for index, name in enumerate(zip(job.block_ids, job.keys, strict=True)):
            for progress, group_index, position in self._in_flight.pop(name, []):
                if held.doubtful or index in held.not_stored:
                    progress.miss(group_index, position, now)
                else:
                    progress.stored()
        if not held.were_free:
            # Tail first, like an engine itself: the tail of a prefix is to be evicted before its head.
            self._pool.release(job.block_ids[::-1])
        return EndedSave(job, frozenset(held.not_stored), held.doubtful, held.were_free)

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
        """Adds to ``job`` what is to be stored of the ``missed`` positions, and from the cursor to the end of ``table``."""
        cursor, end, room = progress.cursor(group.index), len(table), self.room
        for position in (*missed, *range(cursor, end)):
            block_id = table[position]
            if block_id == self._null_block or position * group.block_tokens in progress.loaded:
                continue
            if group.is_state and not self._has_state(request, progress, group, position, block_id):
                continue
            place, key = _Place(progress, group.index, position), request.key(group, position)
            if (block_id, key) in self._in_flight:
                self._in_flight[block_id, key].append(place)
            elif room > 0:
                room -= 1
                self._in_flight[block_id, key] = [place]
                _add(job, key, group.index, block_id)
            elif position < cursor:
                progress.miss(group.index, position, now)
            else:
                end = position
                break
        progress.next_position[group.index] = max(cursor, end)

    def _has_state(
        self, request: EngineRequest, progress: SaveProgress, group: CacheGroup, position: int, block_id: int
    ) -> bool:
        """Whether a block has the state at its end, and not that of some other place where a step ended."""
        end = (position + 1) * group.block_tokens
        return end in progress.ends or self._pool.known_as(block_id) == request.key(group, position)

    def _named(self, blocks: Collection[FreeBlock]) -> SaveJob:
        job = SaveJob(self._next_job_id, "")
        for block in blocks:
            if block.key is not None and (block.block_id, block.key) not in self._in_flight:
                self._in_flight[block.block_id, block.key] = []
                _add(job, block.key, block.group_index, block.block_id)
        return job

    def _hold(self, job: SaveJob, *, were_free: bool = False) -> SaveJob | None:
        if not job.block_ids:
            return None
        self._next_job_id += 1
        self._pool.hold(job.block_ids)
        self._jobs[job.job_id] = _Held(job, were_free)
        return job


def _add(job: SaveJob, key: bytes, group_index: int, block_id: int) -> None:
    job.keys.append(key)
    job.groups.append(group_index)
    job.block_ids.append(block_id)
