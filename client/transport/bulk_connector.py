"""Connector to the server's bulk process, which serves streams.

A background thread finds the bulk process and connects to it before the first stream. It does so
again if the connection is lost. While there is no connection (for example because of a firewall),
streams use the gRPC channel of the unary calls.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

from ...protos.credentials import Credentials, CredentialsError
from ...protos.endpoint import Endpoint
from ...protos.error_reasons import reason_of
from ...protos.v1 import transfer_pb2
from ..effects import Pull, Push
from ..errors import NotConnected
from ..session.session import ClientSession
from .grpc_methods import CHANNEL_OPTIONS, LOCATE, PULL, PUSH, path_of, serialize
from .tcp_streams import TcpStreamClient

__all__ = ["BulkConnector", "BulkStreams", "GrpcStreams"]

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
"""Equal to the handshake time-out in `CHANNEL_OPTIONS`."""
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 5.0
_FULL_SECONDS = 1.0
"""Pause after the bulk process refused a stream because it has too many."""


class GrpcStreams:
    """Push and Pull streams over one gRPC channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._push = channel.stream_unary(PUSH, None, transfer_pb2.PushResponse.FromString)
        self._pull = channel.unary_stream(PULL, transfer_pb2.PullRequest.SerializeToString, None)

    def push(self, effect: Push, on_start: Callable[[Any], object] = lambda _: None) -> Any:
        """Sends frames; returns the response. `on_start` gets the call and may cancel it later."""
        call = self._push.future(effect.frames(), timeout=effect.timeout)
        on_start(call)
        with effect.session.cancelling(call.cancel):
            return call.result()

    def pull(self, effect: Pull, on_start: Callable[[Any], object] = lambda _: None) -> None:
        """Passes each received frame to `effect.take`. For `on_start` see `push`."""
        call = self._pull(effect.request, timeout=effect.timeout)
        on_start(call)
        with effect.session.cancelling(call.cancel):
            try:
                for message in call:
                    effect.take(message)
            finally:
                call.cancel()  # ends the stream if `take` raised

    def close(self) -> None:
        self._channel.close()


BulkStreams: TypeAlias = GrpcStreams | TcpStreamClient


