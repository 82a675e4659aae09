"""Unix socket of the socket protocol: passes the region to local clients, and serves their calls.

A client process keeps its connection for the region open while it can write to the region. When the
process dies, the kernel closes the connection, even if the process runs in another container. Then
the server can reuse the slots of the session.

Connections for streams go to the bulk process. The bulk process passes TCP connections for calls to
`AttachServer.adopt`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...cuda.host.region import HostRegion
from ...protos.error_reasons import status_of
from ...protos.v1 import common_pb2
from ...protos.wire.socket_frames import (
    HELLO_BYTES,
    MAX_TOKEN_BYTES,
    PURPOSE_BYTES,
    Hello,
    Purpose,
    pack_answer,
    pack_error,
    pack_region_answer,
    purpose_of,
    unpack_hello,
)
from ..auth.authenticator import AccessControl
from ..auth.certificate_names import certificate_names
from ..auth.roles import Identity
from ..refused import Refused
from ..telemetry.downgrades import Report
from ..telemetry.logs import get_logger
from .new_connections import NewConnections
from .sessions import SessionRegistry
from .socket_calls import SocketCallServer

__all__ = ["SUFFIX", "AttachServer"]

SUFFIX = ".shm"
"""The path of the socket is that of the first Unix socket for gRPC with this suffix."""

_log = get_logger(__name__)

_HANDSHAKE_SECONDS = 5.0
_HANDSHAKE_USE = 0.002
"""Use of the event loop by a handshake, in seconds: 1 to 2 ms with TLS. It cannot be measured."""
_MAX_PIECES = 16
"""A client sends its hello in one piece. Each further one wakes the event loop, for 50 µs."""
_MAX_HANDSHAKES = 256
"""Maximum number of Unix connections whose hello has not arrived."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class AttachServer:
    """Server of the Unix socket. Only its owner and root can connect. Runs on the event loop."""

    def __init__(
        self,
        path: Path,
        region: HostRegion,
        sessions: SessionRegistry,
        calls: SocketCallServer,
        access: AccessControl,
        report: Report = lambda _: None,
        keeping: Callable[[bytes, int, socket.socket], AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> None:
        """`report` reports that connections cannot be accepted.

        `keeping` returns the context in which a client of a session maps the region.
        """
        self.path = path
        self.serve_streams: Callable[[socket.socket, bytes], bool] = lambda _, __: False
        """Passes a connection for streams to the bulk process; returns whether it could."""
        self._region = region
        self._sessions = sessions
        self._calls = calls
        self._access = access
        self._report = report
        self._keeping = keeping
        self._accepts = True
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._new = NewConnections()
        self._new_local = NewConnections(_MAX_HANDSHAKES, _MAX_HANDSHAKES)
        """Unix connections, by the process that has connected."""

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
                if self._accepts:
                    _log.warning("cannot accept a connection", error=str(error))
                self._accepts = False
                self._report(f"clients on this host cannot map the memory, because accept fails: {error}")
                await asyncio.sleep(0.1)
                continue
            if not self._accepts:
                self._accepts = True
                self._report("")
            connection.setblocking(False)
            self._spawn(self._serve(connection))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def adopt(self, connection: socket.socket) -> None:
        """Serves a TCP connection for calls that the bulk process has accepted."""
        connection.setblocking(False)
        self._spawn(self._serve_remote(connection))

    async def _serve_remote(self, connection: socket.socket) -> None:
        with connection:
            try:
                with self._new.counting(connection.getpeername()[0], partial(_shut_down, connection)):
                    async with asyncio.timeout(_HANDSHAKE_SECONDS):
                        transport, hello, token = await self._handshake(connection)
            except (OSError, ValueError) as error:
                _log.debug("a connection for calls was refused", error=str(error) or type(error).__name__)
            else:
                await self._serve_calls(transport, hello, token, via_tcp=True)

    async def _handshake(self, connection: socket.socket) -> tuple[asyncio.Transport, Hello, str | None]:
        """Performs the TLS handshake, if TLS is configured, and returns hello and token.

        The handshakes of all callers, who are still unknown, take turns with the calls of tenants.
        """
        turns = self._calls.turns
        account = turns.account_without_session(None)
        await turns.enter(account)
        turns.charge(account, time.monotonic() - _HANDSHAKE_USE, _HANDSHAKE_USE)
        tls = self._access.tls.current() if self._access.tls is not None else None
        transport, handshake = await asyncio.get_running_loop().connect_accepted_socket(_Handshake, connection, ssl=tls)
        try:
            hello, token = await handshake.received
        except BaseException:
            transport.abort()
            raise
        return transport, hello, token

    def _identify(self, hello: Hello, token: str | None, transport: asyncio.Transport) -> Identity | None:
        """Returns a remote client's identity, None without authentication. Raises `Refused`."""
        if hello.purpose is not Purpose.CALLS:
            raise Refused("INVALID_ARGUMENT", "a connection over TCP serves calls and streams only")
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() is None:
            raise Refused("INVALID_ARGUMENT", "the client does not offer the application protocol for calls")
        if self._access.authenticator is None:
            return None
        names = certificate_names(tls.getpeercert(binary_form=True)) if tls is not None else []
        caller = self._access.authenticator.identify(token, names, is_local=False)
        self._sessions.find(common_pb2.SessionRef(session_id=hello.session_id, epoch=hello.epoch), caller)
        return caller

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                pid, _, _ = _credentials_of(connection)
                with self._new_local.counting(f"{pid}", partial(_shut_down, connection)):
                    hello, data = await asyncio.wait_for(_receive_hello(connection), _HANDSHAKE_SECONDS)
                try:
                    await self._serve_local(connection, hello, data)
                except Refused as error:
                    with suppress(OSError):
                        connection.send(pack_error(hello.number, status_of(error.reason, str(error))))
            except (OSError, TimeoutError, ValueError) as error:
                _log.warning("attach refused", error=str(error) or type(error).__name__)

    async def _serve_local(self, connection: socket.socket, hello: Hello, data: bytes) -> None:
        """Serves a Unix connection after its hello (`data`). Raises `Refused`."""
        if not _is_ours(connection):
            raise Refused("PERMISSION_DENIED", "the client runs as another user than the server")
        if hello.purpose is Purpose.REGION:
            await self._serve_region(connection, hello)
        elif hello.purpose is Purpose.CALLS:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, connection)
            await self._serve_calls(transport, hello)
        elif not self.serve_streams(connection, data):
            raise Refused("NOT_READY", "the bulk process is not ready")

    async def _serve_region(self, connection: socket.socket, hello: Hello) -> None:
        """Sends the descriptor of the session's memory pool and waits until the connection ends.

        Raises `Refused`. If it is cancelled, the server ends, and the client may still write to its
        slots.
        """
        number = next(self._numbers)
        pool = self._sessions.attach(hello.session_id, hello.epoch, number)
        if pool is None:
            raise Refused("UNKNOWN_SESSION", "the session has ended, or must not map the region")
        ended = True
        try:
            with self._keeping(hello.session_id, number, connection):
                begin, end, descriptor = self._region.pools[pool]
                answer = pack_region_answer(hello.number, self._region.size_bytes, begin, end)
                socket.send_fds(connection, [answer], [descriptor])
                await _wait_for_end(connection)
        except OSError as error:
            _log.debug("attached client is gone", error=str(error))
        except asyncio.CancelledError:
            ended = False
            raise
        finally:
            if ended:
                self._sessions.detach(hello.session_id, number)

    async def _serve_calls(
        self, transport: asyncio.Transport, hello: Hello, token: str | None = None, *, via_tcp: bool = False
    ) -> None:
        """Serves calls until the connection or the session ends, then closes the connection.

        Over a Unix socket the identity that opened the session makes the calls.
        """
        serving = asyncio.current_task()
        assert serving is not None
        disconnect = serving.cancel
        try:
            caller = self._identify(hello, token, transport) if via_tcp else None
            opened_by = self._sessions.connect(hello.session_id, hello.epoch, disconnect, via_tcp=via_tcp)
            transport.write(pack_answer(hello.number, 0))
            await self._calls.serve(transport, hello, caller or opened_by)
        except Refused as error:
            name = self._sessions.name_of(hello.session_id)
            self._access.audit_log.record_refusal("hello", None, error.audit_reason, name)
            transport.write(pack_error(hello.number, status_of(error.reason, str(error))))
        finally:
            # Before `connection` is closed: the event loop must not watch a closed descriptor.
            transport.abort()
            self._sessions.disconnect(hello.session_id, disconnect)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handshake(asyncio.BufferedProtocol):
    """Reads the hello of a connection, also through TLS. Its buffer bounds what it accepts."""

    def __init__(self) -> None:
        self.received: asyncio.Future[tuple[Hello, str | None]] = asyncio.get_running_loop().create_future()
        self._data = memoryview(bytearray(HELLO_BYTES + MAX_TOKEN_BYTES + 1))
        self._end = self._pieces = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, _: int) -> memoryview:
        return self._data[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._pieces += 1
        try:
            received = self._parsed()
        except ValueError as error:
            self._transport.pause_reading()
            self.received.set_exception(error)
        else:
            if received is not None:
                self._transport.pause_reading()  # until `SocketCallServer.serve` has the connection
                self.received.set_result(received)

    def _parsed(self) -> tuple[Hello, str | None] | None:
        """Returns hello and token; None if bytes are missing. Raises ValueError."""
        if self._pieces > _MAX_PIECES:
            raise ValueError(f"the hello comes in more than {_MAX_PIECES} pieces")
        if self._end < HELLO_BYTES:
            return None
        hello = unpack_hello(self._data[:HELLO_BYTES])
        end = HELLO_BYTES + hello.token_bytes
        if self._end > end:
            raise ValueError("the client sends more than a hello")
        return (hello, str(self._data[HELLO_BYTES:end], "ascii") or None) if self._end == end else None

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.received.done():
            self.received.set_exception(exc or ConnectionResetError("the client has closed the connection"))


def _is_ours(connection: socket.socket) -> bool:
    return _credentials_of(connection)[1] in (0, os.getuid())


def _credentials_of(connection: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and group of the peer of a Unix connection."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid


async def _receive_hello(connection: socket.socket) -> tuple[Hello, bytes]:
    """Returns the fields of a hello, and its bytes with the token. Raises ValueError or OSError."""
    data = await _receive(connection, PURPOSE_BYTES)
    purpose_of(data)  # raises at once for another protocol, whose first message may be shorter
    data += await _receive(connection, HELLO_BYTES - PURPOSE_BYTES)
    hello = unpack_hello(data)
    return hello, data + await _receive(connection, hello.token_bytes)


async def _receive(connection: socket.socket, nbytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < nbytes:
        piece = await loop.sock_recv(connection, nbytes - len(data))
        if not piece:
            raise ValueError("the connection ended before the hello was complete")
        data += piece
    return data


async def _wait_for_end(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 64):
        pass
