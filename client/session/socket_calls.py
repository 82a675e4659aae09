"""Calls over a socket instead of gRPC, for the synchronous client (`protos/wire/call_frames.py`).

To a server on this host that is its Unix socket, to one elsewhere the port for plain sockets of its bulk process.

A connection carries one call at a time, from whichever thread; so there are as many as there were threads calling at once.
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

__all__ = ["MAX_IDLE", "SocketCalls", "answer_of", "keep_alive"]

_CONNECT_SECONDS = 2.0
_CHUNK_BYTES = 64 << 10
_LATE_SECONDS = 0.01
"""What a call may be late by: a deadline is told to the kernel anew only where more has passed of it."""
MAX_IDLE = 8
"""Connections that are kept for later calls; each is a descriptor of the server's."""


class SocketCalls:
    """Connections for the calls of one session. Any thread may call."""

    def __init__(
        self, address: str | tuple[Any, ...], session: common_pb2.SessionRef, family: int = socket.AF_UNIX
    ) -> None:
        """Connects nothing: see `prepare`. `address` is one of `family`, as sockets have it."""
        self.address = address
        self.family = family
        self.hello = pack_request(session.session_id, session.epoch, Purpose.CALLS)
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        """Those of calls that run, from before they are connected."""
        self._when_closed: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._closed = False

    def when_closed(self, tell: Callable[[], object]) -> None:
        """Has `tell` called when these are closed, on whichever thread that happens; at once if they are."""
        with self._lock:
            closed = self._closed
            self._when_closed.append(tell)
        if closed:
            tell()

    def make_socket(self) -> socket.socket:
        """Returns a socket that is to be connected."""
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        if self.family != socket.AF_UNIX:
            keep_alive(connection)
        return connection

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
        began = time.monotonic()
        deadline = began + timeout
        try:
            connection = self._idle_one() or self._connect(timeout)
            if connection is None:
                if self._closed:  # it would go on over gRPC
                    raise SessionLost("the session has ended")
                return None
            intact = False
            try:
                connection.settimeout(timeout)
                connection.sendall(pack_call(name.encode(), message))
                if time.monotonic() - began > _LATE_SECONDS:
                    _set_deadline(connection, deadline)
                body = _receive(connection, deadline)
                intact = True
            finally:  # where a call has failed, its answer may still come
                self._put(connection, intact=intact)
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
            tells, self._when_closed = self._when_closed, []
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()
        for tell in tells:
            tell()

    def _idle_one(self) -> socket.socket | None:
        with self._lock:
            if not self._idle:
                return None
            connection = self._idle.pop()
            self._busy.add(connection)
            return connection

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
        """Returns a connection, a busy one; None where none can be had.

        Raises:
            TimeoutError: the server does not answer.
            SessionLost: they are closed.
        """
        connection = None
        granted = False
        try:
            connection = self.make_socket()
            connection.settimeout(timeout)
            self._take(connection)
            connection.connect(self.address)
            self._take(connection)  # a close before it was connected had nothing to shut down
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


def keep_alive(connection: socket.socket) -> None:
    """Sets up a TCP socket: nothing waits for more to send, and a host that is gone is noticed within 15 s, as over gRPC.

    What is idle is heard of as often as gRPC's channel is: no firewall forgets the one while it knows the other.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


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
        if received:
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
