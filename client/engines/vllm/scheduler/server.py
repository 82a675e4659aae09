"""What the core wants of the server, carried out in the background; and what the server answers, for the scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterator

from .... import Client
from ....offload import CacheGeometry, EngineRequest, Found, LookupId
from ..background import LimitedLog
from ..stats import Tally
from .announcements import Announcement
from .prefix_lookups import Lookup, LookupService
from .requests import VllmRequest
from .resets import CacheReset

__all__ = ["Remote"]


class Remote:
    """The core's ``Server``. Every method is called on the scheduler's thread, and none blocks."""

    def __init__(
        self, client: Client, geometry: CacheGeometry, lookup_timeout_s: float, log: LimitedLog, tally: Tally
    ) -> None:
        self._client = client
        self._geometry = geometry
        self._service = LookupService(client, geometry, lookup_timeout_s, log, tally)
        self.resets = CacheReset(client, log)
        self._lookups: dict[LookupId, Lookup] = {}
        self._epoch: int | None = None

    def announce(self, request: Announcement) -> None:
        """Have the tiers vote on a request that is not looked up."""
        self._service.announce(request)

    def answers(self) -> Iterator[tuple[LookupId, Found, float]]:
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
