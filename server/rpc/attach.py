"""Attach socket: passes the region's descriptor to clients on this host, and serves their calls.

A client process keeps its connection open while it can write to the region. When the
client process ends, the kernel closes the connection, even if the client runs in another container.
Then the server can reuse the slots of the client's session.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...protos.wire.attach import REQUEST_BYTES, Purpose, pack_reply, unpack_request
from ..telemetry.logs import get_logger
from .sessions import SessionRegistry
from .socket_calls import SocketCallServer

__all__ = ["AttachServer"]

_log = get_logger(__name__)

_HANDSHAKE_SECONDS = 5.0
_MAX_HANDSHAKES = 256
"""Maximum number of connections whose request has not arrived. The server closes further ones."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class AttachServer:
    """Server of the attach socket. Accepts only processes of the same user or of root.

    Runs on the event loop.
    """

    def __init__(
        self, path: Path, region_fd: int, region_bytes: int, sessions: SessionRegistry, calls: SocketCallServer
    ) -> None:
        self.path = path
        self._region_fd = region_fd
        self._region_bytes = region_bytes
        self._sessions = sessions
        self._calls = calls
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._handshakes = 0

    def start(self) -> None:
        """Binds and listens. Replaces the socket of a killed server. Raises `OSError`."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(os.fspath(self.path))
        self.path.chmod(0o600)
        listener.listen(128)
        self._listener = listener
        self._spawn(self._accept(listener))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            with suppress(FileNotFoundError):
                self.path.unlink()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # for example no free descriptor: tries again
                _log.warning("cannot accept a connection", error=str(error))
                await asyncio.sleep(0.1)
                continue
            if self._handshakes >= _MAX_HANDSHAKES:
                connection.close()
                continue
            connection.setblocking(False)
            self._spawn(self._serve(connection))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def adopt(self, connection: socket.socket, request: bytes) -> None:
        """Serves a connection that the bulk process has accepted for calls.

        `request`: the bytes that the bulk process has read from the connection.
        """
        connection.setblocking(False)
        self._spawn(self._serve_handed(connection, request))

    async def _serve_handed(self, connection: socket.socket, request: bytes) -> None:
        with connection:
            try:
                purpose, session_id, epoch = unpack_request(request)
            except ValueError as error:
                _log.warning("attach refused", error=str(error))
                return
            if purpose is not Purpose.CALLS or not await self._serve_calls(connection, session_id, epoch, via_tcp=True):
                self._refuse(connection)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._handshakes += 1
                try:
                    request = await asyncio.wait_for(_receive(connection, REQUEST_BYTES), _HANDSHAKE_SECONDS)
                finally:
                    self._handshakes -= 1
                purpose, session_id, epoch = unpack_request(request)
            except (OSError, TimeoutError, ValueError) as error:
                _log.warning("attach refused", error=str(error) or type(error).__name__)
                return
            if not _is_ours(connection):
                _log.warning("attach refused", error="another user's process")
                return
            serve = self._serve_region if purpose is Purpose.REGION else self._serve_calls
            if not await serve(connection, session_id, epoch):
                self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.send(pack_reply(self._region_bytes, granted=False))

    async def _serve_region(self, connection: socket.socket, session_id: bytes, epoch: int) -> bool:
        """Sends the region's descriptor and waits for the connection's end. False if refused."""
        number = next(self._numbers)
        if not self._sessions.attach(session_id, epoch, number):
            return False
        try:
            socket.send_fds(connection, [pack_reply(self._region_bytes, granted=True)], [self._region_fd])
            await _wait_for_end(connection)
        except OSError as error:
            _log.debug("attached client is gone", error=str(error))
        finally:
            self._sessions.detach(session_id, number)
        return True

    async def _serve_calls(
        self, connection: socket.socket, session_id: bytes, epoch: int, *, via_tcp: bool = False
    ) -> bool:
        """Serves calls until the connection or the session ends. Returns False if refused."""
        serving = asyncio.current_task()
        assert serving is not None
        disconnect = serving.cancel
        caller = self._sessions.connect(session_id, epoch, disconnect, via_tcp=via_tcp)
        if caller is None:
            return False
        try:
            connection.send(pack_reply(self._region_bytes, granted=True))
            await self._calls.serve(connection, caller)
        except OSError as error:
            _log.debug("client of socket calls is gone", error=str(error))
        finally:
            self._sessions.disconnect(session_id, disconnect)
        return True


def _is_ours(connection: socket.socket) -> bool:
    """Returns whether the peer runs as this user or as root."""
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (0, os.getuid())


async def _receive(connection: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        piece = await loop.sock_recv(connection, nbytes - len(data))
        if not piece:
            raise ValueError("the connection ended before the request was complete")
        data += piece
    return data


async def _wait_for_end(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 64):
        pass
