"""Session connection manager: opens a session, monitors its heartbeats and reconnects.

One thread connects and monitors. A second thread per session reads heartbeats, because gRPC's
blocking iterator has no time-out. The client opens a new session if heartbeats are missing (the
server hangs) or if the heartbeat stream ends (the server process has ended).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, get_args

import grpc

from ...cuda.host.pinning import Pin, PinError
from ...cuda.host.warmup import warm_up
from ...protos.backoff import Backoff
from ...protos.credentials import Credentials
from ...protos.endpoint import Endpoint
from ...protos.socket_owner import is_chosen
from ...protos.v1 import session_pb2, session_pb2_grpc
from ..errors import AccessDenied, Draining, InvalidRequest, KVTierError, NotConnected, ServerError, error_from_call
from ..namespace import Namespace
from ..timeouts import check_seconds
from .fork_guard import ForkGuarded
from .session import AttachError, Attachment, ClientSession, Slower
from .socket_calls import SocketCalls, SocketTarget
from .withdrawals import Withdrawals

__all__ = ["ClientIdentity", "EngineAddress", "SessionConnection", "TransportName"]

_log = logging.getLogger(__name__)

TransportName = Literal["auto", "shm", "tcp", "grpc", "cuda_ipc"]

PROTOCOL_VERSION = 2
_SILENT_INTERVALS = 5
"""Number of missing heartbeats that end a session. A busy server may send none for 1-2 s."""
_NOT_SHARED = "the server does not share its memory with these credentials (shared_memory)"

_random = random.SystemRandom()  # `random` would repeat itself in engines with equal seeds


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address of an engine, as routers know it.

    Attributes:
        address: `host:port` of the engine's API.
        model: name under which the engine serves the model; empty means the namespace's model.
    """

    address: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Parameters with which a client opens its sessions."""

    namespace: Namespace
    name: str
    engine_id: str
    rank: int | None
    transport: TransportName
    pin: Pin | None = None
    published: EngineAddress | None = None
    verify_all: bool = False

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` for an unknown transport or a value of the wrong type."""
        if self.transport not in get_args(TransportName):
            choices = ", ".join(get_args(TransportName))
            raise InvalidRequest(f"transport must be one of {choices}, not {self.transport!r}")
        if self.pin is not None and not callable(self.pin):
            raise InvalidRequest(f"pin must be a function, not {self.pin!r}")
        try:
            self.open_request("grpc")
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"name, engine_id, rank or namespace: {error}") from error

    def open_request(self, transport: str) -> session_pb2.OpenRequest:
        return session_pb2.OpenRequest(
            protocol_version=PROTOCOL_VERSION,
            client_name=self.name,
            engine_id=self.engine_id,
            rank=self.rank,
            namespace=self.namespace.to_proto(),
            pid=os.getpid(),
            transport=transport,
            engine_address=self.published.address if self.published is not None else "",
            served_model=self.published.model if self.published is not None else "",
            verify_all=self.verify_all,
        )


