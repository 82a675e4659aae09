"""Calls over a socket instead of gRPC, for the asyncio client. See `local_calls`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

from ...protos.wire.attach import REPLY_BYTES, unpack_reply
from ...protos.wire.call_frames import LENGTH_BYTES, pack_call, unpack_length
from ..errors import DeadlineExceeded, SessionLost
from ..session.socket_calls import MAX_IDLE, SocketCalls, answer_of

__all__ = ["AsyncSocketCalls"]

_CHUNK_BYTES = 64 << 10


class AsyncSocketCalls:
    """Connections of one event loop for the calls of one session."""

    def __init__(self, calls: SocketCalls) -> None:
        self.calls = calls
        """Says where to connect, and as whom."""
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        """Those of calls that run, from before they are connected."""
        self._closed = False
        loop = asyncio.get_running_loop()
        calls.when_closed(lambda: _call_soon(loop, self.close))

    async def call(self, name: str, message: bytes, timeout: float) -> bytes | None:
        """See `SocketCalls.call`."""
        try:
            async with asyncio.timeout(timeout), self._lend() as connection:
                if connection is None:
                    if self._closed:  # it would go on over gRPC
                        raise SessionLost("the session has ended")
                    return None
                await asyncio.get_running_loop().sock_sendall(connection, pack_call(name.encode(), message))
                body = await _receive(connection)
        except TimeoutError:
            raise DeadlineExceeded(f"{name}: no answer within {timeout:g} s") from None
        except OSError as error:  # the connection lives as long as the session
            raise SessionLost(f"{name}: {error}") from None
        return answer_of(body)

    def close(self) -> None:
        """See `SocketCalls.close`. On the loop."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        for connection in self._busy:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.asynccontextmanager
    async def _lend(self) -> AsyncIterator[socket.socket | None]:
        connection = self._idle.pop() if self._idle else await self._connect()
        if connection is None:
            yield None
            return
        self._busy.add(connection)
        intact = False
        try:
            yield connection
            intact = True
        finally:
            self._busy.discard(connection)
            if intact and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> socket.socket | None:
        """Returns a connection; None where none can be had."""
        connection = None
        granted = False
        try:
            connection = self.calls.make_socket()
            connection.setblocking(False)
            self._busy.add(connection)
            granted = await self._asks_for(connection) and not self._closed
        except (OSError, ValueError):
            return None
        finally:
            if connection is not None and not granted:
                self._busy.discard(connection)
                connection.close()
        return connection if granted else None

    async def _asks_for(self, connection: socket.socket) -> bool:
        """Connects; returns whether the server grants the connection."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, self.calls.address)
        await loop.sock_sendall(connection, self.calls.hello)
        reply = b""
        while len(reply) < REPLY_BYTES and (piece := await loop.sock_recv(connection, REPLY_BYTES - len(reply))):
            reply += piece
        return unpack_reply(reply) is not None


def _call_soon(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and its connections with it
        loop.call_soon_threadsafe(what)


async def _receive(connection: socket.socket) -> bytes:
    """Returns what follows the length of an answer. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    end = LENGTH_BYTES
    while len(received) < end:
        piece = await loop.sock_recv(connection, _CHUNK_BYTES)
        if not piece:
            raise ConnectionError("the server hung up")
        received += piece
        if end == LENGTH_BYTES <= len(received):
            end += unpack_length(received)
    return bytes(received[LENGTH_BYTES:])