class BulkConnector:
    """Finds the bulk process of a server and stays connected to it. Any thread may call."""

    def __init__(self, control: grpc.Channel, endpoint: Endpoint, credentials: Credentials, *, tcp: bool) -> None:
        """`control`: a channel to the server, which must stay open until `close` has returned.

        `tcp`: whether to prefer raw sockets.
        """
        self._endpoint = endpoint
        self._credentials = credentials
        # Raw sockets are not encrypted, so a client that uses TLS does not use them.
        self._tcp = tcp and not credentials.is_tls(endpoint)
        self._locate = control.unary_unary(path_of(LOCATE), serialize, transfer_pb2.LocateResponse.FromString)
        self._lock = threading.Lock()
        self._streams: BulkStreams | None = None
        self._session: ClientSession | None = None
        self._search: threading.Thread | None = None
        self._call: Any = None
        self._full_until = 0.0
        self._closing = threading.Event()

    @property
    def found(self) -> bool:
        """Whether streams use the bulk process now."""
        return self._streams is not None

    def streams(self, session: ClientSession) -> BulkStreams | None:
        """Returns the connection to the bulk process, or starts a search and returns None."""
        if session.region is not None:
            return None
        streams = self._streams
        if streams is not None and self._session is session:
            return streams if time.monotonic() >= self._full_until else None
        self._start_search(session)
        return None

    @contextlib.contextmanager
    def monitored(self, streams: BulkStreams) -> Iterator[None]:
        """Detects that a stream broke because the bulk process is gone or full."""
        try:
            yield
        except NotConnected:
            self._disconnect(streams)
            raise
        except ValueError as error:
            if self._streams is streams:
                raise
            # gRPC raises ValueError for a closed channel. Another thread closed this channel after
            # its stream broke.
            raise NotConnected("the connection to the bulk process was lost") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._disconnect(streams)
            elif error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(error.trailing_metadata()) is None:
                # The bulk process has reached its limit of concurrent streams. If the error has a
                # reason, it comes from a limit of the server, which would refuse the stream too.
                self._full_until = time.monotonic() + _FULL_SECONDS
            raise

    def _disconnect(self, streams: BulkStreams) -> None:
        with self._lock:
            if self._streams is not streams:
                return
            self._streams = None
            if self._session is not None:
                self._session.transport = "grpc"
        streams.close()

    def close(self) -> None:
        """Closes the connection and waits for the end of a search."""
        self._closing.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.cancel()
        search = self._search
        if search is not None:
            search.join()
        with self._lock:
            streams, self._streams = self._streams, None
        if streams is not None:
            streams.close()

    def _start_search(self, session: ClientSession) -> None:
        with self._lock:
            if self._closing.is_set() or (self._search is not None and self._search.is_alive()):
                return
            old, self._streams = self._streams, None
            thread = threading.Thread(target=self._run_search, args=(session,), name="kvtier-bulk", daemon=True)
            with contextlib.suppress(RuntimeError):  # out of threads
                thread.start()
                self._search = thread
        if old is not None:
            old.close()

    def _run_search(self, session: ClientSession) -> None:
        """Retries until the bulk process is connected or the session has ended."""
        delay = _FIRST_RETRY_SECONDS
        while not session.ended:
            answer, error = self._outcome(self._locate, transfer_pb2.LocateRequest(session=session.ref))
            if error is not None and error.code() is grpc.StatusCode.UNIMPLEMENTED:  # old server
                delay = _LAST_RETRY_SECONDS
            if answer is not None and (self._connect_tcp(session, answer) or self._connect_grpc(session, answer)):
                return
            if self._closing.wait(delay):
                return
            delay = min(2 * delay, _LAST_RETRY_SECONDS)

    def _endpoint_of(self, answer: transfer_pb2.LocateResponse) -> Endpoint | None:
        if self._endpoint.path is not None:
            return Endpoint(path=self._endpoint.path + answer.socket_suffix) if answer.socket_suffix else None
        return Endpoint(host=self._endpoint.host, port=answer.port) if answer.port else None

    def _connect_tcp(self, session: ClientSession, answer: transfer_pb2.LocateResponse) -> bool:
        if not self._tcp or self._endpoint.path is not None or not answer.plain_port:
            return False
        try:
            streams = TcpStreamClient(self._endpoint.host, answer.plain_port)
        except OSError as error:
            _log.info("kvtier: TCP streams do not reach the bulk process: %s", error)
            return False
        streams.offer_calls(session)
        return self._use(session, streams, f"TCP port {answer.plain_port}")

    def _connect_grpc(self, session: ClientSession, answer: transfer_pb2.LocateResponse) -> bool:
        endpoint = self._endpoint_of(answer)
        if endpoint is None:
            return False
        try:
            channel = self._credentials.channel(endpoint, CHANNEL_OPTIONS)
        except CredentialsError as error:  # for example, a certificate file was deleted
            _log.warning("kvtier: streams do not use the bulk process: %s", error)
            return False
        if not self._is_reachable(channel):
            channel.close()
            return False
        return self._use(session, GrpcStreams(channel), str(endpoint))

    def _use(self, session: ClientSession, streams: BulkStreams, where: str) -> bool:
        with self._lock:
            if not self._closing.is_set():
                self._streams, self._session = streams, session
                session.transport = "tcp" if isinstance(streams, TcpStreamClient) else "grpc"
                _log.info("kvtier: streams use the bulk process at %s", where)
                return True
        streams.close()
        return True

    def _is_reachable(self, channel: grpc.Channel) -> bool:
        """Waits for a connection. The bulk process answers each unary call with UNIMPLEMENTED."""
        error = self._outcome(channel.unary_unary(path_of(LOCATE)), b"", wait_for_ready=True)[1]
        return error is None or error.code() is grpc.StatusCode.UNIMPLEMENTED

    def _outcome(self, method: Any, request: Any, **options: Any) -> tuple[Any, Any]:
        """Performs a call that `close` can cancel; returns (response, None) or (None, error)."""
        call = method.future(request, timeout=_CONNECT_SECONDS, **options)
        with self._lock:
            self._call = call
        if self._closing.is_set():
            call.cancel()
        try:
            error = call.exception()
            return (None, error) if error is not None else (call.result(), None)
        except grpc.FutureCancelledError:
            return None, call  # has `code()`, like an error
