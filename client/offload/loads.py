"""Loads of the offload core: looks up prefixes, pins hits and plans loads (B4.2, B4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from .model import (
    BlockPool,
    BlockRead,
    BlockTables,
    CacheGeometry,
    CacheGroup,
    CacheGroupKind,
    EngineRequest,
    LoadJob,
    LookupId,
    OffloadOptions,
    OffloadServer,
)
from .saves import SaveProgress

__all__ = [
    "BlockPosition",
    "LoadPlanner",
    "Lookup",
    "OffloadRequest",
    "PrefixHit",
    "PresenceQuery",
    "RequestPhase",
    "lacks_blocks",
    "longest_hit",
    "plan_reads",
    "search_hit",
    "usable_limit",
]


class BlockPosition(NamedTuple):
    group: CacheGroup
    position: int


@dataclass(frozen=True)
class PresenceQuery:
    """Asks which blocks are stored; with ``prefix``, only those before the first missing block."""

    blocks: Sequence[BlockPosition]
    prefix: bool


@dataclass
class PrefixHit:
    """Result of a lookup: the first ``hit_tokens`` tokens of the request are stored.

    ``items[group.index][position]``: (lease id, index in the lease) of each stored block.
    ``sources[position]``: the tier that had the block of ``CacheGeometry.leading_group``.
    ``slots[lease id]``: what workers need to read the lease's blocks with no call before the copy.
    """

    hit_tokens: int
    items: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    slots: dict[int, Any] = field(default_factory=dict)


class RequestPhase(Enum):
    """Phase of a request.

    WAITING: the request is new, was preempted, or its load has ended. The engine does not compute
    the request yet.
    LOADING: workers write into the request's blocks.
    RUNNING: the engine computes the request.
    ENDING: the request has ended, but workers still write into the request's blocks.
    ENDED: the request has ended. Saves of its blocks may still be in flight.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass
class Lookup:
    """Lookup of tokens [``start``, ``limit``). ``found``: the answer, whose blocks are pinned.

    ``audit_end``: end of the hit whose last blocks the engine computes for an audit; 0 without one.
    ``was_counted``: whether ``audit_every`` has counted the hit.
    """

    number: LookupId
    start: int
    limit: int
    deadline: float
    found: PrefixHit | None = None
    answered_at: float = 0.0
    audit_end: int = 0
    was_counted: bool = False


@dataclass
class OffloadRequest:
    """State of one request.

    ``lookup``: the lookup whose answer the request waits for, or whose hit it may load.
    ``loading``: the lookup whose hit is being loaded.
    ``offered_from``: number of computed tokens when ``match`` last returned a hit.
    ``loading_blocks``: (block id, key) of the blocks that are being loaded.
    ``compute_only``: a load failed or a lookup timed out, so the core starts no further lookup.
    """

    engine: EngineRequest
    phase: RequestPhase = RequestPhase.WAITING
    progress: SaveProgress = field(default_factory=SaveProgress)
    lookup: Lookup | None = None
    loading: Lookup | None = None
    offered_from: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    loading_blocks: list[tuple[int, bytes]] = field(default_factory=list)
    compute_only: bool = False
    saves_in_flight: int = 0