class SessionConnection(ForkGuarded):
    """Keeps a session open. After a failure, opens a new session."""

    def __init__(
        self,
        channel: grpc.Channel,
        endpoint: Endpoint,
        identity: ClientIdentity,
        call_timeout: float,
        credentials: Credentials,
    ) -> None:
        self._stub = session_pb2_grpc.SessionServiceStub(channel)
        self._withdrawals = Withdrawals(channel)
        self._endpoint = endpoint
        self._identity = identity
        self._call_timeout = call_timeout
        self._credentials = credentials
        self._changed = threading.Condition()
        self.latest: ClientSession | None = None
        """The session, which may have ended; None after the end of an attempt to connect."""
        self._error: KVTierError | None = None
        self._closing = threading.Event()
        self._capabilities_call: Any = None
        self._heartbeats: _Heartbeats | None = None
        self._no_region = ""
        """Why a client on the server's host does not try to map the region."""
        self._warned: dict[Slower, str] = {}
        self._thread = threading.Thread(target=self._run, name="kvtier-session", daemon=True)
        self._thread.start()

    @property
    def session(self) -> ClientSession | None:
        session = self.latest
        return None if session is None or session.ended else session

    def wait(self, seconds: float, *, patient: bool = False) -> ClientSession:
        """Returns the session. Waits at most `seconds` for the first attempt to connect.

        If `patient`, waits for further attempts too, unless the server's refusal is permanent. If
        there is no session, raises `KVTierError`: the error of the failed attempt, if an attempt
        failed.
        """
        session = self.latest
        if session is not None and not session.ended:
            return session
        check_seconds("timeout", seconds)
        with self._changed:
            # An ended session stays in `latest` until the connection thread sets `_error`.
            self._changed.wait_for(lambda: self._is_decided(patient=patient), seconds)
            session = self.session
            if session is not None:
                return session
            if self._closing.is_set():
                raise NotConnected("the client is closed")
            if self._error is None:
                raise NotConnected("the session has ended" if self.latest else "no server has answered yet")
            # A copy for each caller, because raising an exception adds stack frames to it.
            raise copy.copy(self._error)

    def _is_decided(self, *, patient: bool) -> bool:
        """Whether a wait for a session can end."""
        if self.session is not None or self._closing.is_set():
            return True
        if patient:
            return self._error is not None and self._error.permanent
        return self._error is not None or self.latest is not None

    def invalidate(self, session: ClientSession) -> None:
        """Ends a session that the server no longer knows; the client then reconnects."""
        session.end()
        with self._changed:
            # `_heartbeats` may already belong to a newer session, which must continue.
            heartbeats = self._heartbeats if self.latest is session else None
        if heartbeats is not None:
            heartbeats.cancel()

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        """Ends in the background what a call of the session was granted; see `Transport`."""
        if session.ended:
            return
        try:
            self._withdrawals.add(session, grant_id)
        except RuntimeError:  # no thread can be started; the end of the session ends the grant
            self.invalidate(session)

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._capabilities_call is not None:
            self._capabilities_call.cancel()
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self._withdrawals.close()
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while not self._closing.is_set():
            try:
                self._run_session()
                backoff.reset()
            except KVTierError as error:
                self._report(error)
                backoff.grow()
            except Exception as error:  # noqa: BLE001 - out of threads or descriptors: retry later
                _log.exception("kvtier: cannot open a session")
                self._report(ServerError(f"{type(error).__name__}: {error}"))
                backoff.delay = backoff.most
            # Jitter: the engines of a host must not all reconnect at the same time.
            self._closing.wait(backoff.delay * _random.uniform(0.5, 1.0))

    def _run_session(self) -> None:
        """Opens a session and returns when it has ended; raises if it cannot be opened."""
        try:
            self._capabilities_call = self._stub.Capabilities.future(
                session_pb2.CapabilitiesRequest(), timeout=self._call_timeout
            )
            if self._closing.is_set():  # `close` ran before this call existed
                self._capabilities_call.cancel()
            capabilities = self._capabilities_call.result()
            transport = self._pick_transport(capabilities)
            self._heartbeats = heartbeats = _Heartbeats(self._stub.Open(self._identity.open_request(transport)))
            if self._closing.is_set():  # `close` ran before this stream existed
                heartbeats.cancel()
            try:
                first = heartbeats.first(self._call_timeout)
                session = self._make_session(first, capabilities, transport)
                self._set_session(session)
                try:
                    while heartbeats.next_within(_SILENT_INTERVALS * first.heartbeat_interval.ToNanoseconds() / 1e9):
                        pass
                finally:
                    self._retire(session)
            finally:
                heartbeats.cancel()
        except grpc.RpcError as error:
            raise error_from_call(error) from None
        except grpc.FutureCancelledError:
            raise NotConnected("the client is closed") from None
        except TimeoutError:
            raise NotConnected("the server did not open a session in time") from None

    def _pick_transport(self, capabilities: session_pb2.CapabilitiesResponse) -> str:
        self._no_region = ""
        if self._identity.transport in ("grpc", "tcp"):
            return "grpc"
        if not capabilities.HasField("region"):
            if self._identity.transport == "shm":
                raise AccessDenied(f"transport shm: {_NOT_SHARED}")
            self._no_region = _NOT_SHARED if self._endpoint.is_loopback else ""
            return "grpc"
        path = capabilities.region.attach_path
        try:
            os.stat(path)  # noqa: PTH116 - the path may be of another host
        except PermissionError:
            self._no_region = f"this user may not open {path}: run the engine as the server's user"
        except (OSError, ValueError):
            if self._endpoint.is_loopback:
                self._no_region = f"no {path} in this container: mount its directory at the same path"
        else:
            return "shm"
        if self._identity.transport == "shm":
            raise InvalidRequest(self._no_region or f"transport shm: no {path} on this host")
        return "grpc"

    def _make_session(
        self, first: session_pb2.OpenResponse, capabilities: session_pb2.CapabilitiesResponse, transport: str
    ) -> ClientSession:
        if first.session.epoch != capabilities.epoch:
            raise NotConnected("the server was restarted while a session was opened")
        if transport == "grpc":
            reason = "another host" if capabilities.HasField("region") else _NOT_SHARED
            if self._identity.transport in ("grpc", "tcp"):
                reason = "set by the client"
            session = self._new_session(first, capabilities, None, self._no_region or reason)
            if self._no_region:
                session.downgraded("kvtier: shared memory is not used", self._no_region)
            return session
        path = capabilities.region.attach_path
        target = SocketTarget(path, first.session, self._credentials, is_chosen=is_chosen(path, self._endpoint))
        try:
            attachment = Attachment.connect(target, path, self._identity.pin)
        except AttachError as error:
            if self._identity.transport == "shm":
                # Probably the server was killed a moment ago, so another attempt can succeed.
                raise NotConnected(f"transport shm: {error}") from error
            session = self._new_session(first, capabilities, None, f"shm failed: {error}")
            session.downgraded("kvtier: shared memory is not used", f"{error}")
            return session
        calls = SocketCalls(target) if capabilities.region.takes_calls else None
        is_prepared = calls is not None and calls.prepare()
        session = self._new_session(first, capabilities, attachment, "same host", calls if is_prepared else None)
        session.recovered("kvtier: shared memory is not used")
        if calls is not None and not is_prepared:
            session.downgraded("kvtier: calls do not use the socket", calls.refusal)
        # If no thread can be started, only the first copies are slower.
        with contextlib.suppress(RuntimeError):
            arguments = (attachment.region, attachment.pinning, lambda: session.ended, _refused_by(session))
            threading.Thread(target=warm_up, args=arguments, name="kvtier-warmup", daemon=True).start()
        return session

    def _new_session(
        self,
        first: session_pb2.OpenResponse,
        capabilities: session_pb2.CapabilitiesResponse,
        attachment: Attachment | None,
        reason: str,
        calls: SocketCalls | None = None,
    ) -> ClientSession:
        return ClientSession(
            first.session,
            capabilities,
            attachment,
            reason,
            calls,
            warned=self._warned,
            namespace_id=first.namespace_id,
        )

    def _set_session(self, session: ClientSession) -> None:
        _log.info("kvtier: session open, transport %s (%s)", session.transport, session.transport_reason)
        with self._changed:
            self.latest = session
            self._error = None
            self._changed.notify_all()

    def _retire(self, session: ClientSession) -> None:
        session.end()
        with self._changed:
            self.latest = None
            self._error = NotConnected("the session has ended; connecting again")
        if not self._closing.is_set():
            _log.warning("kvtier: session lost, connecting again")

    def _report(self, error: KVTierError) -> None:
        with self._changed:
            known = type(self._error) is type(error)
            self.latest = None
            self._error = error
            self._changed.notify_all()
        if not known and not isinstance(error, Draining):
            _log.warning("kvtier: cannot open a session: %s", error)


