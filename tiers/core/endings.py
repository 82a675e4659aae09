"""Endings: ends leases, stores and requests in slices, if they expire or if their session ends.

A client may have ten thousands of them. The core closes leases and stores at once: no call finds
them, and they do not count as open. Their pins and slots are given up in the slices. A call that
names a request, or a store, whose slice has not come ends it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..types import EngineSession, StoreId, tenant_of
from .in_flight_stores import Store
from .leases import BlockLease
from .lookups import LookupHandler
from .operations import Operation
from .requests import RequestTable
from .stores import StoreHandler

__all__ = ["Endings"]

SLICE = 128
"""Number of leases that a slice ends: about 1 ms."""
_STORE_COST = 2
"""To end a store takes as long as this number of leases."""
_PENDING_ITEMS = 16
"""Number of pending items that take as long as a lease."""
REQUEST_SLICE = 32
"""Number of requests that a slice ends: 1 to 2 ms."""
_AWAITED_BLOCKS = 64
"""Number of awaited blocks that take as long as a request."""


class Endings:
    def __init__(
        self,
        *,
        sessions: Mapping[bytes, EngineSession],
        lookups: LookupHandler,
        stores: StoreHandler,
        requests: RequestTable,
        perform: Callable[[Operation[None], bytes], None],
    ) -> None:
        """`sessions`: the open ones. `perform`: see `IncrementalWork.perform`."""
        self._sessions = sessions
        self._lookups = lookups
        self._stores = stores
        self._requests = requests
        self._perform = perform
        self.sessions: dict[bytes, EngineSession] = {}
        """Ended sessions with leases or stores that have not ended. Their `writers` are the
        connections that can still write to their slots."""
        self.expired_leases = self.expired_stores = 0

    def end_session(self, session: EngineSession) -> None:
        """Ends the leases, stores and requests of a session; quarantines slots with writers."""
        session.ended = True
        self.sessions[session.id] = session
        leases, stores = self._lookups.leases.of_session(session.id), self._stores.table.owned_by(session.id)
        self._close(leases, stores)
        tenant = tenant_of(session.namespace.id)
        self._perform(self._end_session(session, leases, stores), tenant)
        self._perform(self._end_requests(session), tenant)  # may raise, if a tier does

    def expire(self, leases: Sequence[BlockLease], stores: Sequence[Store]) -> None:
        """Ends open leases and stores without their clients."""
        self.expired_leases += len(leases)
        self.expired_stores += len(stores)
        self._close(leases, stores)
        if leases or stores:
            self._perform(self._expire(leases, stores), b"")

    def end_leases(self, leases: Sequence[BlockLease]) -> None:
        self._close(leases, ())
        if leases:
            self._perform(self._end_leases(leases), tenant_of(leases[0].owner.engine[0]))

    def writer_gone(self, session_id: bytes, writer: int) -> None:
        """Called when a writer connection of a session has ended."""
        tenant = b""
        if (session := self._session(session_id)) is not None:
            session.writers.discard(writer)
            tenant = tenant_of(session.namespace.id)
        self._perform(self._lift_quarantine(writer), tenant)

    def writer_done(self, session: EngineSession, store_id: StoreId) -> None:
        """Called when a client completes an ended store."""
        store = self._stores.table.closed(store_id)
        if store is not None and store.owner.engine == session.engine:
            self._abandon([store])
        self._stores.table.writer_done(store_id, session.engine)

    def _session(self, session_id: bytes) -> EngineSession | None:
        return self._sessions.get(session_id) or self.sessions.get(session_id)

    def _close(self, leases: Sequence[BlockLease], stores: Sequence[Store]) -> None:
        self._lookups.close(leases)
        for store in stores:
            session = self._session(store.owner.session_id)
            self._stores.table.close(store, session.writers if session is not None else ())

    def _end_session(
        self, session: EngineSession, leases: Sequence[BlockLease], stores: Sequence[Store]
    ) -> Operation[None]:
        yield from self._end_leases(leases)
        yield from self._end_stores(stores)
        del self.sessions[session.id]

    def _end_requests(self, session: EngineSession) -> Operation[None]:
        cost = 0.0
        for request_id in list(session.requests):
            awaited = self._requests.awaited_by(session.tenant)
            self._requests.get(session.engine, request_id)  # finishes it
            cost += 1 + (awaited - self._requests.awaited_by(session.tenant)) / _AWAITED_BLOCKS
            if cost >= REQUEST_SLICE:
                yield None
                cost = 0.0

    def _expire(self, leases: Sequence[BlockLease], stores: Sequence[Store]) -> Operation[None]:
        yield from self._end_leases(leases)
        yield from self._end_stores(stores)

    def _end_leases(self, leases: Sequence[BlockLease]) -> Operation[None]:
        """Ends closed leases, unless another operation has ended them."""
        for number, part in enumerate(_slices(leases)):
            if number:
                yield None
            self._lookups.end([lease for lease in part if self._lookups.leases.is_closed(lease)])

    def _end_stores(self, stores: Sequence[Store]) -> Operation[None]:
        most = max(1, SLICE // _STORE_COST)
        for start in range(0, len(stores), most):
            if start:
                yield None
            part = stores[start : start + most]
            self._abandon([store for store in part if self._stores.table.closed(store.id) is store])

    def _abandon(self, stores: Sequence[Store]) -> None:
        """Ends closed stores; quarantines slots for the connections that still can write."""
        for store in stores:
            session = self._session(store.owner.session_id)
            store.writers &= session.writers if session is not None else frozenset()
        self._stores.abandon(stores)

    def _lift_quarantine(self, writer: int) -> Operation[None]:
        most = max(1, SLICE // _STORE_COST)
        for number, store_id in enumerate(self._stores.table.take_writer(writer), start=1):
            self._stores.table.lift(store_id, writer)
            if not number % most:
                yield None


def _slices(leases: Sequence[BlockLease]) -> Iterator[list[BlockLease]]:
    """Yields leases that one slice ends, by their cost at this time."""
    part: list[BlockLease] = []
    cost = 0.0
    for lease in leases:
        part.append(lease)
        cost += 1 + lease.pending / _PENDING_ITEMS
        if cost >= SLICE:
            yield part
            part, cost = [], 0.0
    if part:
        yield part
