"""Lookups of requests' blocks, made on background threads.

The scheduler starts a lookup, a background thread runs it, and the scheduler reads the result. If
the server fails, the lookup becomes a miss within a bounded time. Calls have deadlines, and a
lookup that exceeds its timeout is abandoned. After a failure the circuit stays open for 2 seconds:
no call is made. A hung server therefore costs one timeout in all, not one per request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .... import Client, InvalidRequest, KeyStatus, KVTierError, Lease, LimitExceeded, make_key
from ....offload import BlockPosition, CacheGeometry, LookupId, PrefixHit, PresenceQuery, search_hit
from ..background import BackgroundThreads, RateLimitedLog, logger
from ..stats import LookupMetrics, TransferCounters
from .requests import RequestRegistration, plain_params

__all__ = ["LookupService", "LookupState", "PendingLookup", "RequestCalls"]

_CIRCUIT_OPEN_S = 2.0
_WAIT_SHARE = 0.8
_THREADS = 8  # most of them wait for promotions


class RequestCalls:
    """Registers and ends requests at the server, and counts their calls in flight.

    Public methods run on the scheduler's thread, unless their text says "Thread-safe".
    """

    def __init__(self, client: Client, log: RateLimitedLog) -> None:
        self._client = client
        self._log = log
        self._lock = threading.Lock()
        self._circuit_open_until = 0.0
        # Separate thread: releases must not queue behind lookups that wait for promotions.
        self._control_thread = BackgroundThreads("release", log)

    @property
    def circuit_open(self) -> bool:
        """Whether the server has just failed, so that it is not called now. Thread-safe."""
        return time.monotonic() < self._circuit_open_until

    def reachable(self) -> bool:
        """Whether the server can be called now; warns if none is connected. Thread-safe."""
        if not self._client.connected:
            self._log.warn(
                "disconnected", "no kvtier server is connected; requests are computed as if nothing were cached"
            )
            return False
        return not self.circuit_open

    def open_circuit(self, error: KVTierError | None = None) -> None:
        """Stops calls for a moment, except after a refusal of a single request. Thread-safe."""
        if not isinstance(error, (InvalidRequest, LimitExceeded)):
            self._circuit_open_until = time.monotonic() + _CIRCUIT_OPEN_S

    def register(self, request: RequestRegistration) -> None:
        """Lets tiers vote on a request without lookup, because they may want its blocks (B1.1)."""
        if self._client.connected and not self.circuit_open:
            self.acquire(request)
            request.voting = True
            self._control_thread.submit(lambda: self._register(request))

    def acquire(self, request: RequestRegistration) -> None:
        """Records that a call about the request begins. `release` must follow."""
        with self._lock:
            request.pending += 1

    def release(self, request: RequestRegistration) -> None:
        """Records that a call about the request has ended. Thread-safe."""
        with self._lock:
            request.pending -= 1
            finish = request.ended and request.pending == 0
        if finish:
            self._submit_finish(request)

    def finish_request(self, request: RequestRegistration) -> None:
        """Tells the server that the request has ended, once no call about it is in flight."""
        with self._lock:
            request.ended = True
            finish = request.pending == 0
        if finish:
            self._submit_finish(request)

    def release_leases(self, leases: Sequence[Lease]) -> None:
        """Releases leases in the background. Thread-safe."""
        for lease in leases:
            self._control_thread.submit(lease.release)

    def close(self) -> None:
        self._control_thread.close(1.0)

    def _submit_finish(self, request: RequestRegistration) -> None:
        if self._client.connected:
            self._control_thread.submit(lambda: self._finish(request.request_id))

    # ---- on background threads

    def lookup_keys(
        self, request: RequestRegistration, keys: Sequence[bytes], wait: float, *, prefix: bool, min_hits: int = 0
    ) -> Lease:
        """Looks up keys. The first call for a request also registers it, so that tiers vote on it.

        With `prefix`, fewer than `min_hits` leading hits count as misses. Raises KVTierError.
        """
        options: dict[str, Any] = request.lookup_options()
        if min_hits > 1:
            options["min_hits"] = min_hits
        with self._lock:
            first, request.registered = not request.registered, True
        if not first:
            return self._client.lookup(keys, request_id=request.request_id, wait=wait, prefix=prefix, **options)
        try:
            lease = self._client.begin_request(
                request.request_id,
                keys,
                prompt_tokens=request.prompt_tokens,
                kv_transfer_params=plain_params(request.kv_transfer_params),
                wait=wait,
                prefix=prefix,
                **options,
                **request.begin_options(),
            )
        except KVTierError:
            request.registered = False
            raise
        request.policy = lease.policy
        logger.debug("kvtier: request %s: %s, votes %s", request.request_id, lease.policy, lease.votes)
        return lease

    def _register(self, request: RequestRegistration) -> None:
        try:
            if not request.registered:
                self.lookup_keys(request, (), 0.0, prefix=True)
        except KVTierError as error:
            self.open_circuit(error)
            self._log.warn("register", f"could not register a request: {error}")
        finally:
            request.voting = False
            self.release(request)

    def _finish(self, request_id: str) -> None:
        try:
            self._client.finish_request(request_id)
        except KVTierError as error:
            self._log.warn("finish", f"could not end a request: {error}")


class LookupState(Enum):
    """PENDING: still running. DONE: `found` is complete. DROPPED: the result is not wanted."""

    PENDING = "pending"
    DONE = "done"
    DROPPED = "dropped"


@dataclass
class PendingLookup:
    """Lookup of the blocks from `start` to `limit` tokens of one request.

    `found` belongs to the background thread until the state is DONE, then to the scheduler.
    """

    number: LookupId
    request: RequestRegistration
    start: int
    limit: int
    hashes: dict[int, Sequence[bytes]]
    deadline: float
    found: PrefixHit
    state: LookupState = LookupState.PENDING
    started: bool = False
    leases: list[Lease] = field(default_factory=list)
    done_at: float = 0.0


class LookupService(RequestCalls):
    """Runs lookups and releases their leases. Methods run on the scheduler's thread."""

    def __init__(
        self,
        client: Client,
        geometry: CacheGeometry,
        timeout_s: float,
        log: RateLimitedLog,
        counters: TransferCounters | None = None,
    ) -> None:
        super().__init__(client, log)
        self._metrics = LookupMetrics(geometry, counters or TransferCounters())
        self._geometry = geometry
        self._timeout_s = timeout_s
        self._done_lookups: deque[PendingLookup] = deque()
        self._lookups = BackgroundThreads("lookup", log, threads=_THREADS)

    def start(
        self,
        request: RequestRegistration,
        hashes: dict[int, Sequence[bytes]],
        start: int,
        limit: int,
        number: LookupId = LookupId(0),  # noqa: B008 - a NewType is no call
    ) -> PendingLookup | None:
        """Starts a lookup of the blocks between `start` and `limit` tokens.

        `hashes[group][i]` is the hash of the i-th block after `start`. If the server cannot be
        called, returns None, which means a miss.
        """
        if not self.reachable():
            # A request that waits for free blocks is looked up again in every step.
            if not request.counted_unavailable:
                self._metrics.unavailable()
            request.counted_unavailable = True
            return None
        lookup = PendingLookup(
            number, request, start, limit, hashes, time.monotonic() + self._timeout_s, PrefixHit(start)
        )
        self.acquire(request)
        self._lookups.submit(lambda: self._run(lookup))
        return lookup

    def take_done(self) -> list[PendingLookup]:
        """Returns the lookups that ended since the last call. Some may be dropped already."""
        return [self._done_lookups.popleft() for _ in range(len(self._done_lookups))]

    def drop(self, lookup: PendingLookup) -> bool:
        """Releases the lookup's leases, now or when it ends. Returns whether it has ended."""
        with self._lock:
            was_done = lookup.state is LookupState.DONE
            lookup.state = LookupState.DROPPED
        if was_done:
            self._release(lookup)
        return was_done

    def timed_out(self, lookup: PendingLookup) -> None:
        """Drops a lookup that exceeded its timeout, and opens the circuit if it was running."""
        if not self.drop(lookup):
            self._metrics.timed_out(self._timeout_s)
        if lookup.started:
            # If it did not start, it only queued behind others, and the server may be well.
            self.open_circuit()
        self._log.warn("lookup", f"a lookup took longer than {self._timeout_s:g} s, so its request is computed")

    def close(self) -> None:
        self._lookups.close(0.5)
        super().close()

    def _release(self, lookup: PendingLookup) -> None:
        leases, lookup.leases = lookup.leases, []
        self.release_leases(leases)

    # ---- on background threads

    def _run(self, lookup: PendingLookup) -> None:
        hit, lookup.started = None, True
        try:
            if lookup.state is LookupState.PENDING and not self.circuit_open and time.monotonic() < lookup.deadline:
                hit = self._search(lookup)
        except KVTierError as error:
            self.open_circuit(error)
            self._log.warn("lookup", f"a lookup failed, so its request is computed: {error}")
        finally:
            # Always, because otherwise the request would wait for the whole timeout.
            self._done(lookup, hit)

    def _done(self, lookup: PendingLookup, hit: int | None) -> None:
        """Ends the lookup with a hit up to token `hit`, which is None if the lookup failed."""
        with self._lock:
            dropped = lookup.state is LookupState.DROPPED
            lookup.found.hit_tokens, lookup.done_at = hit or lookup.start, time.monotonic()
            if not dropped:
                lookup.state = LookupState.DONE
        if dropped or lookup.found.hit_tokens <= lookup.start:
            self._release(lookup)
        if not dropped:
            seconds = lookup.done_at - lookup.deadline + self._timeout_s
            self._metrics.answered(lookup.start, lookup.limit, hit, seconds)
            self._done_lookups.append(lookup)
        self.release(lookup.request)

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
        """Looks up in several calls if the server limits the keys of a call. Returns the hits."""
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
            make_key(lookup.hashes[g.index][position - lookup.start // g.block_tokens], g.index)
            for g, position in blocks
        ]
        # Less than the timeout, so that the answer arrives before the timeout.
        wait = max(0.0, lookup.deadline - time.monotonic()) * _WAIT_SHARE
        # The server then promotes nothing for a hit that is too short.
        least = -(-lookup.request.settings.min_hit_tokens // blocks[0].group.block_tokens) if prefix and first else 0
        lease = self.lookup_keys(lookup.request, keys, wait, prefix=prefix, min_hits=min(least, len(blocks)))
        lookup.leases.append(lease)
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
