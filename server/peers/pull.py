"""Pull of block parts from another server, over the socket protocol (`docs/wire.md`)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from ...cuda.host.socket_io import Connection, TlsConnection, checksum_on, views_of
from ...protos.credentials import Credentials
from ...protos.error_reasons import reason_within
from ...protos.v1 import common_pb2, transfer_pb2
from ...protos.wire import socket_frames as frames
from ...protos.wire.part_sequence import PartSequence
from ...tiers.storage.buffers import writable_address_of

__all__ = ["PullConnections", "PullRefusedError", "WrongBytesError"]

_STALL_SECONDS = 1.0
"""Maximum time without a byte."""
_MAX_IDLE = 4
_MAX_REFUSAL_BYTES = 64 << 10


class PullRefusedError(Exception):
    """The other server refused the pull. The message is its reason."""


class WrongBytesError(Exception):
    """The bytes arrived damaged, or they are not those of the requested parts."""


@dataclass(slots=True, eq=False)
class PullConnections:
    """Connections for the streams of one session at another server. Any thread may use them."""

    address: tuple[str, int]
    session: common_pb2.SessionRef
    credentials: Credentials
    tls_name: str
    """Name that the server's certificate must have; "" without TLS."""
    _idle: list[Connection] = field(default_factory=list)
    _busy: set[Connection] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def pull(self, lease_id: int, items: Sequence[int], parts: Sequence[memoryview], seconds: float) -> None:
        """Fills `parts` with the parts of these items of a lease, in this order.

        Raises OSError (also after `seconds`), ValueError, PullRefusedError, WrongBytesError. The
        content of the parts is then undefined.
        """
        deadline = time.monotonic() + seconds
        target = PartSequence([writable_address_of(part) for part in parts], [part.nbytes for part in parts])
        request = transfer_pb2.PullRequest(session=self.session, lease_id=lease_id, items=items)
        with self._connection(deadline) as connection:
            number = frames.next_call_number()
            connection.send([frames.pack_call(number, frames.PULL, request.SerializeToString())])
            received = 0
            while True:
                head = connection.read(frames.HEAD_BYTES)
                if frames.unpack_head(head)[1] is not frames.FrameKind.DATA:
                    break
                data = frames.unpack_data_head(head + connection.read(frames.DATA_HEAD_BYTES - frames.HEAD_BYTES))
                frames.check_number(data.number, number)
                if data.offset != received or data.nbytes > target.total_bytes - received:
                    raise WrongBytesError("the server sent other bytes than those of the requested parts")
                pieces = list(target.locate(data.offset, data.nbytes))
                views = views_of([place for place, _ in pieces], [size for _, size in pieces])
                connection.receive(views)
                if checksum_on(connection, views) != data.xxh3_64:
                    raise WrongBytesError("a frame arrived damaged")
                received += data.nbytes
            _read_answer(connection, number, head)
        if received != target.total_bytes:
            raise WrongBytesError(f"the server sent {received} of {target.total_bytes} bytes")

    def close(self) -> None:
        """Ends all pulls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.shutdown()
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[Connection]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.is_readable():  # the server has closed it
            connection.close()
            connection = None
        if connection is None:
            connection = self._connect(deadline - time.monotonic())
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        intact = False
        try:
            if closed:
                raise ConnectionAbortedError("the session has ended")
            connection.set_deadline(deadline - time.monotonic(), _STALL_SECONDS)
            yield connection
            intact = True
        finally:
            with self._lock:
                self._busy.discard(connection)
                keep = intact and not self._closed and len(self._idle) < _MAX_IDLE
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _connect(self, seconds: float) -> Connection:
        context = self.credentials.socket_context(frames.STREAMS_PROTOCOL) if self.tls_name else None
        sock = socket.create_connection(self.address, max(seconds, 0.001))
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock)
            if context is not None:
                connection = secure = TlsConnection(sock, context, server_hostname=self.tls_name)
                secure.set_deadline(seconds)
                secure.handshake()
            connection.set_deadline(seconds)
            ref, token = self.session, self.credentials.socket_token()
            number = frames.next_call_number()
            connection.send([frames.pack_hello(frames.Purpose.STREAMS, ref.session_id, ref.epoch, number, token)])
            _read_answer(connection, number, connection.read(frames.HEAD_BYTES))
        except BaseException:
            sock.close()
            raise
        return connection


def _read_answer(connection: Connection, number: int, head: bytes) -> None:
    """Reads an answer without content. Raises OSError, PullRefusedError, ValueError."""
    length, kind, answered = frames.unpack_head(head)
    if kind is not frames.FrameKind.ANSWER or length > _MAX_REFUSAL_BYTES:
        raise ValueError("not an answer of the socket protocol")
    frames.check_number(answered, number)
    code, message = frames.unpack_answer(connection.read(length))
    if code:
        try:
            reason = reason_within(status_pb2.Status.FromString(message))
        except DecodeError as error:
            raise ValueError("not an answer of the socket protocol") from error
        raise PullRefusedError(reason or f"status {code}")