def _refused_by(session: ClientSession) -> Callable[[PinError], None]:
    what: Slower = "kvtier: the region is not pinned, so copies to and from the GPU are slower"
    return lambda error: session.downgraded(what, str(error))


class _Heartbeats:
    """Responses of one `Open` stream. A thread reads them, so that waiting for one can time out."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._responses: SimpleQueue[session_pb2.OpenResponse | grpc.RpcError | None] = SimpleQueue()
        threading.Thread(target=self._read, name="kvtier-heartbeats", daemon=True).start()

    def first(self, seconds: float) -> session_pb2.OpenResponse:
        """Returns the first response. Raises `grpc.RpcError` or `TimeoutError`."""
        response = self._next(seconds)
        if isinstance(response, session_pb2.OpenResponse):
            return response
        raise response or TimeoutError

    def next_within(self, seconds: float) -> bool:
        return isinstance(self._next(seconds), session_pb2.OpenResponse)

    def cancel(self) -> None:
        self._stream.cancel()

    def _next(self, seconds: float) -> session_pb2.OpenResponse | grpc.RpcError | None:
        """Returns the next response or the stream's error; None after a time-out or the end."""
        with contextlib.suppress(Empty):
            return self._responses.get(timeout=seconds)
        return None

    def _read(self) -> None:
        try:
            for response in self._stream:
                self._responses.put(response)
        except grpc.RpcError as error:
            self._responses.put(error)
        finally:
            self._responses.put(None)
