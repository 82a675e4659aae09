"""Calls to a server on this host over its Unix socket, for the synchronous client (`protos/local_calls.py`).

A connection carries one call at a time, from whichever thread; so there are as many as there were threads calling at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from ..protos.attach import REPLY_BYTES, Purpose, pack_request, unpack_reply
from ..protos.local_calls import LENGTH_BYTES, STATUS_OF_CODE, pack_call, unpack_answer, unpack_length
from ..protos.reasons import reason_within
from ..protos.v1 import common_pb2
from .errors import DeadlineExceeded, ServerError, SessionLost, error_from

__all__ = ["MAX_IDLE", "LocalCalls", "answer_of"]

_CONNECT_SECONDS = 2.0
_CHUNK_BYTES = 64 << 10
MAX_IDLE = 8
"""Connections that are kept for later calls; each is a descriptor of the server's."""


class LocalCalls:
    """Connections for the calls of one session. Any thread may call."""

    def __init__(self, path: str, session: common_pb2.SessionRef) -> None:
        """Connects nothing: see `prepare`."""
        self.path = path
        self.hello = pack_request(session.session_id, session.epoch, Purpose.CALLS)
        self.when_closed: list[Callable[[], object]] = []
        """Called when these are closed, on whichever thread that happens."""
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def prepare(self) -> bool:
        """Makes a connection for the first call; returns whether the server grants one."""
        try:
            connection = self._connect(_CONNECT_SECONDS)
        except TimeoutError:
            return False
        if connection is not None:
            self._put(connection, intact=True)
        return connection is not None

    def call(self, name: str, message: bytes, timeout: float) -> bytes | None:
        """Returns what a method answers; None where there is no connection to be had, and nothing was called.

        Raises:
            KVTierError: the call was refused or has failed, or there was no answer in time.
        """
        deadline = time.monotonic() + timeout
        try:
            with self._lend(timeout) as connection:
                if connection is None:
                    return None
                _set_deadline(connection, deadline)
                connection.sendall(pack_call(name.encode(), message))
                body = _receive(connection, deadline)
        except TimeoutError:
            raise DeadlineExceeded(f"{name}: no answer within {timeout:g} s") from None
        except OSError as error:  # the connection lives as long as the session
            raise SessionLost(f"{name}: {error}") from None
        return answer_of(body)

    def close(self) -> None:
        """Hangs up; calls that are running end with `SessionLost`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()
        for tell in self.when_closed:
            tell()

    @contextlib.contextmanager
    def _lend(self, timeout: float) -> Iterator[socket.socket | None]:
        """Lends a connection. One on which a call has failed is closed: its answer may still come."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect(timeout)
        if connection is None:
            yield None
            return
        intact = False
        try:
            self._take(connection)
            yield connection
            intact = True
        finally:
            self._put(connection, intact=intact)

    def _take(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        if closed:
            raise SessionLost("the session has ended")

    def _put(self, connection: socket.socket, *, intact: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if intact and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, timeout: float) -> socket.socket | None:
        """Returns a connection; None where none can be had. Raises `TimeoutError` if the server does not answer."""
        connection = None
        granted = False
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout)
            connection.connect(self.path)
            connection.sendall(self.hello)
            granted = unpack_reply(connection.recv(REPLY_BYTES, socket.MSG_WAITALL)) is not None
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None
        finally:
            if connection is not None and not granted:
                connection.close()
        return connection if granted else None


def answer_of(body: bytes) -> bytes:
    """Returns the message of an answer. Raises the `KVTierError` that it carries instead."""
    try:
        code, message = unpack_answer(body)
        if not code:
            return message
        status = status_pb2.Status.FromString(message)
    except (ValueError, DecodeError) as error:
        raise ServerError(f"not an answer of kvtier: {error}") from None
    raise error_from(STATUS_OF_CODE[code], status.message, reason_within(status))


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """Returns what follows the length of an answer. Raises `OSError`, of which `TimeoutError` is one."""
    received = bytearray()
    end = LENGTH_BYTES
    while len(received) < end:
        _set_deadline(connection, deadline)
        piece = connection.recv(_CHUNK_BYTES)
        if not piece:
            raise ConnectionError("the server hung up")
        received += piece
        if end == LENGTH_BYTES <= len(received):
            end += unpack_length(received)
    return bytes(received[LENGTH_BYTES:])


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
