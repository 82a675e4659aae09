"""Streams over plain TCP sockets to the bulk process: from the buffers into the socket, and out of it into the buffers."""

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
from ..session.session import Session
from ..session.socket_calls import SocketCalls, keep_alive

__all__ = ["TcpStreamClient"]

_CONNECT_SECONDS = 2.0
_KEEP = 8
"""Idle connections that are kept."""
_END = tcp_frames.pack_frame_head(0, 0, 0)


class TcpStreamClient:
    """Push and Pull over connections of its own. Any thread may call."""

    def __init__(self, host: str, port: int) -> None:
        """Connects. Raises OSError."""
        self._address = (host, port)
        self._lock = threading.Lock()
        first = self._connect()
        self._peer = first.family, first.getpeername()
        self._idle: list[socket.socket] = [first]
        self._closed = False

    def push(self, effect: Push, calls: Callable[[Any], object] = lambda _: None) -> transfer_pb2.PushResponse:
        """Sends parts of a store. `calls` is given what `cancel`s it. Raises KVTierError."""
        source = effect.source
        with self._connection(effect, calls) as connection:
            request = source.request(complete=effect.complete)
            connection.send([tcp_frames.pack_request(tcp_frames.Method.PUSH, request.SerializeToString())])
            try:
                for offset, checksum, views in source.pieces(effect.start, effect.step):
                    nbytes = sum(view.nbytes for view in views)
                    connection.send([tcp_frames.pack_frame_head(offset, nbytes, checksum), *views])
                connection.send([_END])
            except ConnectionError:
                connection.answer()  # a refusal, perhaps
                raise
            return transfer_pb2.PushResponse.FromString(connection.answer())

    def pull(self, effect: Pull, calls: Callable[[Any], object] = lambda _: None) -> None:
        """Fills parts of a load. Otherwise like `push`."""
        sink = effect.sink
        with self._connection(effect, calls) as connection:
            connection.send([tcp_frames.pack_request(tcp_frames.Method.PULL, effect.request.SerializeToString())])
            while True:
                head = tcp_frames.unpack_frame_head(connection.received(tcp_frames.FRAME_HEAD_BYTES))
                if not head.nbytes:
                    break
                views = sink.views(head.offset, head.nbytes)
                connection.receive(views)
                sink.took(head, views)
            answer = transfer_pb2.PullResponse.FromString(connection.answer())
            sink.completed = sink.completed or answer.completed

    def take_calls(self, link: Session) -> None:
        """Has the calls of a link go to the same port as well, if the server takes them there."""
        family, address = self._peer
        if link.calls is not None:  # connections that stand go on, wherever they were made
            link.calls.address, link.calls.family = address, family
            return
        calls = SocketCalls(address, link.ref, family)
        if calls.prepare():
            link.call_over(calls)

    def close(self) -> None:
        """Closes the idle connections; those in use are closed when they are not any more."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _connection(self, effect: Push | Pull, calls: Callable[[Any], object]) -> Iterator[_Timed]:
        """Lends a connection, which ends with the link, or when it is cancelled, or after the time that is there."""
        deadline = time.monotonic() + effect.timeout
        call = None
        try:
            connection = self._take()
            call = _Call(connection)
            calls(call)
            try:
                with effect.link.cancelling(call.cancel):
                    yield _Timed(connection, deadline - time.monotonic())
            except BaseException:
                connection.close()
                raise
            self._give_back(connection)
        except (OSError, ValueError) as error:
            if effect.link.fallen or (call is not None and call.cancelled and time.monotonic() < deadline):
                raise SessionLost("the session has ended") from None
            if time.monotonic() >= deadline or isinstance(error, BlockingIOError):
                raise DeadlineExceeded("the stream did not end in time") from None
            raise NotConnected(f"the stream broke: {error}") from None

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, _CONNECT_SECONDS)
        connection.settimeout(None)
        keep_alive(connection)
        return connection

    def _take(self) -> socket.socket:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            # One that can be read is one that the server has closed.
            if not _can_be_read(connection):
                return connection
            connection.close()

    def _give_back(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _KEEP:
                self._idle.append(connection)
                return
        connection.close()


class _Timed:
    """A connection, as long as there is time. Raises OSError, `BlockingIOError` when it is up."""

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
        """Returns the message of an answer. Raises KVTierError for a refusal."""
        granted, nbytes = tcp_frames.unpack_answer(self.received(tcp_frames.ANSWER_BYTES))
        message = bytes(self.received(nbytes))
        if not granted:
            raise error_for(*tcp_frames.unpack_refusal(message))
        return message


def _can_be_read(connection: socket.socket) -> bool:
    """Returns whether there is something to read, or the end. Not by `select`: engines have more descriptors than it takes."""
    look = select.poll()
    look.register(connection, select.POLLIN)
    return bool(look.poll(0))


class _Call:
    """What cancels a stream."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.cancelled = False

    def cancel(self) -> None:
        """Ends whatever waits for the connection."""
        self.cancelled = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
