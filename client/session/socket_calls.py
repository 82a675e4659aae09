"""Unary calls over a socket instead of gRPC, for the synchronous client.

The socket is the Unix socket of a local server, or the TCP port of a remote server's bulk process.
For the format of the messages see `protos/wire/call_frames.py`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from ...protos.error_reasons import reason_within
from ...protos.v1 import common_pb2
from ...protos.wire.attach import REPLY_BYTES, Purpose, pack_request, unpack_reply
from ...protos.wire.call_frames import LENGTH_BYTES, STATUS_OF_CODE, pack_call, unpack_answer, unpack_length
from ..errors import DeadlineExceeded, ServerError, SessionLost, error_from

__all__ = ["MAX_IDLE", "AnswerReader", "SocketCalls", "SocketPool", "enable_keepalive", "message_of"]

_CONNECT_SECONDS = 2.0
_CHUNK_BYTES = 64 << 10
_LATE_SECONDS = 0.01
"""If sending took less time, the time-out is not reduced, so a call can be late by this time."""
MAX_IDLE = 8
"""Maximum number of idle connections; each uses a file descriptor of the server."""


class SocketPool:
    """Connections of one session. Each carries one call at a time. Any thread may use the pool."""

    def __init__(self) -> None:
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        """Connections with a call in progress, and connections being established."""
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Closes the connections; calls in progress end with `SessionLost`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    def _take(self) -> socket.socket | None:
        with self._lock:
            if not self._idle:
                return None
            connection = self._idle.pop()
            self._busy.add(connection)
            return connection

    def _add(self, connection: socket.socket) -> None:
        """Adds a busy connection. Raises `SessionLost` if the pool is closed."""
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        if closed:
            raise SessionLost("the session has ended")

    def _put(self, connection: socket.socket, *, intact: bool) -> None:
        """Returns a connection to the pool. `intact`: its last response was read completely."""
        with self._lock:
            self._busy.discard(connection)
            if intact and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class SocketCalls(SocketPool):
    """Blocking calls of one session. Any thread may call."""

    def __init__(
        self, address: str | tuple[Any, ...], session: common_pb2.SessionRef, family: int = socket.AF_UNIX
    ) -> None:
        """Does not connect; see `prepare`."""
        super().__init__()
        self.address = address
        self.family = family
        self.hello = pack_request(session.session_id, session.epoch, Purpose.CALLS)
        self._close_callbacks: list[Callable[[], object]] = []

    def on_close(self, callback: Callable[[], object]) -> None:
        """Registers a callback that `close` runs. If already closed, runs the callback at once."""
        with self._lock:
            closed = self._closed
            self._close_callbacks.append(callback)
        if closed:
            callback()

    def make_socket(self) -> socket.socket:
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        if self.family != socket.AF_UNIX:
            enable_keepalive(connection)
        return connection

    def prepare(self) -> bool:
        """Opens a connection for the first call; returns whether the server accepted it."""
        try:
            connection = self._connect(_CONNECT_SECONDS)
        except TimeoutError:
            return False
        if connection is not None:
            self._put(connection, intact=True)
        return connection is not None

    def call(self, name: str, message: bytes, timeout: float) -> bytes | None:
        """Calls a method and returns its response.

        Returns None if no connection is possible. The caller then uses gRPC.

        Raises:
            KVTierError: the call was refused or failed, or the response did not arrive in time.
        """
        began = time.monotonic()
        deadline = began + timeout
        try:
            connection = self._take() or self._connect(timeout)
            if connection is None:
                if self._closed:  # None would make the caller use gRPC
                    raise SessionLost("the session has ended")
                return None
            intact = False
            try:
                connection.settimeout(timeout)
                connection.sendall(pack_call(name.encode(), message))
                if time.monotonic() - began > _LATE_SECONDS:
                    _set_deadline(connection, deadline)
                answer = AnswerReader()
                while not answer.feed(connection.recv(_CHUNK_BYTES)):
                    _set_deadline(connection, deadline)
                intact = True
            finally:
                self._put(connection, intact=intact)
        except TimeoutError:
            raise DeadlineExceeded(f"{name}: no answer within {timeout:g} s") from None
        except OSError as error:  # the server closes the connection when the session ends
            raise SessionLost(f"{name}: {error}") from None
        return message_of(answer.body)

    def close(self) -> None:
        super().close()
        with self._lock:
            callbacks, self._close_callbacks = self._close_callbacks, []
        for callback in callbacks:
            callback()

    def _connect(self, timeout: float) -> socket.socket | None:
        """Returns a new connection, marked as busy; None if the server does not accept it.

        Raises:
            TimeoutError: the server does not respond.
            SessionLost: the pool is closed.
        """
        connection = None
        granted = False
        try:
            connection = self.make_socket()
            connection.settimeout(timeout)
            self._add(connection)
            connection.connect(self.address)
            self._add(connection)  # `close` cannot shut down an unconnected socket
            connection.sendall(self.hello)
            granted = unpack_reply(connection.recv(REPLY_BYTES, socket.MSG_WAITALL)) is not None
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None
        finally:
            if connection is not None and not granted:
                self._put(connection, intact=False)
        return connection if granted else None


class AnswerReader:
    """Assembles one response from the pieces that a socket delivers."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._end = LENGTH_BYTES

    def feed(self, piece: bytes) -> bool:
        """Adds a piece; returns whether the response is complete."""
        if not piece:
            raise ConnectionError("the server closed the connection")
        self._received += piece
        if self._end == LENGTH_BYTES <= len(self._received):
            self._end += unpack_length(self._received)
        return len(self._received) >= self._end

    @property
    def body(self) -> bytes:
        """The response without its length."""
        return bytes(self._received[LENGTH_BYTES:])


def enable_keepalive(connection: socket.socket) -> None:
    """Disables Nagle's algorithm. Enables keepalive probes, which detect a dead host within 15 s.

    The intervals equal those of the gRPC channel, so firewalls treat both connections alike.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


def message_of(body: bytes) -> bytes:
    """Returns the message of a response, or raises the `KVTierError` that the response carries."""
    try:
        code, message = unpack_answer(body)
        if not code:
            return message
        status = status_pb2.Status.FromString(message)
    except (ValueError, DecodeError) as error:
        raise ServerError(f"not an answer of kvtier: {error}") from None
    raise error_from(STATUS_OF_CODE[code], status.message, reason_within(status))


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
