"""Push and Pull over raw TCP sockets to the bulk process, without a copy in between."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...cuda.host.socket_io import Deadline, receive, send
from ...protos.v1 import transfer_pb2
from ...protos.wire import tcp_frames
from ..effects import Pull, Push
from ..errors import DeadlineExceeded, NotConnected, SessionLost, error_for
from ..session.session import ClientSession
from ..session.socket_calls import SocketCalls, enable_keepalive

__all__ = ["TcpStreamClient"]

_CONNECT_SECONDS = 2.0
_MAX_IDLE = 8
"""Maximum number of idle connections."""
_END = tcp_frames.pack_frame_head(0, 0, 0)


class TcpStreamClient:
    """Push and Pull over a pool of connections. Any thread may call."""

    def __init__(self, host: str, port: int) -> None:
        """Opens the first connection. Raises `OSError` if that fails."""
        self._address = (host, port)
        self._lock = threading.Lock()
        first = self._connect()
        self._peer = first.family, first.getpeername()
        self._idle: list[socket.socket] = [first]
        self._closed = False

    def push(self, effect: Push, on_start: Callable[[Any], object] = lambda _: None) -> transfer_pb2.PushResponse:
        """Sends frames; returns the response. `on_start` gets the call and may cancel it later."""
        source = effect.source
        with self._connection(effect, on_start) as connection:
            request = source.request(complete=effect.complete)
            connection.send([tcp_frames.pack_request(tcp_frames.Method.PUSH, request.SerializeToString())])
            try:
                for offset, checksum, views in source.pieces(effect.start, effect.step):
                    nbytes = sum(view.nbytes for view in views)
                    connection.send([tcp_frames.pack_frame_head(offset, nbytes, checksum), *views])
                connection.send([_END])
            except ConnectionError:
                connection.answer()  # raises if the server refused the stream
                raise
            return transfer_pb2.PushResponse.FromString(connection.answer())

    def pull(self, effect: Pull, on_start: Callable[[Any], object] = lambda _: None) -> None:
        """Receives frames into `effect.sink`. For `on_start` see `push`."""
        sink = effect.sink
        with self._connection(effect, on_start) as connection:
            connection.send([tcp_frames.pack_request(tcp_frames.Method.PULL, effect.request.SerializeToString())])
            while True:
                head = tcp_frames.unpack_frame_head(connection.received(tcp_frames.FRAME_HEAD_BYTES))
                if not head.nbytes:
                    break
                views = sink.views(head.offset, head.nbytes)
                connection.receive(views)
                sink.verify(head, views)
            answer = transfer_pb2.PullResponse.FromString(connection.answer())
            sink.completed = sink.completed or answer.completed

    def offer_calls(self, session: ClientSession) -> None:
        """Sends the session's unary calls to the same port, if the server accepts them there."""
        family, address = self._peer
        if session.calls is not None:  # applies to new connections; existing ones stay open
            session.calls.address, session.calls.family = address, family
            return
        calls = SocketCalls(address, session.ref, family)
        if calls.prepare():
            session.use_calls(calls)

    def close(self) -> None:
        """Closes the idle connections. A connection in use is closed after its stream."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _connection(self, effect: Push | Pull, on_start: Callable[[Any], object]) -> Iterator[_TimedConnection]:
        """Lends a connection that is shut down on session end, cancellation or time-out."""
        deadline = time.monotonic() + effect.timeout
        call = None
        try:
            connection = self._take()
            call = _StreamCall(connection)
            on_start(call)
            try:
                with effect.session.cancelling(call.cancel):
                    yield _TimedConnection(connection, deadline - time.monotonic())
            except BaseException:
                connection.close()
                raise
            self._put(connection)
        except (OSError, ValueError) as error:
            if effect.session.ended or (call is not None and call.cancelled and time.monotonic() < deadline):
                raise SessionLost("the session has ended") from None
            if time.monotonic() >= deadline or isinstance(error, BlockingIOError):
                raise DeadlineExceeded("the stream did not end in time") from None
            raise NotConnected(f"the connection of a stream failed: {error}") from None

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, _CONNECT_SECONDS)
        connection.settimeout(None)
        enable_keepalive(connection)
        return connection

    def _take(self) -> socket.socket:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            # An idle connection is readable only if the server has closed it.
            if not _is_readable(connection):
                return connection
            connection.close()

    def _put(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _TimedConnection:
    """Connection with a deadline. Methods raise `OSError`; `BlockingIOError` after the deadline."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = Deadline(connection, seconds)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        send(self._connection, pieces, self._deadline)

    def receive(self, views: Sequence[memoryview]) -> None:
        receive(self._connection, views, self._deadline)

    def received(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        if nbytes:
            self.receive([memoryview(data)])
        return data

    def answer(self) -> bytes:
        """Returns the message of a response. Raises `KVTierError` for a refusal."""
        granted, nbytes = tcp_frames.unpack_answer(self.received(tcp_frames.ANSWER_BYTES))
        message = bytes(self.received(nbytes))
        if not granted:
            raise error_for(*tcp_frames.unpack_refusal(message))
        return message


def _is_readable(connection: socket.socket) -> bool:
    """Uses `poll`, because `select` fails for descriptors above 1023, which engines reach."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class _StreamCall:
    """Handle that cancels a stream."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
