"""The way to the server's bulk process, for streams; beside the channel that calls take.

It is looked for in the background, when a client first needs to move bytes over gRPC and again after it was lost. Until it is
found, and wherever it cannot be reached (one port is open in a firewall), streams go where the calls go.
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
from ..session.session import Session
from .grpc_methods import CHANNEL_OPTIONS, LOCATE, PULL, PUSH, path_of, serialize
from .tcp_streams import TcpStreamClient

__all__ = ["AnyStreams", "BulkConnector", "Streams"]

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
"""As long as `CHANNEL_OPTIONS` give a handshake."""
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 5.0
_FULL_SECONDS = 1.0
"""How long a bulk process that has refused a stream too many is left alone."""


class Streams:
    """Push and Pull over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._push = channel.stream_unary(PUSH, None, transfer_pb2.PushResponse.FromString)
        self._pull = channel.unary_stream(PULL, transfer_pb2.PullRequest.SerializeToString, None)

    def push(self, effect: Push, calls: Callable[[Any], object] = lambda _: None) -> Any:
        """Sends frames; returns the response. `calls` is given the call, to be cancelled. Raises what gRPC does."""
        call = self._push.future(effect.frames(), timeout=effect.timeout)
        calls(call)
        with effect.link.cancelling(call.cancel):
            return call.result()

    def pull(self, effect: Pull, calls: Callable[[Any], object] = lambda _: None) -> None:
        """Gives `take` each frame that comes. Raises what gRPC does."""
        call = self._pull(effect.request, timeout=effect.timeout)
        calls(call)
        with effect.link.cancelling(call.cancel):
            try:
                for message in call:
                    effect.take(message)
            finally:
                call.cancel()  # where `take` has raised, the rest is not wanted

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


AnyStreams: TypeAlias = Streams | TcpStreamClient


class BulkConnector:
    """Finds the bulk process of a server, and keeps a channel to it. Any thread may call."""

    def __init__(self, control: grpc.Channel, endpoint: Endpoint, credentials: Credentials, *, plain: bool) -> None:
        """`control` is a channel to the server at `endpoint`; it must not be closed before this. `plain` prefers plain sockets."""
        self._endpoint = endpoint
        self._credentials = credentials
        # Plain sockets are in the clear: not beside TLS, whatever the other side offers.
        self._plain = plain and not credentials.is_tls(endpoint)
        self._locate = control.unary_unary(path_of(LOCATE), serialize, transfer_pb2.LocateResponse.FromString)
        self._lock = threading.Lock()
        self._streams: AnyStreams | None = None
        self._link: Session | None = None
        self._search: threading.Thread | None = None
        self._call: Any = None
        self._full_until = 0.0
        self._closing = threading.Event()

    @property
    def found(self) -> bool:
        """Whether streams go to the bulk process now."""
        return self._streams is not None

    def streams(self, link: Session) -> AnyStreams | None:
        """Returns the way to the bulk process; None, and begins to look for it, where it is not known."""
        if link.region is not None:
            return None
        streams = self._streams
        if streams is not None and self._link is link:
            return streams if time.monotonic() >= self._full_until else None
        self._look(link)
        return None

    @contextlib.contextmanager
    def watching(self, streams: AnyStreams) -> Iterator[None]:
        """Notices when a stream breaks because its other end is gone or full."""
        try:
            yield
        except NotConnected:
            self._lost(streams)
            raise
        except ValueError as error:
            if self._streams is streams:
                raise
            # gRPC's way to say that the channel was closed: by another thread, whose stream has broken.
            raise NotConnected("the bulk process is gone") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._lost(streams)
            elif error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(error.trailing_metadata()) is None:
                # It has as many streams as it serves at once; what it refuses for another reason, the server would as well.
                self._full_until = time.monotonic() + _FULL_SECONDS
            raise

    def _lost(self, streams: AnyStreams) -> None:
        """Takes note that a stream broke: the process may be gone, and the next one elsewhere."""
        with self._lock:
            if self._streams is not streams:
                return
            self._streams = None
            if self._link is not None:
                self._link.transport = "grpc"
        streams.close()

    def close(self) -> None:
        """Closes the channel, and waits for a search to end."""
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

    def _look(self, link: Session) -> None:
        with self._lock:
            if self._closing.is_set() or (self._search is not None and self._search.is_alive()):
                return
            old, self._streams = self._streams, None
            thread = threading.Thread(target=self._find, args=(link,), name="kvtier-bulk", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: streams go where they have gone until now
                thread.start()
                self._search = thread
        if old is not None:
            old.close()

    def _find(self, link: Session) -> None:
        """Looks until it is found, or there is nothing to be found."""
        delay = _FIRST_RETRY_SECONDS
        while not link.fallen:
            answer, error = self._outcome(self._locate, transfer_pb2.LocateRequest(session=link.ref))
            if error is not None and error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older server
                delay = _LAST_RETRY_SECONDS
            if answer is not None and (self._connect_plainly(link, answer) or self._connect(link, answer)):
                return
            if self._closing.wait(delay):
                return
            delay = min(2 * delay, _LAST_RETRY_SECONDS)

    def _endpoint_of(self, answer: transfer_pb2.LocateResponse) -> Endpoint | None:
        if self._endpoint.path is not None:
            return Endpoint(path=self._endpoint.path + answer.socket_suffix) if answer.socket_suffix else None
        return Endpoint(host=self._endpoint.host, port=answer.port) if answer.port else None

    def _connect_plainly(self, link: Session, answer: transfer_pb2.LocateResponse) -> bool:
        if not self._plain or self._endpoint.path is not None or not answer.plain_port:
            return False
        try:
            streams = TcpStreamClient(self._endpoint.host, answer.plain_port)
        except OSError as error:
            _log.info("kvtier: plain sockets do not reach the bulk process: %s", error)
            return False
        streams.take_calls(link)
        return self._found(link, streams, f"plain port {answer.plain_port}")

    def _found(self, link: Session, streams: AnyStreams, where: str) -> bool:
        with self._lock:
            if not self._closing.is_set():
                self._streams, self._link = streams, link
                link.transport = "tcp" if isinstance(streams, TcpStreamClient) else "grpc"
                _log.info("kvtier: streams go to the bulk process at %s", where)
                return True
        streams.close()
        return True

    def _connect(self, link: Session, answer: transfer_pb2.LocateResponse) -> bool:
        endpoint = self._endpoint_of(answer)
        if endpoint is None:
            return False
        try:
            channel = self._credentials.channel(endpoint, CHANNEL_OPTIONS)
        except CredentialsError as error:  # a file that was there when the client was made is not there now
            _log.warning("kvtier: streams do not go to the bulk process: %s", error)
            return False
        if not self._is_reached(channel):
            channel.close()
            return False
        return self._found(link, Streams(channel), str(endpoint))

    def _is_reached(self, channel: grpc.Channel) -> bool:
        """Waits for a connection. The bulk process serves streams only: that it says so is an answer."""
        error = self._outcome(channel.unary_unary(path_of(LOCATE)), b"", wait_for_ready=True)[1]
        return error is None or error.code() is grpc.StatusCode.UNIMPLEMENTED

    def _outcome(self, method: Any, request: Any, **options: Any) -> tuple[Any, Any]:
        """Makes a call that ends when this is closed; returns its answer, or its error."""
        call = method.future(request, timeout=_CONNECT_SECONDS, **options)
        with self._lock:
            self._call = call
        if self._closing.is_set():
            call.cancel()
        try:
            error = call.exception()
            return (None, error) if error is not None else (call.result(), None)
        except grpc.FutureCancelledError:
            return None, call  # it knows its status as well as an error does
