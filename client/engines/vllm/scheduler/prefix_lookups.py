"""Finding out what the store has of a request, off the scheduler's thread.

A lookup is started on the scheduler's thread, runs on a background thread, and is read again by the scheduler when it is done.
Whatever goes wrong with the server makes it a miss in bounded time: the calls have deadlines, a lookup past its budget is not
waited for, and after a failure no lookups are made for a moment: a hung server costs one budget, not one per request.
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
from ..background import BackgroundThreads, LimitedLog, logger
from ..stats import LookupMetrics, TransferCounters
from .requests import RequestRegistration, plain_params

__all__ = ["LookupService", "LookupState", "PendingLookup", "RequestCalls"]


_COOL_DOWN_S = 2.0


class RequestCalls:
    """Announces requests and ends them. Public methods are called on the scheduler's thread, unless they say otherwise."""

    def __init__(self, client: Client, log: LimitedLog) -> None:
        self._client = client
        self._log = log
        self._lock = threading.Lock()
        self._cool_until = 0.0
        # Its own thread: giving back must not queue behind lookups that wait for promotions.
        self._returns = BackgroundThreads("release", log)

    @property
    def cooling(self) -> bool:
        """Whether the server failed a moment ago and is not asked now. Any thread."""
        return time.monotonic() < self._cool_until

    def reachable(self) -> bool:
        """Whether it makes sense to ask the server anything now. Any thread."""
        if not self._client.connected:
            self._log.warn(
                "disconnected", "no kvtier server is connected; requests are computed as if nothing were cached"
            )
            return False
        return not self.cooling

    def cool_down(self, error: KVTierError | None = None) -> None:
        """Leave the server in peace for a moment; not for a refusal, which says something of one request only. Any thread."""
        if not isinstance(error, (InvalidRequest, LimitExceeded)):
            self._cool_until = time.monotonic() + _COOL_DOWN_S

    def announce(self, request: RequestRegistration) -> None:
        """Have the tiers vote on a request that is not looked up: they may want blocks that the engine has itself (B1.1)."""
        if self._client.connected and not self.cooling:
            self.hold(request)
            request.voting = True
            self._returns.submit(lambda: self._announce(request))

    def hold(self, request: RequestRegistration) -> None:
        """A call about the request begins: the server is not told of its end before as many ``let_go``."""
        with self._lock:
            request.pending += 1

    def let_go(self, request: RequestRegistration) -> None:
        """A call about the request has ended. Any thread."""
        with self._lock:
            request.pending -= 1
            finish = request.ended and request.pending == 0
        if finish:
            self._submit_finish(request)

    def finish_request(self, request: RequestRegistration) -> None:
        """Tell the server, in the background, that the request has ended: once nothing of it is pending."""
        with self._lock:
            request.ended = True
            finish = request.pending == 0
        if finish:
            self._submit_finish(request)

    def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back, in the background. Any thread."""
        for lease in leases:
            self._returns.submit(lease.release)

    def close(self) -> None:
        """End the thread; called at shutdown."""
        self._returns.close(1.0)

    def _submit_finish(self, request: RequestRegistration) -> None:
        if self._client.connected:
            self._returns.submit(lambda: self._finish(request.request_id))

    # ---- background threads from here on

    def ask(
        self, request: RequestRegistration, keys: Sequence[bytes], wait: float, *, prefix: bool, min_hits: int = 0
    ) -> Lease:
        """A request's first call announces it, so that the tiers vote on it; the others only look up. Raises KVTierError.

        ``min_hits``: with ``prefix``, fewer leading hits are misses.
        """
        options: dict[str, Any] = request.lookup_options()
        if min_hits > 1:
            options["min_hits"] = min_hits
        with self._lock:
            first, request.begun = not request.begun, True
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
            request.begun = False
            raise
        request.policy = lease.policy
        logger.debug("kvtier: request %s: %s, votes %s", request.request_id, lease.policy, lease.votes)
        return lease

    def _announce(self, request: RequestRegistration) -> None:
        try:
            if not request.begun:
                self.ask(request, (), 0.0, prefix=True)
        except KVTierError as error:
            self.cool_down(error)
            self._log.warn("announce", f"could not announce a request: {error}")
        finally:
            request.voting = False
            self.let_go(request)

    def _finish(self, request_id: str) -> None:
        try:
            self._client.finish_request(request_id)
        except KVTierError as error:
            self._log.warn("finish", f"could not end a request: {error}")


_WAIT_SHARE = 0.8


_THREADS = 8  # most of them wait, for promotions


class LookupState(Enum):
    """PENDING: still running. DONE: ``found`` is complete. DROPPED: nobody wants it any more."""

    PENDING = "pending"
    DONE = "done"
    DROPPED = "dropped"


@dataclass
class PendingLookup:
    """One request's lookup: where the blocks of [``start``, ``limit``) tokens are.

    ``found`` belongs to the background thread until the state is DONE, then to the scheduler's.
    """

    number: LookupId
    request: RequestRegistration
    start: int
    limit: int
    hashes: dict[int, Sequence[bytes]]
    deadline: float
    found: PrefixHit
    state: LookupState = LookupState.PENDING
    begun: bool = False
    leases: list[Lease] = field(default_factory=list)
    done_at: float = 0.0


class LookupService(RequestCalls):
    """Runs lookups and gives their leases back. ``start`` and ``drop`` are called on the scheduler's thread and never block."""

    def __init__(
        self,
        client: Client,
        geometry: CacheGeometry,
        timeout_s: float,
        log: LimitedLog,
        tally: TransferCounters | None = None,
    ) -> None:
        super().__init__(client, log)
        self._counts = LookupMetrics(geometry, tally or TransferCounters())
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
        """Begin to look up the blocks between ``start`` and ``limit`` tokens.

        ``hashes[group][i]`` is that of the i-th one after ``start``. Returns None when the server is not there: a miss at once.
        """
        if not self.reachable():
            # A request that waits for room in the engine is looked up at every step.
            if not request.unasked:
                self._counts.not_begun()
            request.unasked = True
            return None
        lookup = PendingLookup(
            number, request, start, limit, hashes, time.monotonic() + self._timeout_s, PrefixHit(start)
        )
        self.hold(request)
        self._lookups.submit(lambda: self._run(lookup))
        return lookup

    def take_done(self) -> list[PendingLookup]:
        """Returns the lookups that were done since the last call; some may have been dropped since."""
        return [self._done_lookups.popleft() for _ in range(len(self._done_lookups))]

    def drop(self, lookup: PendingLookup) -> None:
        """Nobody will load what this lookup found: give its leases back, now or when it ends."""
        self._drop(lookup)

    def timed_out(self, lookup: PendingLookup) -> None:
        """A request has waited its whole budget for ``lookup``: drop it and leave the server in peace for a moment."""
        if not self._drop(lookup):
            self._counts.timed_out(self._timeout_s)
        if lookup.begun:
            # One that only queued behind others says nothing of the server: it may be waiting for a disk.
            self.cool_down()
        self._log.warn("lookup", f"a lookup took longer than {self._timeout_s:g} s; requests are computed instead")

    def close(self) -> None:
        """End the threads; called at shutdown."""
        self._lookups.close(0.5)
        super().close()

    def _release(self, lookup: PendingLookup) -> None:
        leases, lookup.leases = lookup.leases, []
        self.release(leases)

    def _drop(self, lookup: PendingLookup) -> bool:
        """Whether it was done already."""
        with self._lock:
            was_done = lookup.state is LookupState.DONE
            lookup.state = LookupState.DROPPED
        if was_done:
            self._release(lookup)
        return was_done

    # ---- background threads from here on

    def _run(self, lookup: PendingLookup) -> None:
        hit, lookup.begun = None, True
        try:
            if lookup.state is LookupState.PENDING and not self.cooling and time.monotonic() < lookup.deadline:
                hit = self._search(lookup)
        except KVTierError as error:
            self.cool_down(error)
            self._log.warn("lookup", f"lookup failed, requests are computed instead: {error}")
        finally:
            # Whatever happened: a lookup that is never done would make its request wait for its whole budget.
            self._done(lookup, hit)

    def _done(self, lookup: PendingLookup, hit: int | None) -> None:
        """The lookup has ended with a hit up to ``hit`` tokens; None: nobody knows."""
        with self._lock:
            dropped = lookup.state is LookupState.DROPPED
            lookup.found.hit_tokens, lookup.done_at = hit or lookup.start, time.monotonic()
            if not dropped:
                lookup.state = LookupState.DONE
        if dropped or lookup.found.hit_tokens <= lookup.start:
            self._release(lookup)
        if not dropped:
            seconds = lookup.done_at - lookup.deadline + self._timeout_s
            self._counts.answered(lookup.start, lookup.limit, hit, seconds)
            self._done_lookups.append(lookup)
        self.let_go(lookup.request)

    def _search(self, lookup: PendingLookup) -> int:
        """How far the hit reaches; fills in what was found, and leases."""
        queries = search_hit(self._geometry, lookup.start, lookup.limit)
        try:
            query = next(queries)
            while True:
                query = queries.send(self._ask(lookup, query))
        except StopIteration as end:
            hit = int(end.value)
        return hit if hit - lookup.start >= lookup.request.settings.min_hit_tokens else lookup.start

    def _ask(self, lookup: PendingLookup, query: PresenceQuery) -> set[BlockPosition]:
        """Looks up in calls of at most the server's number of keys; returns what hit."""
        most = self._client.max_keys or max(1, len(query.blocks))
        found: set[BlockPosition] = set()
        for first in range(0, len(query.blocks), most):
            chunk = query.blocks[first : first + most]
            hits = self._ask_once(lookup, chunk, prefix=query.prefix, first=first == 0)
            found.update(hits)
            if query.prefix and len(hits) < len(chunk):
                break
        return found

    def _ask_once(
        self, lookup: PendingLookup, blocks: Sequence[BlockPosition], *, prefix: bool, first: bool
    ) -> list[BlockPosition]:
        keys = [
            make_key(lookup.hashes[g.index][position - lookup.start // g.block_tokens], g.index)
            for g, position in blocks
        ]
        # Less than the budget: what is ready by then comes back in time to be used.
        wait = max(0.0, lookup.deadline - time.monotonic()) * _WAIT_SHARE
        # So that nothing is brought up from a lower tier for a hit that is too short.
        least = -(-lookup.request.settings.min_hit_tokens // blocks[0].group.block_tokens) if prefix and first else 0
        lease = self.ask(lookup.request, keys, wait, prefix=prefix, min_hits=min(least, len(blocks)))
        lookup.leases.append(lease)
        statuses, sources = lease.statuses, lease.sources
        hits = []
        for index, place in enumerate(blocks):
            if statuses[index] == KeyStatus.HIT:
                hits.append(place)
                lookup.found.items.setdefault(place.group.index, {})[place.position] = (lease.id, index)
                if place.group.index == self._geometry.leading_group.index:
                    lookup.found.sources[place.position] = sources[index]
            elif prefix:
                break
        return hits
