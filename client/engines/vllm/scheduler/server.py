"""Gateway to the server for `OffloadCore`: makes calls in the background, collects answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from .... import Client
from ....offload import CacheGeometry, EngineRequest, LookupId, PrefixHit
from ..background import BackgroundThreads, RateLimitedLog
from ..stats import TransferCounters
from .prefix_lookups import LookupService, PendingLookup
from .requests import RequestRegistration, VllmRequest

__all__ = ["CacheReset", "ServerGateway"]

# The first "done" may end another engine's reset that began before this engine's last store.
_ROUNDS = 2
_WAIT_S = 1.0
_RETRY_S = 1.0


class ServerGateway:
    """Implements `OffloadServer`. Every method runs on the scheduler's thread and never blocks."""

    def __init__(
        self,
        client: Client,
        geometry: CacheGeometry,
        lookup_timeout_s: float,
        log: RateLimitedLog,
        counters: TransferCounters,
    ) -> None:
        self._client = client
        self._geometry = geometry
        self._service = LookupService(client, geometry, lookup_timeout_s, log, counters)
        self.resets = CacheReset(client, log)
        self._lookups: dict[LookupId, PendingLookup] = {}
        self._epoch: int | None = None

    def register(self, request: RequestRegistration) -> None:
        """Lets tiers vote on a request that is not looked up."""
        self._service.register(request)

    def answers(self) -> Iterator[tuple[LookupId, PrefixHit, float]]:
        """Yields the answers since the last call, each with the time of its arrival."""
        for lookup in self._service.take_done():
            yield lookup.number, lookup.found, lookup.done_at

    def has_changed(self) -> bool:
        """Whether a server was connected, replaced or restarted since the last call."""
        epoch = self._client.epoch
        if epoch in (None, self._epoch):
            return False
        self._epoch = epoch
        return True

    def close(self) -> None:
        self.resets.close()
        self._service.close()
        self._client.close()

    # ---- OffloadServer

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        assert isinstance(request, VllmRequest)
        hashes = {
            group.index: request.hashes(group)[start // group.block_tokens : limit // group.block_tokens]
            for group in self._geometry.groups
        }
        started = self._service.start(request.registration, hashes, start, limit, lookup)
        if started is not None:
            self._lookups[lookup] = started
        return started is not None

    def drop_lookup(self, lookup: LookupId) -> None:
        self._service.drop(self._lookups.pop(lookup))

    def give_up_lookup(self, lookup: LookupId) -> None:
        """Drops a lookup that exceeded its timeout. Opens the circuit if the lookup was running."""
        self._service.timed_out(self._lookups.pop(lookup))

    def end_request(self, request: EngineRequest) -> None:
        assert isinstance(request, VllmRequest)
        self._service.finish_request(request.registration)

    def empty(self) -> None:
        self.resets.start()


class CacheReset:
    """Empties the server's CPU tier. Retries until this succeeds.

    Public methods run on the scheduler's thread and, except `close`, never block.
    """

    def __init__(self, client: Client, log: RateLimitedLog) -> None:
        self._client = client
        self._log = log
        self._threads = BackgroundThreads("reset", log)
        self._closed = threading.Event()
        # Numbers of resets. Only the background thread writes `_done`.
        self._started = self._done = self._taken = 0

    @property
    def pending(self) -> bool:
        """Whether blocks that were stored before a reset may still exist."""
        return self._done != self._started

    def start(self) -> None:
        """Starts a reset. This engine's own saves must have ended before."""
        self._started = number = self._started + 1
        self._threads.submit(lambda: self._run(number))

    def take_done(self) -> bool:
        """Whether the latest reset was completed since the last call of this method."""
        done = self._done == self._started != self._taken
        if done:
            self._taken = self._started
        return done

    def close(self) -> None:
        self._closed.set()
        self._threads.close(0.5)

    def _run(self, number: int) -> None:
        rounds = _ROUNDS
        while rounds and not self._closed.is_set():
            try:
                rounds -= self._client.reset(wait=_WAIT_S) == 0
            except Exception as error:  # noqa: BLE001 - no lookup may find stale blocks
                self._log.warn(
                    "reset", f"the CPU tier could not be emptied; every request is a miss until it is: {error!r}"
                )
                self._closed.wait(_RETRY_S)
        self._done = number