class LoadPlanner:
    def __init__(
        self, geometry: CacheGeometry, options: OffloadOptions, pool: BlockPool, server: OffloadServer
    ) -> None:
        self._geometry = geometry
        self._options = options
        self._pool = pool
        self._server = server
        self._lookups: dict[LookupId, Lookup] = {}
        self._next_lookup = 1
        self._hits = 0
        """Number of hits that could be audited."""

    def begin(self, state: OffloadRequest, start: int, now: float, end: int | None = None) -> Lookup | None:
        """Starts a lookup of the full blocks after ``start``, and before ``end`` if it is given.

        Returns None if there is no full block after ``start``, or if no server is connected.
        """
        request, step = state.engine, self._geometry.step_tokens
        limit = usable_limit(request.total_tokens, step) if end is None else end
        for group in self._geometry.groups:
            limit = min(limit, request.final_blocks(group) * group.block_tokens // step * step)
        if limit <= start:
            return None
        lookup = Lookup(LookupId(self._next_lookup), start, limit, now + self._options.lookup_timeout_s)
        if not self._server.start_lookup(lookup.number, request, start, limit):
            return None
        self._next_lookup += 1
        state.lookup = self._lookups[lookup.number] = lookup
        return lookup

    def answered(self, number: LookupId, found: PrefixHit, now: float) -> None:
        """Records the server's answer; ignored if the lookup was dropped."""
        lookup = self._lookups.get(number)
        if lookup is not None:
            lookup.found, lookup.answered_at = found, now

    def match(self, state: OffloadRequest, computed_tokens: int, now: float, *, may_audit: bool = False) -> int | None:
        """Returns how many tokens after ``computed_tokens`` can be loaded; None: not known yet.

        ``may_audit``: whether the blocks that the engine computes are stored when they are full.
        """
        step = self._geometry.step_tokens
        if computed_tokens % step or usable_limit(state.engine.total_tokens, step) <= computed_tokens:
            return 0
        lookup = state.lookup
        if lookup is not None and (lookup.start > computed_tokens or self._is_stale(lookup, now)):
            self.drop(state)
            lookup = None
        if lookup is None:
            lookup = self.begin(state, computed_tokens, now)
        if lookup is None:
            return 0
        if lookup.found is None:
            return None if now < lookup.deadline else self._abandon(state, lookup)
        hit = lookup.found.hit_tokens
        if may_audit and hit > computed_tokens and not lookup.was_counted and self._audit_is_due(lookup):
            return self._audit(state, computed_tokens, hit, now)
        state.offered_from = computed_tokens
        if lookup.audit_end:
            state.progress.audited = range(hit, lookup.audit_end)
        return max(0, hit - computed_tokens)

    def _audit_is_due(self, lookup: Lookup) -> bool:
        lookup.was_counted = True
        self._hits += 1
        every = self._options.audit_every
        return every > 0 and self._hits % every == 0

    def _audit(self, state: OffloadRequest, computed_tokens: int, hit: int, now: float) -> int | None:
        """Looks up a shorter hit, because windows and states need other blocks before its end."""
        self.drop(state)
        end = hit - self._geometry.step_tokens
        lookup = self.begin(state, computed_tokens, now, end) if end > computed_tokens else None
        if lookup is None:
            state.progress.audited = range(computed_tokens, hit)
            return 0
        lookup.audit_end, lookup.was_counted = hit, True
        return None

    def take(self, state: OffloadRequest, tables: BlockTables, external_tokens: int) -> LoadJob:
        """Plans the load of ``external_tokens`` of the hit. If impossible, returns an empty job."""
        job = LoadJob(state.engine.request_id)
        lookup, state.lookup = state.lookup, None
        state.loading = lookup
        if lookup is None or lookup.found is None:
            return job
        start, end = state.offered_from, state.offered_from + external_tokens
        if not state.engine.request_level:
            state.progress.loaded = range(start, end)
        state.sources = _count_sources(self._geometry, lookup.found, start, end)
        if not lacks_blocks(self._geometry, self._pool, tables, start, end):
            job.reads = plan_reads(self._geometry, lookup.found, tables, start, end)
        if job.reads:
            state.loading_blocks = _keyed_blocks(self._geometry, state.engine, tables, start, end)
        return job

    def failed(self, state: OffloadRequest) -> None:
        """Records a failed load. The engine computes the blocks, and the core then saves them."""
        state.compute_only = True
        state.progress.loaded = range(0)
        state.loading_blocks = []

    def ended(self, state: OffloadRequest) -> list[tuple[int, bytes]]:
        """Unpins the hit of a load that has ended. Returns (block id, key) of the loaded blocks."""
        lookup, state.loading = state.loading, None
        self._unpin(lookup)
        loaded, state.loading_blocks = state.loading_blocks, []
        return loaded

    def drop(self, state: OffloadRequest) -> None:
        lookup, state.lookup = state.lookup, None
        self._unpin(lookup)

    def _is_stale(self, lookup: Lookup, now: float) -> bool:
        if lookup.found is None or lookup.found.hit_tokens <= lookup.start:
            return False
        return now - lookup.answered_at > self._options.hit_lifetime_s

    def _abandon(self, state: OffloadRequest, lookup: Lookup) -> int:
        state.lookup, state.compute_only = None, True
        del self._lookups[lookup.number]
        self._server.abandon_lookup(lookup.number)
        return 0

    def _unpin(self, lookup: Lookup | None) -> None:
        if lookup is not None:
            del self._lookups[lookup.number]
            self._server.drop_lookup(lookup.number)


# ---- length of a hit


def usable_limit(num_tokens: int, step_tokens: int) -> int:
    """Longest usable hit: a multiple of ``step_tokens`` that leaves a token to compute (B4.2)."""
    return max(0, num_tokens - 1) // step_tokens * step_tokens


def search_hit(
    geometry: CacheGeometry, start: int, limit: int
) -> Generator[PresenceQuery, AbstractSet[BlockPosition], int]:
    """Finds the end of the hit that begins at ``start``; the end is at most ``limit``.

    The generator yields a few queries. The caller sends the set of stored blocks of each query.
    ``start`` and ``limit`` are multiples of ``geometry.step_tokens``.
    """
    step = geometry.step_tokens
    for group in (g for g in geometry.groups if g.kind is CacheGroupKind.FULL):
        found = yield PresenceQuery(_positions([group], start, limit), prefix=True)
        limit = min(limit, start + len(found) * group.block_tokens // step * step)
        if limit <= start:
            return start
    if geometry.drop_last_block:
        # A draft model's KV of a token depends on the next token, so the last block is unusable.
        limit -= step
    partial = [g for g in geometry.groups if g.kind is not CacheGroupKind.FULL]
    if not partial or limit <= start:
        return limit
    # In most cases the server has all window and state blocks that a hit up to `limit` needs. So
    # the first query asks only for these blocks.
    tails = [
        block for block in _positions(partial, start, limit) if block.position >= block.group.first_needed_block(limit)
    ]
    if len((yield PresenceQuery(tails, prefix=False))) == len(tails):
        return limit
    found = yield PresenceQuery(_positions(partial, start, limit), prefix=False)
    present: dict[int, set[int]] = {}
    for block in found:
        present.setdefault(block.group.index, set()).add(block.position)
    return longest_hit(partial, present, start, limit, step)


def longest_hit(
    groups: Sequence[CacheGroup], present: Mapping[int, AbstractSet[int]], start: int, limit: int, step_tokens: int
) -> int:
    """Returns the longest prefix, in tokens, for which ``groups`` have all needed blocks.

    ``present[group.index]`` holds the positions of the stored blocks. The engine itself has the
    tokens before ``start`` in every group. ``start`` and ``limit`` are multiples of
    ``step_tokens``. If no stored block extends the prefix, the result is ``start``.
    """
    runs = {group.index: _run_lengths(group, present.get(group.index, frozenset()), start, limit) for group in groups}
    for hit in range(limit, start, -step_tokens):
        if all(_serves(group, runs[group.index], start, hit) for group in groups):
            return hit
    return start


def _positions(groups: Sequence[CacheGroup], start: int, limit: int) -> list[BlockPosition]:
    return [
        BlockPosition(group, position)
        for group in groups
        for position in range(start // group.block_tokens, limit // group.block_tokens)
    ]


def _run_lengths(group: CacheGroup, present: AbstractSet[int], start: int, limit: int) -> list[int]:
    """For each position from ``start`` on: how many consecutive present blocks end there."""
    runs, length = [], 0
    for position in range(start // group.block_tokens, limit // group.block_tokens):
        length = length + 1 if position in present else 0
        runs.append(length)
    return runs


def _serves(group: CacheGroup, runs: Sequence[int], start: int, hit: int) -> bool:
    first = max(group.first_needed_block(hit), start // group.block_tokens)
    needed = hit // group.block_tokens - first
    return needed <= 0 or runs[hit // group.block_tokens - start // group.block_tokens - 1] >= needed


# ---- blocks to read


def plan_reads(geometry: CacheGeometry, found: PrefixHit, tables: BlockTables, start: int, end: int) -> list[BlockRead]:
    """Returns reads, one per lease, that fill every block allocated for [``start``, ``end``).

    The engine treats every allocated block as loaded. So the result is empty if the lookup did not
    find one of these blocks, or if ``start`` or ``end`` is no multiple of ``step_tokens``. If the
    engine accepted fewer tokens than the core offered, a sliding window may need blocks that the
    lookup did not find.
    """
    if start % geometry.step_tokens or end % geometry.step_tokens:
        return []
    reads: dict[int, BlockRead] = {}
    for group in geometry.groups:
        items = found.items.get(group.index, {})
        for position in range(start // group.block_tokens, end // group.block_tokens):
            block_id = tables[group.index][position]
            if block_id == geometry.null_block:
                continue
            item = items.get(position)
            if item is None:
                return []
            lease_id, index = item
            if lease_id not in reads:
                reads[lease_id] = BlockRead(lease_id, slots=found.slots.get(lease_id))
            reads[lease_id].add(index, group.index, block_id)
    return list(reads.values())


def lacks_blocks(geometry: CacheGeometry, pool: BlockPool, tables: BlockTables, start: int, end: int) -> bool:
    """Whether a sliding window lacks blocks before ``start`` that a hit up to ``end`` needs.

    An engine with state groups may count tokens before ``start`` as computed although it evicted
    their sliding-window blocks. The engine then allocates these blocks again, without content. The
    lookup began at ``start``, so the core cannot load them.
    """
    if not any(group.is_state for group in geometry.groups):
        return False
    return any(
        (block_id := tables[group.index][position]) != geometry.null_block and pool.cached_key(block_id) is None
        for group in geometry.groups
        if group.kind is CacheGroupKind.WINDOW
        for position in range(group.first_needed_block(end), start // group.block_tokens)
    )


def _count_sources(geometry: CacheGeometry, found: PrefixHit, start: int, end: int) -> dict[str, int]:
    """Counts the tokens of [``start``, ``end``) by tier; the tier is "" if it is unknown."""
    block_tokens = geometry.leading_group.block_tokens
    positions = range(start // block_tokens, end // block_tokens)
    blocks = Counter(found.sources.get(position, "") for position in positions)
    return {source: count * block_tokens for source, count in blocks.items()}


def _keyed_blocks(
    geometry: CacheGeometry, request: EngineRequest, tables: BlockTables, start: int, end: int
) -> list[tuple[int, bytes]]:
    """Returns (block id, key) of each block of tokens [``start``, ``end``)."""
    return [
        (tables[group.index][position], request.key(group, position))
        for group in geometry.groups
        for position in range(start // group.block_tokens, end // group.block_tokens)
        if tables[group.index][position] != geometry.null_block
    ]
