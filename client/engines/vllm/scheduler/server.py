"""What the core wants of the server, carried out in the background; and what the server answers, for the scheduler's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from .... import Client
from ....offload import CacheGeometry, EngineRequest, LookupId, PrefixHit
from ..background import BackgroundThreads, LimitedLog
from ..stats import TransferCounters
from .prefix_lookups import LookupService, PendingLookup
from .requests import RequestRegistration, VllmRequest

__all__ = ["CacheReset", "ServerGateway"]


class ServerGateway:
    """The core's ``Server``. Every method is called on the scheduler's thread, and none blocks."""

    def __init__(
        self, client: Client, geometry: CacheGeometry, lookup_timeout_s: float, log: LimitedLog, tally: TransferCounters
    ) -> None:
        self._client = client
        self._geometry = geometry
        self._service = LookupService(client, geometry, lookup_timeout_s, log, tally)
        self.resets = CacheReset(client, log)
        self._lookups: dict[LookupId, PendingLookup] = {}
        self._epoch: int | None = None

    def announce(self, request: RequestRegistration) -> None:
        """Have the tiers vote on a request that is not looked up."""
        self._service.announce(request)

    def answers(self) -> Iterator[tuple[LookupId, PrefixHit, float]]:
        """What the server has answered since the last call, with the time at which it did."""
        for lookup in self._service.take_done():
            yield lookup.number, lookup.found, lookup.done_at

    def has_changed(self) -> bool:
        """Whether another server, or another life of it, is there than was at the last call (or there was none)."""
        epoch = self._client.epoch
        if epoch in (None, self._epoch):
            return False
        self._epoch = epoch
        return True

    def close(self) -> None:
        """End the threads and the session."""
        self.resets.close()
        self._service.close()
        self._client.close()

    # ---- what the core asks for

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        """See Server."""
        assert isinstance(request, VllmRequest)
        hashes = {
            group.index: request.hashes(group)[start // group.block_tokens : limit // group.block_tokens]
            for group in self._geometry.groups
        }
        started = self._service.start(request.announcement, hashes, start, limit, lookup)
        if started is not None:
            self._lookups[lookup] = started
        return started is not None

    def drop_lookup(self, lookup: LookupId) -> None:
        """See Server."""
        self._service.drop(self._lookups.pop(lookup))

    def give_up_lookup(self, lookup: LookupId) -> None:
        """See Server: and the server is left in peace for a moment."""
        self._service.timed_out(self._lookups.pop(lookup))

    def end_request(self, request: EngineRequest) -> None:
        """See Server."""
        assert isinstance(request, VllmRequest)
        self._service.finish_request(request.announcement)

    def empty(self) -> None:
        """See Server."""
        self.resets.start()


# The first time that the server says "done" may be the end of a reset that another engine began before this one stored its last.
_ROUNDS = 2


_WAIT_S = 1.0


_RETRY_S = 1.0


class CacheReset:
    """Has the server empty its CPU tier, as often as it was asked to, until it has.

    ``pending`` until the last of these is done, however long that takes. All calls on the scheduler's thread; none blocks.
    """

    def __init__(self, client: Client, log: LimitedLog) -> None:
        self._client = client
        self._log = log
        self._threads = BackgroundThreads("reset", log)
        self._closed = threading.Event()
        # Numbers of resets. Of these, only the background thread writes ``_done``.
        self._started = self._done = self._taken = 0

    @property
    def pending(self) -> bool:
        """Whether something from before a reset may still be there."""
        return self._done != self._started

    def start(self) -> None:
        """All that is stored by now is to go; this engine's own saves have ended."""
        self._started = number = self._started + 1
        self._threads.submit(lambda: self._run(number))

    def take_done(self) -> bool:
        """Whether the last reset that was started has been done since the last call."""
        done = self._done == self._started != self._taken
        if done:
            self._taken = self._started
        return done

    def close(self) -> None:
        """End the thread; called at shutdown."""
        self._closed.set()
        self._threads.close(0.5)

    def _run(self, number: int) -> None:
        rounds = _ROUNDS
        while rounds and not self._closed.is_set():
            try:
                rounds -= self._client.reset(wait=_WAIT_S) == 0
            except Exception as error:  # noqa: BLE001 - whatever it is, what may be stale must go before anything is looked up
                self._log.warn("reset", f"the store is not emptied yet, until then every request is a miss: {error!r}")
                self._closed.wait(_RETRY_S)
        self._done = number
