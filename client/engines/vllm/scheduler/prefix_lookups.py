"""Lookups of requests' blocks, made on background threads.

The scheduler starts a lookup, a background thread runs it, and the scheduler reads the result. If
the server fails, the lookup becomes a miss within a bounded time. Calls have deadlines, and a
lookup that exceeds its timeout is abandoned. After a failure the circuit is open for 2 seconds:
the connector makes no calls to the server, and each lookup is a miss at once. So a hung server does
not delay each request by the whole timeout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from .... import Client, KeyStatus, KVTierError, Lease, LeaseOptions, make_key
from ....offload import BlockPosition, CacheGeometry, EngineRequest, LookupId, PrefixHit, PresenceQuery, search_hit
from ..background import BackgroundThreads, RateLimitedLog
from ..stats import TransferCounters
from .requests import RequestRegistration, VllmRequest
from .server_calls import CacheReset, RequestCalls

__all__ = ["LookupService", "LookupState", "PendingLookup"]

_WAIT_SHARE = 0.8
_THREADS = 8  # a lookup mostly waits for promotions from lower tiers


class LookupState(Enum):
    """PENDING: not ended. DONE: `found` is complete. DROPPED: the core ignores the result."""

    PENDING = "pending"
    DONE = "done"
    DROPPED = "dropped"


@dataclass
class PendingLookup:
    """Lookup of one request's blocks from token `start` to token `limit`.

    Only the background thread uses `found` until the state is DONE, then only the scheduler.
    """

    number: LookupId
    request: RequestRegistration
    start: int
    limit: int
    hashes: dict[int, Sequence[bytes]]
    deadline: float
    found: PrefixHit
    tag: bytes = b""
    state: LookupState = LookupState.PENDING
    started: bool = False
    leases: list[Lease] = field(default_factory=list)
    done_at: float = 0.0


class LookupService(RequestCalls):
    """Implements `OffloadServer`. Public methods run on the scheduler's thread and never block."""

    def __init__(
        self,
        client: Client,
        geometry: CacheGeometry,
        timeout_s: float,
        log: RateLimitedLog,
        counters: TransferCounters | None = None,
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        """`on_drained`: starts the reset; by default, the reset empties the CPU tier."""
        super().__init__(client, log)
        self.resets = CacheReset(log)
        self._on_drained = on_drained or self.empty_cpu_tier
        self._counters = counters or TransferCounters()
        self._geometry = geometry
        self._timeout_s = timeout_s
        self._lookups: dict[LookupId, PendingLookup] = {}
        self._done_lookups: deque[PendingLookup] = deque()
        self._lookup_threads = BackgroundThreads("lookup", log, threads=_THREADS)
        self._epoch: int | None = None

    def answers(self) -> Iterator[tuple[LookupId, PrefixHit, float]]:
        """Yields id, result and time of each newly ended lookup. The core ignores dropped ones."""
        for _ in range(len(self._done_lookups)):
            lookup = self._done_lookups.popleft()
            yield lookup.number, lookup.found, lookup.done_at

    def has_changed(self) -> bool:
        """Whether the client has connected to a new or restarted server since the last call."""
        epoch = self._client.epoch
        if epoch in (None, self._epoch):
            return False
        self._epoch = epoch
        return True

    def close(self) -> None:
        self.resets.close()
        self._lookup_threads.close(0.5)
        super().close()
        self._client.close()

    # ---- OffloadServer

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        assert isinstance(request, VllmRequest)
        registration = request.registration
        if not self.reachable():
            # Counted once: vLLM asks again in every step while a request waits for free blocks.
            if not registration.counted_unavailable:
                self._counters.count("lookups:unavailable")
            registration.counted_unavailable = True
            return False
        hashes = {
            group.index: request.hashes(group)[start // group.block_tokens : limit // group.block_tokens]
            for group in self._geometry.groups
        }
        deadline = time.monotonic() + self._timeout_s
        started = PendingLookup(lookup, registration, start, limit, hashes, deadline, PrefixHit(start), request.tag)
        self._lookups[lookup] = started
        self.acquire(registration)
        self._lookup_threads.submit(lambda: self._run(started))
        return True

    def drop_lookup(self, lookup: LookupId) -> None:
        self._drop(self._lookups.pop(lookup))

    def abandon_lookup(self, lookup: LookupId) -> None:
        """Drops a lookup that exceeded its timeout. Opens the circuit if the lookup was running."""
        abandoned = self._lookups.pop(lookup)
        if not self._drop(abandoned):
            self._count("timeout", self._timeout_s)
        if abandoned.started:
            # A lookup that did not start only queued behind other lookups.
            self.circuit.open()
        self._log.warn("lookup", f"a lookup took longer than {self._timeout_s:g} s, so its request is computed")

    def end_request(self, request: EngineRequest) -> None:
        assert isinstance(request, VllmRequest)
        self.finish_request(request.registration)

    def empty(self) -> None:
        self._on_drained()

    def empty_cpu_tier(self) -> None:
        self.resets.empty(self._client)

    # ---- details

    def _drop(self, lookup: PendingLookup) -> bool:
        """Releases the leases of a lookup, now or when it ends. Returns whether it has ended."""
        with self._lock:
            was_done = lookup.state is LookupState.DONE
            lookup.state = LookupState.DROPPED
        if was_done:
            self._release(lookup)
        return was_done

    def _release(self, lookup: PendingLookup) -> None:
        leases, lookup.leases = lookup.leases, []
        self.release_leases(leases)

    # ---- on background threads

    def _run(self, lookup: PendingLookup) -> None:
        hit, lookup.started = None, True
        try:
            if lookup.state is LookupState.PENDING and not self.circuit.is_open and time.monotonic() < lookup.deadline:
                hit = self._search(lookup)
        except KVTierError as error:
            if lookup.state is LookupState.PENDING:  # a reset drops lookups and closes their client
                self.circuit.open(error)
                self._log.warn("lookup", f"a lookup failed, so its request is computed: {error}")
        finally:
            # If the lookup did not end here, its request would wait for the whole timeout.
            self._done(lookup, hit)

    def _done(self, lookup: PendingLookup, hit: int | None) -> None:
        """Ends the lookup. `hit`: end of the hit in tokens, or None if the lookup failed."""
        with self._lock:
            dropped = lookup.state is LookupState.DROPPED
            lookup.found.hit_tokens, lookup.done_at = hit or lookup.start, time.monotonic()
            if not dropped:
                lookup.state = LookupState.DONE
        if dropped or lookup.found.hit_tokens <= lookup.start:
            self._release(lookup)
        if not dropped:
            self._count(self._outcome(lookup, hit), lookup.done_at - lookup.deadline + self._timeout_s)
            self._done_lookups.append(lookup)
        self.release(lookup.request)

    def _count(self, outcome: str, seconds: float) -> None:
        self._counters.count(f"lookups:{outcome}")
        self._counters.observe("lookup_seconds", seconds)

    def _outcome(self, lookup: PendingLookup, hit: int | None) -> str:
        if hit is None:
            return "unavailable"
        # With a draft model the last block of a hit is always recomputed.
        never_hit = self._geometry.step_tokens if self._geometry.drop_last_block else 0
        return "miss" if hit <= lookup.start else "hit" if hit >= lookup.limit - never_hit else "partial"

    def _search(self, lookup: PendingLookup) -> int:
        """Returns the end of the hit in tokens. Fills in `found` and `leases`."""
        queries = search_hit(self._geometry, lookup.start, lookup.limit)
        try:
            query = next(queries)
            while True:
                query = queries.send(self._lookup_places(lookup, query))
        except StopIteration as end:
            hit = int(end.value)
        return hit if hit - lookup.start >= lookup.request.settings.min_hit_tokens else lookup.start

    def _lookup_places(self, lookup: PendingLookup, query: PresenceQuery) -> set[BlockPosition]:
        most = self._client.max_keys or max(1, len(query.blocks))
        found: set[BlockPosition] = set()
        for first in range(0, len(query.blocks), most):
            chunk = query.blocks[first : first + most]
            hits = self._lookup_chunk(lookup, chunk, prefix=query.prefix, first=first == 0)
            found.update(hits)
            if query.prefix and len(hits) < len(chunk):
                break
        return found

    def _lookup_chunk(
        self, lookup: PendingLookup, blocks: Sequence[BlockPosition], *, prefix: bool, first: bool
    ) -> list[BlockPosition]:
        keys = [
            make_key(lookup.hashes[g.index][position - lookup.start // g.block_tokens] + lookup.tag, g.index)
            for g, position in blocks
        ]
        # The server waits for less than the timeout, so that its answer arrives in time.
        wait = max(0.0, lookup.deadline - time.monotonic()) * _WAIT_SHARE
        options: LeaseOptions = {"wait": wait, "prefix": prefix}
        least = -(-lookup.request.settings.min_hit_tokens // blocks[0].group.block_tokens) if prefix and first else 0
        if (least := min(least, len(blocks))) > 1:
            options["min_hits"] = least  # for a shorter hit the server then promotes nothing
        lease = self.lookup_keys(lookup.request, keys, **options)
        lookup.leases.append(lease)
        lookup.found.slots[lease.id] = lease.slots
        statuses, sources = lease.statuses, lease.sources
        hits = []
        for index, block in enumerate(blocks):
            if statuses[index] == KeyStatus.HIT:
                hits.append(block)
                lookup.found.items.setdefault(block.group.index, {})[block.position] = (lease.id, index)
                if block.group.index == self._geometry.leading_group.index:
                    lookup.found.sources[block.position] = sources[index]
            elif prefix:
                break
        return hits
