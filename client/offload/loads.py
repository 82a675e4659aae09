"""What a request may load: asked of the server when it arrives, pinned until it is loaded or not wanted any more (B4.2, B4.3)."""

from __future__ import annotations

from .engine import BlockPool, LookupId, Server
from .groups import BlockTables, CacheGeometry
from .hits import Found, usable_limit
from .options import OffloadOptions
from .plans import LoadJob
from .reads import count_sources, lacks_blocks, name_blocks, plan_reads
from .requests import Lookup, OffloadRequest

__all__ = ["LoadPlanner"]


class LoadPlanner:
    """Lookups, matches and loads of all requests."""

    def __init__(self, geometry: CacheGeometry, options: OffloadOptions, pool: BlockPool, server: Server) -> None:
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
