"""Unary calls over the socket protocol, for the asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

from ...protos.wire.socket_frames import HEAD_BYTES, Purpose, next_call_number, pack_call
from ..errors import DeadlineExceeded, KVTierError, SessionLost
from ..session.socket_calls import MAX_IDLE, SocketCalls, answer_length, enable_keepalive, message_of

__all__ = ["AsyncSocketCalls"]


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, number: int) -> bytes:
        """Returns what follows the head of the answer to call `number`."""
        length = answer_length(await self.reader.readexactly(HEAD_BYTES), number)
        return await self.reader.readexactly(length)


class AsyncSocketCalls:
    """Calls of one session on one event loop, over separate connections."""

    def __init__(self, calls: SocketCalls) -> None:
        self.calls = calls
        """Server address and session."""
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._connecting: set[asyncio.Task[_Connection | None]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        calls.on_close(self._close_soon)

    async def call(self, name: str, message: bytes, timeout: float) -> bytes | None:
        """See `SocketCalls.call`."""
        connection = self._take_idle()
        if connection is None and time.monotonic() < self.calls.avoid_until and not self._closed:
            return None
        try:
            async with asyncio.timeout(timeout):
                connection = connection or await self._connect()
                if connection is None:
                    if self._closed:  # None would make the caller use gRPC
                        raise SessionLost("the session has ended")
                    return None
                self._busy.add(connection)
                intact = False
                try:
                    number = next_call_number()
                    connection.writer.write(pack_call(number, name.encode(), message))
                    body = await connection.answer(number)
                    intact = True
                finally:
                    self._put(connection, intact=intact)
        except TimeoutError:
            if connection is None:
                self.calls.avoid_connecting()
            raise DeadlineExceeded(f"{name}: no answer within {timeout:g} s") from None
        except (OSError, EOFError) as error:  # for example, the session has ended
            raise SessionLost(f"{name}: {error}") from None
        return message_of(body)

    def _take_idle(self) -> _Connection | None:
        """Returns an idle connection that the server has not closed."""
        while self._idle:
            connection = self._idle.pop()
            if not (connection.reader.at_eof() or connection.writer.transport.is_closing()):
                return connection
            connection.writer.transport.abort()
        return None

    def close(self) -> None:
        """Closes all connections; calls in progress end with `SessionLost`."""
        self._closed = True
        for connection in [*self._idle, *self._busy]:
            connection.writer.transport.abort()
        self._idle.clear()
        for task in self._connecting:
            task.cancel()

    async def _connect(self) -> _Connection | None:
        """Returns a connection; None if the server does not accept it, or after `close`."""
        if self._closed:
            return None
        task = asyncio.ensure_future(self._connected())
        self._connecting.add(task)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if not task.cancel() and (unused := task.result()) is not None:
                unused.writer.transport.abort()
            raise
        finally:
            self._connecting.discard(task)
        return None if task.cancelled() else task.result()

    async def _connected(self) -> _Connection | None:
        writer = None
        accepted = False
        try:
            connection = await self._open()
            writer = connection.writer
            number = next_call_number()
            writer.write(self.calls.target.hello(Purpose.CALLS, number))
            message_of(await connection.answer(number))
            accepted = not self._closed
        except (OSError, EOFError, ValueError, KVTierError) as error:
            self.calls.refusal = str(error) or type(error).__name__
            return None
        finally:
            if writer is not None and not accepted:
                writer.transport.abort()
        return connection if accepted else None

    async def _open(self) -> _Connection:
        target = self.calls.target
        if isinstance(target.address, str):
            reader, writer = await asyncio.open_unix_connection(target.address)
            try:
                target.check_owner(writer.get_extra_info("socket"))
            except OSError:
                writer.transport.abort()
                raise
            return _Connection(reader, writer)
        # On a thread, because it reads files.
        context = await asyncio.to_thread(target.tls_context, Purpose.CALLS) if target.tls_hostname else None
        reader, writer = await asyncio.open_connection(
            *target.address, ssl=context, server_hostname=target.tls_hostname or None
        )
        enable_keepalive(writer.get_extra_info("socket"))
        return _Connection(reader, writer)

    def _put(self, connection: _Connection, *, intact: bool) -> None:
        self._busy.discard(connection)
        if intact and not self._closed and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.writer.transport.abort()

    def _close_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.close)
