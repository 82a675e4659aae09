"""Connector to the server's sockets for streams and calls (`docs/wire.md`).

A background thread finds the socket and connects to it before the first stream. It does so again if
the connection is lost. While there is no connection (for example because of a firewall), streams
use the gRPC channel of the unary calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc

from ...protos.backoff import Backoff
from ...protos.credentials import Credentials
from ...protos.endpoint import Endpoint
from ...protos.socket_owner import is_chosen
from ...protos.v1 import transfer_pb2
from ..effects import Pull, Push
from ..errors import KVTierError, NotConnected
from ..session.fork_guard import ForkGuarded
from ..session.session import ClientSession
from ..session.socket_calls import SocketTarget
from .grpc_methods import LOCATE, PULL, PUSH, path_of, serialize
from .socket_streams import SocketStreams

__all__ = ["GrpcStreams", "SocketConnector"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOCATE_SECONDS = 5.0
_NO_SOCKET: Final = "kvtier: streams do not use the socket"


class GrpcStreams:
    """Push and Pull streams over one gRPC channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._push = channel.stream_unary(PUSH, serialize, transfer_pb2.PushResponse.FromString)
        self._pull = channel.unary_stream(PULL, serialize, transfer_pb2.PullResponse.FromString)

    def push(self, effect: Push, on_start: Callable[[Any], object] = lambda _: None) -> Any:
        """Sends frames; returns the response. `on_start` gets the call and may cancel it later."""
        call = self._push.future(effect.frames(), timeout=effect.timeout)
        on_start(call)
        with effect.session.cancelling(call.cancel):
            return call.result()

    def pull(self, effect: Pull, on_start: Callable[[Any], object] = lambda _: None) -> None:
        """Receives frames into `effect.sink`. For `on_start` see `push`."""
        call = self._pull(effect.request, timeout=effect.timeout)
        on_start(call)
        with effect.session.cancelling(call.cancel):
            try:
                for message in call:
                    effect.sink.take(message)
            finally:
                call.cancel()  # ends the stream if the sink raised


