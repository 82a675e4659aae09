"""What a request may load: asked of the server when it arrives, pinned until it is loaded or not wanted any more (B4.2, B4.3)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

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
    "Found",
    "LoadPlanner",
    "Lookup",
    "OffloadRequest",
    "Phase",
    "Place",
    "Question",
    "count_sources",
    "lacks_blocks",
    "longest_hit",
    "name_blocks",
    "plan_reads",
    "search",
    "usable_limit",
]


class Place(NamedTuple):
    """A block of a request: the n-th of one of its groups."""

    group: CacheGroup
    position: int


@dataclass(frozen=True)
class Question:
    """Which of these blocks does the store have? With ``prefix``, only those before the first that it lacks count."""

    places: Sequence[Place]
    prefix: bool


@dataclass
class Found:
    """What a lookup found: a hit up to ``hit_tokens`` of the request.

    ``items[group.index][position]`` is the (lease id, index in the lease) of each block that hit; ``sources[position]`` the tier
    that had it in the leading group.
    """

    hit_tokens: int
    items: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)


def usable_limit(num_tokens: int, step_tokens: int) -> int:
    """The longest hit a request of ``num_tokens`` may claim: one token is always computed, and hits are whole steps (B4.2)."""
    return max(0, num_tokens - 1) // step_tokens * step_tokens


def search(geometry: CacheGeometry, start: int, limit: int) -> Generator[Question, AbstractSet[Place], int]:
    """Asks what it takes to know how far a hit from ``start`` reaches, at most to ``limit``; returns that.

    Whoever runs it answers each question with the places that the store has. ``start`` and ``limit`` are multiples of
    ``geometry.step_tokens``.
    """
    step = geometry.step_tokens
    for group in (g for g in geometry.groups if g.retained_tokens is None and not g.is_state):
        found = yield Question(_places([group], start, limit), prefix=True)
        limit = min(limit, start + len(found) * group.block_tokens // step * step)
        if limit <= start:
            return start
    if geometry.drop_last_block:
        # A draft model's KV at a block's end was computed with the token after it: the last block is computed anew.
        limit -= step
    partial = [g for g in geometry.groups if g.retained_tokens is not None or g.is_state]
    if not partial or limit <= start:
        return limit
    # Most often the full hit's last windows are all there; only otherwise is it worth looking for shorter ones.
    tails = [
        place for place in _places(partial, start, limit) if place.position >= place.group.first_needed_block(limit)
    ]
    if len((yield Question(tails, prefix=False))) == len(tails):
        return limit
    found = yield Question(_places(partial, start, limit), prefix=False)
    present: dict[int, set[int]] = {}
    for place in found:
        present.setdefault(place.group.index, set()).add(place.position)
    return longest_hit(partial, present, start, limit, step)


def longest_hit(
    groups: Sequence[CacheGroup], present: Mapping[int, AbstractSet[int]], start: int, limit: int, step_tokens: int
) -> int:
    """The longest prefix, in tokens, that all ``groups`` can serve; ``start`` when nothing beyond it can be.

    ``present[group.index]`` holds the block positions that the store has. Tokens before ``start`` are in the engine already, in
    every group: they need not be in the store. ``start`` and ``limit`` are multiples of ``step_tokens``.
    """
    # runs[group][i]: how many blocks in a row, ending with block i, are present (or lie before start).
    runs = {group.index: _runs(group, present.get(group.index, frozenset()), start, limit) for group in groups}
    for hit in range(limit, start, -step_tokens):
        if all(_serves(group, runs[group.index], start, hit) for group in groups):
            return hit
    return start


def _places(groups: Sequence[CacheGroup], start: int, limit: int) -> list[Place]:
    return [
        Place(group, position)
        for group in groups
        for position in range(start // group.block_tokens, limit // group.block_tokens)
    ]


def _runs(group: CacheGroup, present: AbstractSet[int], start: int, limit: int) -> list[int]:
    """Lengths of the runs of present blocks ending at each position from ``start`` on (position 0 = the block at ``start``)."""
    runs, length = [], 0
    for position in range(start // group.block_tokens, limit // group.block_tokens):
        length = length + 1 if position in present else 0
        runs.append(length)
    return runs


def _serves(group: CacheGroup, runs: Sequence[int], start: int, hit: int) -> bool:
    first = max(group.first_needed_block(hit), start // group.block_tokens)
    needed = hit // group.block_tokens - first
    return needed <= 0 or runs[hit // group.block_tokens - start // group.block_tokens - 1] >= needed


class LoadPlanner:
    """Lookups, matches and loads of all requests."""

    def __init__(
        self, geometry: CacheGeometry, options: OffloadOptions, pool: BlockPool, server: OffloadServer
    ) -> None:
        self._geometry = geometry
        self._options = options
        self._pool = pool
        self._server = server
        self._lookups: dict[LookupId, Lookup] = {}
        self._next_lookup = 1

    def begin(self, state: OffloadRequest, start: int, now: float) -> Lookup | None:
        """Look up what comes after ``start`` tokens; None when that is nothing, or there is nobody to ask."""
        request, step = state.engine, self._geometry.step_tokens
        limit = usable_limit(request.total_tokens, step)
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

    def answered(self, number: LookupId, found: Found, now: float) -> None:
        """The server's answer; ignored for a lookup that was dropped."""
        lookup = self._lookups.get(number)
        if lookup is not None:
            lookup.found, lookup.done_at = found, now

    def match(self, state: OffloadRequest, computed_tokens: int, now: float) -> int | None:
        """How many tokens after ``computed_tokens`` can be loaded; None while that is not known."""
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
            return None if now < lookup.deadline else self._give_up(state, lookup)
        state.offered_from = computed_tokens
        return max(0, lookup.found.hit_tokens - computed_tokens)

    def take(self, state: OffloadRequest, tables: BlockTables, external_tokens: int) -> LoadJob:
        """The load of ``external_tokens`` of what was matched; without reads when that cannot be done."""
        job = LoadJob(state.engine.request_id)
        lookup, state.lookup = state.lookup, None
        state.loading = lookup
        if lookup is None or lookup.found is None:
            return job
        start, end = state.offered_from, state.offered_from + external_tokens
        if not state.engine.whole:
            state.progress.loaded = range(start, end)
        state.sources = count_sources(self._geometry, lookup.found, start, end)
        if not lacks_blocks(self._geometry, self._pool, tables, start, end):
            job.reads = plan_reads(self._geometry, lookup.found, tables, start, end)
        if job.reads:
            state.arriving = name_blocks(self._geometry, state.engine, tables, start, end)
        return job

    def failed(self, state: OffloadRequest) -> None:
        """The load did not arrive whole: the engine computes its blocks, and they are worth storing."""
        state.compute_only = True
        state.progress.loaded = range(0)
        state.arriving = []

    def ended(self, state: OffloadRequest) -> list[tuple[int, bytes]]:
        """The load is over: unpins it; returns the blocks that arrived, with their keys."""
        lookup, state.loading = state.loading, None
        self._let_go(lookup)
        arrived, state.arriving = state.arriving, []
        return arrived

    def drop(self, state: OffloadRequest) -> None:
        """Nobody will load what was, or will be, found."""
        lookup, state.lookup = state.lookup, None
        self._let_go(lookup)

    def _is_stale(self, lookup: Lookup, now: float) -> bool:
        if lookup.found is None or lookup.found.hit_tokens <= lookup.start:
            return False
        return now - lookup.done_at > self._options.hit_lifetime_s

    def _give_up(self, state: OffloadRequest, lookup: Lookup) -> int:
        state.lookup, state.compute_only = None, True
        del self._lookups[lookup.number]
        self._server.give_up_lookup(lookup.number)
        return 0

    def _let_go(self, lookup: Lookup | None) -> None:
        if lookup is not None:
            del self._lookups[lookup.number]
            self._server.drop_lookup(lookup.number)


