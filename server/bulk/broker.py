"""Broker of the bulk process, on the server's event loop: grants slots and tracks the streams.

While a Push stream runs, it counts as a writer of the session, like a process that maps the region.
If the store ends first, the store's slots are not reused until the stream no longer accesses them.
A Pull stream is a reader of its lease: if the lease ends first, the broker ends the stream, and the
blocks stay pinned until the stream no longer accesses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

from prometheus_client import Counter

from ...protos.v1 import common_pb2
from ...tiers.core.in_flight_stores import Store
from ...tiers.core.operations import run_to_end
from ...tiers.errors import CoreError, LeaseNotFound
from ...tiers.types import EngineSession, LeaseId, StoreId
from ..auth.audit_log import AuditLog
from ..auth.authenticator import Authenticator
from ..auth.rate_limits import RateLimiter
from ..auth.roles import require_role
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.own_copies import Writers
from ..rpc.request_checks import RequestValidator
from ..rpc.sessions import OpenSession, SessionRegistry
from ..telemetry.metrics import Metrics
from .messages import (
    Accepted,
    Begin,
    Caller,
    Committed,
    Damaged,
    Detached,
    End,
    Granted,
    Handshake,
    Moved,
    Refusal,
    ToChild,
)

__all__ = ["BulkBroker"]

_METHODS = {True: "/kvtier.v1.TransferService/Push", False: "/kvtier.v1.TransferService/Pull"}


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    push: bool
    ref: common_pb2.SessionRef
    target: int
    began_at: float
    moved: Counter
    access: ExitStack = field(default_factory=ExitStack)
    """Registers the stream as a writer of a store, or as a reader of a lease, until closed."""
    refused: bool = False
    detached: asyncio.Event = field(default_factory=asyncio.Event)
    limiter: RateLimiter | None = None
    granting: asyncio.Task[None] | None = None
    """Reads the slots of a long store or load."""

    def count(self, nbytes: int) -> None:
        self.moved.inc(nbytes)
        if self.limiter is not None:
            self.limiter.count_bytes(nbytes)


class SlotReader(Protocol):
    """Reads slots and sizes of parts in slices, while the event loop serves other calls."""

    async def read(
        self, session: EngineSession, lease_id: LeaseId, items: Sequence[int]
    ) -> tuple[list[int], list[int]]: ...

    async def read_store(self, session: EngineSession, store_id: StoreId) -> tuple[list[int], list[int]]: ...


class BulkBroker:
    """Serves one bulk process at a time."""

    def __init__(
        self,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        validator: RequestValidator,
        metrics: Metrics,
        writers: Writers,
        reader: SlotReader,
        authenticator: Authenticator | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """`authenticator` checks the clients' credentials; `audit` records refused streams."""
        self._runtime = runtime
        self._core = runtime.core
        self._sessions = sessions
        self._validator = validator
        self._authenticator = authenticator
        self._audit = audit
        self.writers = writers
        self._reader = reader
        self._observe = metrics.calls.observe
        self._count_refused = metrics.refused
        self._counters = {push: metrics.transfer("tcp", "in" if push else "out") for push in (True, False)}
        self._damaged = metrics.mismatches("grpc")
        self._streams: dict[int, _Stream] = {}
        self._committing: set[asyncio.Task[None]] = set()
        self._send: Callable[[ToChild], None] = lambda _: None

    def connected(self, say: Callable[[ToChild], None]) -> None:
        self._send = say

    def disconnected(self) -> None:
        """Called after the child has ended, so that no stream accesses the region any more."""
        self._send = lambda _: None
        for stream in list(self._streams.values()):
            self._observe(_METHODS[stream.push], "UNAVAILABLE", self._runtime.now() - stream.began_at)
            self._remove(stream)

    def handle(self, message: Handshake | Begin | Moved | Damaged | Detached | End) -> None:
        if isinstance(message, Handshake):
            self._handshake(message)
            return
        if isinstance(message, Begin):
            self._begin(message)
            return
        stream = self._streams.get(message.stream)
        if stream is None:
            return
        match message:
            case Moved():
                self._moved(stream, message)
            case Damaged():
                self._damaged.inc()
            case Detached():
                if message.nbytes:
                    self._moved(stream, message)
                self._detach(stream)
            case End():
                self._end(stream, message)

    def end_streams_of_store(self, store_id: int) -> list[asyncio.Event]:
        """Ends the Push streams of a store. Returns for each an event, set when it has detached."""
        if not self._streams:
            return []
        writing = [stream for stream in self._streams.values() if stream.push and stream.target == store_id]
        for stream in writing:
            self._refuse(stream, "STORE_NOT_FOUND", f"store {store_id} has been completed or cancelled, or has expired")
        return [stream.detached for stream in writing if not stream.detached.is_set()]

    def end_streams_of_lease(self, lease_id: int) -> None:
        for stream in self._streams.values():
            if not stream.push and stream.target == lease_id:
                self._refuse(stream, "LEASE_NOT_FOUND", f"lease {lease_id} has ended")

    def end_streams_of_session(self, session_id: bytes) -> None:
        for stream in self._streams.values():
            if stream.ref.session_id == session_id:
                self._refuse(stream, "UNKNOWN_SESSION", "the session has ended")

    def _handshake(self, message: Handshake) -> None:
        try:
            session = self._authenticate(message.caller)
        except Refused as error:
            self._record_refusal(_METHODS[True], message.caller.session_id, error)
            self._send(Refusal(message.stream, error.reason, str(error)))
        else:
            self._send(Accepted(message.stream, session.core.tenant))

    def _begin(self, message: Begin) -> None:
        caller = message.caller
        ref = common_pb2.SessionRef(session_id=caller.session_id, epoch=caller.epoch)
        moved = self._counters[message.push]
        stream = _Stream(message.stream, message.push, ref, message.target, self._runtime.now(), moved)
        self._streams[message.stream] = stream
        try:
            opened = self._authenticate(caller, _METHODS[message.push])
            stream.limiter = opened.limiter
            self._sessions.count_call(opened)
            if opened.limiter is not None:
                opened.limiter.check_stream()
            self._grant_push(stream, opened.core) if message.push else self._grant_pull(stream, message, opened.core)
        except (CoreError, Refused) as error:
            self._record_refusal(_METHODS[message.push], caller.session_id, error)
            self._refuse(stream, error.reason, str(error))
            return
        opened.transport = "tcp"

    def _authenticate(self, caller: Caller, method: str = "") -> OpenSession:
        """Checks session, credentials and tenant, and the roles for `method`. Raises `Refused`."""
        ref = common_pb2.SessionRef(session_id=caller.session_id, epoch=caller.epoch)
        if self._authenticator is None:
            return self._sessions.find(ref)
        identity = self._authenticator.identify(caller.token, caller.names, is_local=caller.is_local)
        session = self._sessions.find(ref, identity)
        if method:
            require_role(method.lstrip("/"), identity)
            require_role(method.lstrip("/"), session.identity)
        return session

    def _record_refusal(self, method: str, session_id: bytes, error: CoreError | Refused) -> None:
        if self._audit is not None:
            audited = error.audit_reason if isinstance(error, Refused) else error.reason
            self._audit.record_refusal(method, None, audited, self._sessions.name_of(session_id))

    def _grant_push(self, stream: _Stream, session: EngineSession) -> None:
        store = self._core.renew_store(session, StoreId(stream.target), self._new_expiry())
        stream.access.enter_context(self.writers.writing(store))
        store.is_streamed = True
        if len(store.blocks) > _GRANTED_BLOCKS:
            self._grant_later(stream, partial(self._reader.read_store, session, store.id), store)
        else:
            sizes = [block.part_bytes for block in store.blocks]
            self._send(Granted(stream.number, store.slots(), sizes, _received(store)))

    def _grant_pull(self, stream: _Stream, message: Begin, session: EngineSession) -> None:
        lease = self._core.lease(session, LeaseId(message.target))
        stream.access.enter_context(self.writers.reading(lease))
        if len(message.items) > _GRANTED_BLOCKS:
            self._grant_later(stream, partial(self._reader.read, session, lease.id, message.items))
        else:
            self._send(Granted(message.stream, *lease.read(message.items, session.own_rank())))

    def _grant_later(
        self,
        stream: _Stream,
        read: Callable[[], Awaitable[tuple[list[int], list[int]]]],
        store: Store | None = None,
    ) -> None:
        async def grant() -> None:
            try:
                granted = Granted(stream.number, *await read(), _received(store))
            except (CoreError, Refused) as error:
                if not stream.refused:
                    self._record_refusal(_METHODS[stream.push], stream.ref.session_id, error)
                    self._refuse(stream, error.reason, str(error))
                return
            if not stream.refused:
                self._send(granted)

        stream.granting = asyncio.get_running_loop().create_task(grant())

    def _moved(self, stream: _Stream, message: Moved | Detached | End) -> None:
        stream.count(message.nbytes)
        try:
            session = self._sessions.find(stream.ref).core
            if stream.push:
                store = self._core.renew_store(session, StoreId(stream.target), self._new_expiry())
                for start, end in zip(message.ranges[::2], message.ranges[1::2], strict=True):
                    store.receive(start, end)
            else:
                self._core.renew(session, LeaseId(stream.target), self._new_expiry())
        except (CoreError, Refused) as error:
            self._refuse(stream, error.reason, str(error))

    def _end(self, stream: _Stream, message: End) -> None:
        self._observe(_METHODS[stream.push], message.code, self._runtime.now() - stream.began_at)
        if message.nbytes and message.complete and not stream.push:
            stream.count(message.nbytes)  # does not renew the lease: it may have expired
        elif message.nbytes:
            self._moved(stream, message)
        self._remove(stream)
        if message.complete:
            self._answer(stream, self._commit)

    def _answer(self, stream: _Stream, commit: Callable[[_Stream], bool | None]) -> None:
        """Sends whether a stream has completed its store or load, unless the answer comes later."""
        try:
            if (completed := commit(stream)) is not None:
                self._send(Committed(stream.number, completed))
        except (CoreError, Refused) as error:
            self._send(Refusal(stream.number, error.reason, str(error)))

    def _commit(self, stream: _Stream) -> bool | None:
        """As `_complete`. Returns None while a thread computes the digests of the parts."""
        store = self._whole_store(stream) if stream.push else None
        recording = self.writers.record_digests(store) if store is not None else None
        if recording is None:
            return self._complete(stream)
        task = asyncio.get_running_loop().create_task(self._complete_later(stream, recording, self._send))
        self._committing.add(task)
        task.add_done_callback(self._committing.discard)
        return None

    async def _complete_later(
        self, stream: _Stream, recording: Awaitable[None], send: Callable[[ToChild], None]
    ) -> None:
        try:
            await recording
        finally:
            if self._send is send:  # another child has other streams
                self._answer(stream, self._complete)

    def _whole_store(self, stream: _Stream) -> Store | None:
        """Returns the store of a stream if all its bytes have arrived, and it is not long."""
        store = self._core.store(self._sessions.find(stream.ref).core, StoreId(stream.target))
        if self.writers.busy(stream.target) or len(store.blocks) > _COMPLETED_BLOCKS:
            return None
        return store if store.received.covers(0, sum(block.part_bytes for block in store.blocks)) else None

    def _complete(self, stream: _Stream) -> bool:
        """Completes a store or load; returns False if the client must complete the store.

        This is necessary if another stream still writes to the store, if the store is long, or if
        bytes of it are missing.
        """
        session = self._sessions.find(stream.ref).core
        if stream.push:
            if self._whole_store(stream) is None:
                return False
            try:
                run_to_end(self._core.complete_store(session, StoreId(stream.target), slice_blocks=_COMPLETED_BLOCKS))
            finally:
                self._runtime.run_commands()
            return True
        lease = self._core.lease(session, LeaseId(stream.target))
        if lease.expires_at <= self._runtime.now():
            raise LeaseNotFound(f"lease {lease.id} has expired")
        self._core.release(session, lease.id)
        self._runtime.run_commands()
        return True

    def _refuse(self, stream: _Stream, reason: str, text: str) -> None:
        if not stream.refused:
            stream.refused = True
            self._count_refused(_METHODS[stream.push], reason)
            self._send(Refusal(stream.number, reason, text))

    def _remove(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)
        if stream.granting is not None:
            stream.granting.cancel()
        self._detach(stream)

    def _detach(self, stream: _Stream) -> None:
        stream.detached.set()
        stream.access.close()

    def _new_expiry(self) -> float:
        return self._runtime.now() + self._validator.leases.default


_GRANTED_BLOCKS = 1024
"""The slots of a longer store or load are read in slices."""
_COMPLETED_BLOCKS = 1024
"""The end of a longer store would hold the event loop; CompleteStore runs in slices."""


def _received(store: Store | None) -> list[int]:
    return list(chain.from_iterable(store.received)) if store is not None else []