class SocketConnector(ForkGuarded):
    """Finds the socket of a server and stays connected to it. Any thread may call."""

    def __init__(self, control: grpc.Channel, endpoint: Endpoint, credentials: Credentials, *, enabled: bool) -> None:
        """`control`: a channel to the server, which must stay open until `close` has returned."""
        self._endpoint = endpoint
        self._credentials = credentials
        self._enabled = enabled
        self._grpc = GrpcStreams(control)
        self._locate = control.unary_unary(path_of(LOCATE), serialize, transfer_pb2.LocateResponse.FromString)
        self._lock = threading.Lock()
        self._streams: SocketStreams | None = None
        self._candidate: SocketStreams | None = None
        """The last connection that the search has tried."""
        self._session: ClientSession | None = None
        self._search: threading.Thread | None = None
        """The search that runs. `Thread.is_alive` is wrong after a KeyboardInterrupt within it."""
        self._call: Any = None
        self._closing = threading.Event()

    @property
    def found(self) -> bool:
        """Whether streams use the socket now."""
        return self._streams is not None

    def search(self, session: ClientSession) -> SocketStreams | None:
        """Returns the connection to the socket; otherwise starts a search for it.

        `session`: one that has mapped no region.
        """
        if not self._enabled:
            return None
        streams = self._streams_of(session)
        if streams is None:
            self._start_search(session)
        return streams

    def _streams_of(self, session: ClientSession) -> SocketStreams | None:
        streams = self._streams
        return streams if streams is not None and self._session is session else None

    def stream(self, session: ClientSession, move: Callable[[GrpcStreams | SocketStreams], T]) -> T:
        """Calls `move` with the streams of the socket, or with gRPC streams without a socket."""
        streams = self.search(session)
        if streams is None:
            return move(self._grpc)
        try:
            return move(streams)
        except NotConnected:  # the bulk process is gone
            self._disconnect(streams)
            raise

    def _disconnect(self, streams: SocketStreams) -> None:
        with self._lock:
            if self._streams is not streams:
                return
            self._streams = None
            if self._session is not None:
                self._session.transport = "grpc"
                self._session.downgraded(_NO_SOCKET, f"{streams.target.address}: the connection is lost")
        streams.close()

    def close(self) -> None:
        """Closes the connection and waits for the end of a search."""
        self._closing.set()
        with self._lock:
            call = self._call
            candidate = self._candidate
        if call is not None:
            call.cancel()
        if candidate is not None:
            candidate.close()  # ends an attempt to connect
        search = self._search
        if search is not None:
            search.join()
        with self._lock:
            streams, self._streams = self._streams, None
        if streams is not None:
            streams.close()

    def _start_search(self, session: ClientSession) -> None:
        """Starts a search, unless one runs. A KeyboardInterrupt may come at any moment."""
        thread = threading.Thread(target=self._run_search, args=(session,), name="kvtier-bulk", daemon=True)
        with self._lock:
            if self._closing.is_set() or self._search is not None or self._streams_of(session) is not None:
                return
            old, self._streams = self._streams, None
            try:
                self._search = thread
                thread.start()
            except BaseException as error:
                self._search = None  # the thread, if it has started, then does nothing
                if not isinstance(error, RuntimeError):  # out of threads
                    raise
        if old is not None:
            old.close()

    def _run_search(self, session: ClientSession) -> None:
        with self._lock:
            if self._search is not threading.current_thread():
                return
        try:
            self._find(session)
        finally:
            with self._lock:
                self._search = None

    def _find(self, session: ClientSession) -> None:
        """Retries until the bulk process is connected or the session has ended."""
        backoff = Backoff(0.1, 5.0)
        while not session.ended:
            answer, error = self._outcome(self._locate, transfer_pb2.LocateRequest(session=session.ref))
            if error is not None and error.code() is grpc.StatusCode.UNIMPLEMENTED:  # old server
                backoff.delay = backoff.most
            if answer is not None and self._connect(session, answer):
                return
            if answer is not None and backoff.delay >= backoff.most and self._address(answer) is None:
                session.downgraded(_NO_SOCKET, "the server serves none for this address (bulk.tcp, bulk process)")
            if self._closing.wait(backoff.delay):
                return
            backoff.grow()

    def _connect(self, session: ClientSession, answer: transfer_pb2.LocateResponse) -> bool:
        """Connects to the socket that `answer` names; returns whether the search has ended."""
        address = self._address(answer)
        if address is None:
            return False
        hostname = self._credentials.tls_name(self._endpoint)
        chosen = isinstance(address, str) and is_chosen(address, self._endpoint)
        target = SocketTarget(address, session.ref, self._credentials, hostname, chosen)
        streams = SocketStreams(target)
        with self._lock:
            self._candidate = streams
        if self._closing.is_set():
            return True
        try:
            streams.connect()
        except (OSError, ValueError, KVTierError) as error:  # a firewall, a deleted certificate
            if not (session.ended or self._closing.is_set()):
                session.downgraded(_NO_SOCKET, f"{address}: {error}")
            return False
        streams.offer_calls(session)
        with self._lock:
            if not self._closing.is_set():
                self._streams, self._session = streams, session
                session.transport = "tcp"
                session.recovered(_NO_SOCKET)
                _log.info("kvtier: streams use the socket %s", address)
                return True
        streams.close()
        return True

    def _address(self, answer: transfer_pb2.LocateResponse) -> str | tuple[str, int] | None:
        if self._endpoint.path is not None:
            return self._endpoint.path + answer.unix_suffix if answer.unix_suffix else None
        return (self._endpoint.host, answer.socket_port) if answer.socket_port else None

    def _outcome(self, method: Any, request: Any) -> tuple[Any, Any]:
        """Performs a call that `close` can cancel; returns (response, None) or (None, error)."""
        call = method.future(request, timeout=_LOCATE_SECONDS)
        with self._lock:
            self._call = call
        if self._closing.is_set():
            call.cancel()
        try:
            error = call.exception()
            return (None, error) if error is not None else (call.result(), None)
        except grpc.FutureCancelledError:
            return None, call  # has `code()`, like an error