def plan_reads(geometry: CacheGeometry, found: Found, tables: BlockTables, start: int, end: int) -> list[BlockRead]:
    """Returns the reads that fill all blocks that the engine allocated for [``start``, ``end``) tokens, one per lease.

    None at all when the lookup lacks one of them, for example because the engine took less than was offered and a sliding window
    now ends elsewhere: the engine will take every allocated block for loaded, so half a load is none. Likewise when it took part
    of a block.
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
            read = reads.setdefault(lease_id, BlockRead(lease_id))
            read.indices.append(index)
            read.groups.append(group.index)
            read.block_ids.append(block_id)
    return list(reads.values())


def lacks_blocks(geometry: CacheGeometry, pool: BlockPool, tables: BlockTables, start: int, end: int) -> bool:
    """Whether a sliding window lacks blocks from before ``start`` that a hit up to ``end`` needs.

    An engine with state groups may take for computed what full attention has, though a sliding window lost its blocks: it
    allocates those anew, and a lookup that began at ``start`` has never asked for them.
    """
    if not any(group.is_state for group in geometry.groups):
        return False
    return any(
        (block_id := tables[group.index][position]) != geometry.null_block and pool.known_as(block_id) is None
        for group in geometry.groups
        if group.kind is CacheGroupKind.WINDOW
        for position in range(group.first_needed_block(end), start // group.block_tokens)
    )


def count_sources(geometry: CacheGeometry, found: Found, start: int, end: int) -> dict[str, int]:
    """Returns the tokens of [``start``, ``end``) by the tier that had their block of the leading group ("" where unknown)."""
    block_tokens = geometry.leading_group.block_tokens
    counts: dict[str, int] = {}
    for position in range(start // block_tokens, end // block_tokens):
        source = found.sources.get(position, "")
        counts[source] = counts.get(source, 0) + block_tokens
    return counts


def name_blocks(
    geometry: CacheGeometry, request: EngineRequest, tables: BlockTables, start: int, end: int
) -> list[tuple[int, bytes]]:
    """Returns the blocks of [``start``, ``end``) tokens, each with the key of its content."""
    return [
        (tables[group.index][position], request.key(group, position))
        for group in geometry.groups
        for position in range(start // group.block_tokens, end // group.block_tokens)
        if tables[group.index][position] != geometry.null_block
    ]


class Phase(Enum):
    """Where a request is.

    WAITING: for its first or, after a preemption or a load, next computation. LOADING: workers write into its blocks.
    RUNNING: it computes. ENDING: it has ended while workers write into its blocks. ENDED: only saves of it may be left.
    """

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


@dataclass
class Lookup:
    """A question to the server about the blocks of [``start``, ``limit``) tokens; once answered, a pin on what was ``found``.

    ``done_at`` is when the answer came.
    """

    number: LookupId
    start: int
    limit: int
    deadline: float
    found: Found | None = None
    done_at: float = 0.0


@dataclass
class OffloadRequest:
    """One request.

    ``lookup``: what it waits for or may load; ``loading``: what is being loaded. ``offered_from``: the tokens that the engine had
    when it was last told of a hit. ``arriving``: the blocks being loaded, with their keys. ``compute_only``: a load or lookup of it
    failed; it is not tried again.
    """

    engine: EngineRequest
    phase: Phase = Phase.WAITING
    progress: SaveProgress = field(default_factory=SaveProgress)
    lookup: Lookup | None = None
    loading: Lookup | None = None
    offered_from: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    arriving: list[tuple[int, bytes]] = field(default_factory=list)
    compute_only: bool = False
    saves_in_flight: int = 0
