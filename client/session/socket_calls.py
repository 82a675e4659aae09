"""Connections of the socket protocol (`docs/wire.md`), and unary calls over them.

The socket is the Unix socket of a local server, or the TCP port of a remote server's bulk process.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from ...cuda.host.socket_io import Connection, TlsConnection
from ...protos.credentials import Credentials
from ...protos.error_reasons import reason_within
from ...protos.socket_owner import check_connected
from ...protos.v1 import common_pb2
from ...protos.wire.socket_frames import (
    CALLS_PROTOCOL,
    HEAD_BYTES,
    MAX_ANSWER_BYTES,
    STATUS_OF_CODE,
    STREAMS_PROTOCOL,
    FrameKind,
    Purpose,
    check_number,
    next_call_number,
    pack_call,
    pack_hello,
    unpack_answer,
    unpack_head,
)
from ..errors import DeadlineExceeded, KVTierError, ServerError, SessionLost, error_from
from .fork_guard import ForkGuarded

__all__ = [
    "MAX_IDLE",
    "SocketCalls",
    "SocketPool",
    "SocketTarget",
    "answer_length",
    "enable_keepalive",
    "message_of",
    "read_answer",
]

_CONNECT_SECONDS = 2.0
_AVOID_SECONDS = 5.0
_SUCCESS = b"\0"
_ANSWER_BYTES = 64 << 10
"""Bytes that are received together with the head of an answer. Most answers are shorter."""
MAX_IDLE = 8
"""Maximum number of idle connections; each uses a file descriptor of the server."""


@dataclass(frozen=True, slots=True)
class SocketTarget:
    """Socket of a server, and the session for which a client connects to it."""

    address: str | tuple[str, int]
    """Path of a Unix socket, or host and TCP port."""
    session: common_pb2.SessionRef
    credentials: Credentials
    tls_hostname: str = ""
    """Name that the server's certificate must have; "" if the connection does not use TLS."""
    is_chosen: bool = False
    """Whether the operator chose the directory of the Unix socket (`socket_owner`)."""

    def check_owner(self, connection: socket.socket) -> None:
        """Checks whose Unix socket this is. Raises `OSError`. Call it before sending anything."""
        if isinstance(self.address, str) and not self.is_chosen:
            check_connected(connection, self.address)

    def hello(self, purpose: Purpose, number: int) -> bytes:
        """Returns the first message of a connection. Raises `CredentialsError`."""
        token = "" if purpose is Purpose.REGION else self.credentials.socket_token()
        return pack_hello(purpose, self.session.session_id, self.session.epoch, number, token)

    def tls_context(self, purpose: Purpose) -> ssl.SSLContext | None:
        """Returns the context for a connection; None without TLS. Raises `CredentialsError`."""
        protocol = CALLS_PROTOCOL if purpose is Purpose.CALLS else STREAMS_PROTOCOL
        return self.credentials.socket_context(protocol) if self.tls_hostname else None

    def connect(
        self, purpose: Purpose, seconds: float, on_open: Callable[[Connection], object] = lambda _: None
    ) -> Connection:
        """Returns a connection that the server has accepted. `on_open` gets it before the hello.

        Raises:
            OSError: the server cannot be reached, or TLS failed; after `seconds` `TimeoutError` or
                `BlockingIOError`.
            KVTierError: the server refused the connection.
            ValueError: the server speaks another protocol, or the credentials cannot be used.
        """
        context = self.tls_context(purpose)
        sock = _connected_socket(self.address, min(seconds, _CONNECT_SECONDS))
        try:
            connection = Connection(sock)
            connection.set_deadline(seconds)
            self.check_owner(sock)
            if context is not None:
                connection = secure = TlsConnection(sock, context, server_hostname=self.tls_hostname)
                on_open(secure)
                secure.set_deadline(seconds)
                secure.handshake()
            else:
                on_open(connection)
            number = next_call_number()
            connection.send([self.hello(purpose, number)])
            message_of(read_answer(connection, number))
        except BaseException:
            sock.close()
            raise
        return connection


