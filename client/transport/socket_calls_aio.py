"""Unary calls over a socket instead of gRPC, for the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from ...protos.wire.attach import REPLY_BYTES, unpack_reply
from ...protos.wire.call_frames import pack_call
from ..errors import DeadlineExceeded, SessionLost
from ..session.socket_calls import AnswerReader, SocketCalls, SocketPool, message_of

__all__ = ["AsyncSocketCalls"]

_CHUNK_BYTES = 64 << 10


class AsyncSocketCalls(SocketPool):
    """Calls of one session on one event loop, over separate connections."""

    def __init__(self, calls: SocketCalls) -> None:
        super().__init__()
        self.calls = calls
        """Server address and session."""
        self._loop = asyncio.get_running_loop()
        calls.on_close(self._close_soon)

    async def call(self, name: str, message: bytes, timeout: float) -> bytes | None:
        """See `SocketCalls.call`."""
        try:
            async with asyncio.timeout(timeout):
                connection = self._take() or await self._connect()
                if connection is None:
                    if self._closed:  # None would make the caller use gRPC
                        raise SessionLost("the session has ended")
                    return None
                intact = False
                try:
                    await self._loop.sock_sendall(connection, pack_call(name.encode(), message))
                    answer = AnswerReader()
                    while not answer.feed(await self._loop.sock_recv(connection, _CHUNK_BYTES)):
                        pass
                    intact = True
                finally:
                    self._put(connection, intact=intact)
        except TimeoutError:
            raise DeadlineExceeded(f"{name}: no answer within {timeout:g} s") from None
        except OSError as error:  # the server closes the connection when the session ends
            raise SessionLost(f"{name}: {error}") from None
        return message_of(answer.body)

    async def _connect(self) -> socket.socket | None:
        """Returns a busy connection; None if the server does not accept it."""
        connection = None
        granted = False
        try:
            connection = self.calls.make_socket()
            connection.setblocking(False)
            self._add(connection)
            granted = await self._handshake(connection)
        except (OSError, ValueError):
            return None
        finally:
            if connection is not None and not granted:
                self._put(connection, intact=False)
        return connection if granted else None

    async def _handshake(self, connection: socket.socket) -> bool:
        await self._loop.sock_connect(connection, self.calls.address)
        self._add(connection)  # `close` cannot shut down a socket before it is connected
        await self._loop.sock_sendall(connection, self.calls.hello)
        reply = b""
        while len(reply) < REPLY_BYTES and (piece := await self._loop.sock_recv(connection, REPLY_BYTES - len(reply))):
            reply += piece
        return unpack_reply(reply) is not None

    def _close_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.close)