class SocketPool(ForkGuarded):
    """Connections of one session. Each carries one call at a time. Any thread may use the pool."""

    def __init__(self, target: SocketTarget, purpose: Purpose) -> None:
        self.target = target
        self._purpose = purpose
        self._idle: list[Connection] = []
        self._open: WeakSet[Connection] = WeakSet()
        """Idle and busy ones. Python closes one that an interrupted caller did not `put`."""
        self._connecting: set[Connection] = set()
        """Connections whose hello the server has not answered yet."""
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Closes idle connections and ends attempts to connect. `put` closes the busy ones."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._connecting:
                connection.shutdown()
        for connection in idle:
            connection.close()

    def take(self, seconds: float) -> Connection:
        """Returns a connection; the caller returns it with `put`. Raises what `connect` raises."""
        while True:
            with self._lock:
                if self._closed:
                    raise SessionLost("the session has ended")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(min(seconds, _CONNECT_SECONDS))
            # An idle connection is readable only if the server has closed it.
            if not connection.is_readable():
                return connection
            connection.close()

    def _connect(self, seconds: float) -> Connection:
        opened: list[Connection] = []

        def on_open(connection: Connection) -> None:
            opened.append(connection)
            with self._lock:
                self._connecting.add(connection)
                if self._closed:
                    raise SessionLost("the session has ended")

        try:
            connection = self.target.connect(self._purpose, seconds, on_open)
            with self._lock:
                self._open.add(connection)
                closed = self._closed
        finally:
            with self._lock:
                self._connecting.difference_update(opened)
        if closed:
            self.put(connection, intact=False)
            raise SessionLost("the session has ended")
        return connection

    def put(self, connection: Connection, *, intact: bool) -> None:
        """Returns a connection to the pool. `intact`: its last answer was read completely."""
        with self._lock:
            if intact and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class SocketCalls(SocketPool):
    """Blocking calls of one session. Any thread may call."""

    def __init__(self, target: SocketTarget) -> None:
        """Does not connect; see `prepare`."""
        super().__init__(target, Purpose.CALLS)
        self.avoid_until = 0.0
        """Until this time (monotonic) the client opens no connection, and calls use gRPC."""
        self._close_callbacks: list[Callable[[], object]] = []
        self.refusal = ""
        """Why the last attempt to connect failed."""

    def on_close(self, callback: Callable[[], object]) -> None:
        """Registers a callback that `close` runs. If this is closed already, runs it at once."""
        with self._lock:
            closed = self._closed
            self._close_callbacks.append(callback)
        if closed:
            callback()

    def prepare(self) -> bool:
        """Connects for the first call; returns whether the server accepts calls here."""
        try:
            self.put(self.take(_CONNECT_SECONDS), intact=True)
        except (OSError, ValueError, KVTierError) as error:
            self.refusal = str(error) or type(error).__name__
            return False
        return True

    def _connect(self, seconds: float) -> Connection:
        """Raises ConnectionError if the last attempt timed out recently."""
        if time.monotonic() < self.avoid_until:
            raise ConnectionError("the last attempt to connect timed out")
        try:
            return super()._connect(seconds)
        except (TimeoutError, BlockingIOError):
            self.avoid_connecting()
            raise

    def avoid_connecting(self) -> None:
        """Called if an attempt to connect timed out.

        Over TCP the bulk process accepts the connection, and hangs. Over a Unix socket the server
        itself hangs, so that gRPC would not answer either.
        """
        if not isinstance(self.target.address, str):
            self.avoid_until = time.monotonic() + _AVOID_SECONDS

    def call(self, name: str, message: bytes, timeout: float) -> bytes | None:
        """Calls a method and returns its response. Returns None if no connection is possible.

        Raises `KVTierError` if the call was refused or failed, or got no response in time.
        """
        try:
            connection = self.take(timeout)
        except (OSError, ValueError, KVTierError) as error:
            if isinstance(error, TimeoutError | BlockingIOError) and timeout <= _CONNECT_SECONDS:
                raise DeadlineExceeded(f"{name}: no answer within {timeout:g} s") from None
            if self._closed:  # None would make the caller use gRPC
                raise SessionLost("the session has ended") from None
            self.refusal = str(error) or type(error).__name__
            return None
        intact = False
        try:
            connection.set_deadline(timeout)
            number = next_call_number()
            connection.send([pack_call(number, name.encode(), message)])
            body = read_answer(connection, number)
            intact = True
        except BlockingIOError:
            raise DeadlineExceeded(f"{name}: no answer within {timeout:g} s") from None
        except OSError as error:  # such as the end of the session, or an answer to another call
            raise SessionLost(f"{name}: {error}") from None
        finally:
            self.put(connection, intact=intact)
        return message_of(body)

    def close(self) -> None:
        """Closes all connections; calls in progress end with `SessionLost`."""
        super().close()
        with self._lock:
            busy = list(self._open)
            callbacks, self._close_callbacks = self._close_callbacks, []
        for connection in busy:
            connection.shutdown()
        for callback in callbacks:
            callback()


def _connected_socket(address: str | tuple[str, int], seconds: float) -> socket.socket:
    """Connects within `seconds`; the socket itself has no time-out. Raises OSError."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds)
            sock.connect(address)
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection(address, seconds)
        enable_keepalive(sock)
    sock.settimeout(None)
    return sock


def enable_keepalive(sock: socket.socket) -> None:
    """Disables Nagle's algorithm. Enables keepalive probes, which detect a dead host within 15 s.

    The intervals equal those of the gRPC channel, so firewalls treat both connections alike.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


def read_answer(connection: Connection, number: int, head: bytes | None = None, most: int = MAX_ANSWER_BYTES) -> bytes:
    """Returns what follows the head of the answer to call `number`. `head`: if it has been read.

    If bytes follow the answer, ends the connection, so that they are not read as another answer.
    Raises OSError, and what `answer_length` raises.
    """
    data = head or connection.read_some(_ANSWER_BYTES)
    if len(data) < HEAD_BYTES:
        data += connection.read(HEAD_BYTES - len(data))
    length = answer_length(data, number, most)
    body = data[HEAD_BYTES : HEAD_BYTES + length]
    if len(data) > HEAD_BYTES + length:
        connection.shutdown()
    if len(body) == length:
        return body
    whole = bytearray(length)
    whole[: len(body)] = body
    connection.receive([memoryview(whole)[len(body) :]])
    return bytes(whole)


def answer_length(head: bytes, number: int, most: int = MAX_ANSWER_BYTES) -> int:
    """Returns the length of what follows the head of the answer to call `number`.

    Raises `ServerError` for another frame or for more than `most` bytes, and `CrossedFrameError`
    for an answer to another call.
    """
    try:
        length, kind, answered = unpack_head(head)
    except ValueError:
        length, kind, answered = 0, None, number
    if kind is not FrameKind.ANSWER or length > most:
        raise ServerError("the server does not send an answer of the socket protocol")
    if answered != number:
        check_number(answered, number)  # raises
    return length


def message_of(body: bytes) -> bytes:
    """Returns the message of an answer, or raises the `KVTierError` that the answer carries."""
    if body[:1] == _SUCCESS:
        return body[1:]
    try:
        code, message = unpack_answer(body)
        status = status_pb2.Status.FromString(message)
    except (ValueError, DecodeError) as error:
        raise ServerError(f"not an answer of kvtier: {error}") from None
    raise error_from(STATUS_OF_CODE[code], status.message, reason_within(status))
