"""Socket I/O of memory ranges, without an extra copy and without the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import math
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

__all__ = ["Connection", "TlsConnection", "checksum", "checksum_on", "views_of"]


def views_of(addresses: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """Views of memory ranges. The caller keeps the memory mapped as long as a view is used."""
    return [_ADDRESS_SPACE[address : address + size] for address, size in zip(addresses, sizes, strict=True)]


def checksum_on(connection: Connection, views: Sequence[memoryview]) -> int:
    """Returns the checksum for a frame on a connection: 0 if the connection authenticates bytes."""
    return 0 if connection.authenticates else checksum(views)


def checksum(views: Sequence[memoryview]) -> int:
    """The xxh3-64 of the concatenated views."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


class Connection:
    """Blocking stream socket with an optional deadline. One thread uses it at a time.

    Another thread may call `shutdown`, which ends a call that waits. All methods that send or
    receive raise OSError: `BlockingIOError` after the deadline or the idle limit,
    `ConnectionResetError` if the peer has closed the connection.
    """

    authenticates = False
    """Whether the connection detects bytes that were changed on the way."""

    def __init__(self, sock: socket.socket, idle_seconds: float | None = None) -> None:
        """`idle_seconds` limits each wait of a connection without a deadline."""
        self.socket = sock
        # `select` would fail for descriptors above 1023, which engines reach.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._idle_seconds = idle_seconds
        self._deadline: float | None = None
        self._limits: dict[int, float] = {}
        """Limit of one call in the kernel, by option."""
        self._buffer = memoryview(b"")
        self.set_deadline(None)

    def set_deadline(self, seconds: float | None, stall_seconds: float = math.inf) -> None:
        """Sets the time that all later calls may take together; None: the idle limit applies.

        `stall_seconds`: time for which no byte may move. It applies only with a deadline.
        """
        self._stall_seconds = stall_seconds
        if seconds is not None:
            self._deadline = time.monotonic() + seconds
            return
        self._deadline = None
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._limit(option, self._idle_seconds or math.inf)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Sends all bytes of all pieces."""
        left = list(map(_view, pieces))
        while left:
            self._prepare_wait(socket.SO_SNDTIMEO)
            sent = self.socket.sendmsg(left[:_MAX_PIECES])
            while left and sent >= left[0].nbytes:
                sent -= left.pop(0).nbytes
            if sent:
                left[0] = left[0][sent:]

    def receive(self, views: Sequence[memoryview]) -> None:
        """Fills all views."""
        left = list(views)
        while left:
            self._prepare_wait(socket.SO_RCVTIMEO)
            received = self.socket.recvmsg_into(left[:_MAX_PIECES], 0, socket.MSG_WAITALL)[0]
            if not received:
                raise ConnectionResetError(_CLOSED)
            while left and received >= left[0].nbytes:
                received -= left.pop(0).nbytes
            if received:
                left[0] = left[0][received:]

    def read(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        if nbytes:
            self.receive([memoryview(data)])
        return bytes(data)

    def read_some(self, most: int) -> bytes:
        """Returns the bytes that have arrived, at most `most`. Waits for the first of them."""
        if len(self._buffer) < most:
            self._buffer = memoryview(bytearray(most))
        self._prepare_wait(socket.SO_RCVTIMEO)
        received = self.socket.recv_into(self._buffer, most)
        if not received:
            raise ConnectionResetError(_CLOSED)
        return bytes(self._buffer[:received])

    def peek(self, nbytes: int) -> bytes:
        """Returns the next bytes, which stay in the socket; fewer if the connection ends."""
        self._prepare_wait(socket.SO_RCVTIMEO)
        return self.socket.recv(nbytes, socket.MSG_PEEK | socket.MSG_WAITALL)

    def is_readable(self) -> bool:
        """Returns whether bytes, or the end of the connection, have arrived."""
        return bool(self._poll.poll(0))

    def shutdown(self) -> None:
        """Ends the connection, and calls of other threads that wait for it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()

    def _prepare_wait(self, option: int) -> None:
        """Limits the next call to the time left, or up to 1/9 more.

        `option` is SO_RCVTIMEO or SO_SNDTIMEO. The kernel limits each call, and a slow peer causes
        many calls. The kernel keeps a limit that fits, also from an earlier deadline, because
        setting it costs as much as a call. Raises `BlockingIOError` after the deadline. If no byte
        moves for the stall limit, the next call raises it.
        """
        if self._deadline is None:
            return
        left = self._deadline - time.monotonic()
        if left < _SHORTEST_SECONDS:  # zero microseconds mean no limit
            raise BlockingIOError("the deadline has passed")
        left = min(left, self._stall_seconds)
        limit = self._limits[option]
        if not 0.9 * limit < left <= limit:
            self._limit(option, left * _LIMIT_MARGIN)

    def _limit(self, option: int, seconds: float) -> None:
        """Sets the time that one call may wait. Infinity means no limit.

        `settimeout` would make the socket non-blocking. Then each call would transfer only the
        bytes that fit the socket's buffer.
        """
        whole, rest = divmod(seconds if seconds < math.inf else 0, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(rest * 1e6)))
        self._limits[option] = seconds


class TlsConnection(Connection):
    """Connection with TLS. `handshake` must be called first.

    TLS records pass through memory buffers. So one system call transfers many records, where
    `ssl.SSLSocket` makes one or two system calls for each record of 16 KiB.
    """

    authenticates = True

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        """`server_hostname`: the name to verify, for a client; None for a server."""
        super().__init__(sock, idle_seconds)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self._buffer = memoryview(bytearray(_TLS_CHUNK_BYTES))
        self._is_server = server_hostname is None
        self._short_records = 0

    def handshake(self) -> None:
        """Performs the handshake, including ALPN. Raises OSError, for example `ssl.SSLError`."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                self._flush()  # the alert tells the peer the cause
                raise
            else:
                self._flush()
                break
        if self._tls.selected_alpn_protocol() is None:
            raise ssl.SSLError("the peer does not offer the same application protocol")

    @property
    def peer_certificate(self) -> bytes | None:
        """The peer's verified certificate in DER; None if it sent none."""
        return self._tls.getpeercert(binary_form=True)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[self._tls.write(left[:_TLS_CHUNK_BYTES]) :]
                if self._outgoing.pending >= _TLS_CHUNK_BYTES:
                    self._flush()
        self._flush()

    def receive(self, views: Sequence[memoryview]) -> None:
        for view in views:
            left = view
            while left:
                received = self._decrypted(left.nbytes, left)  # the number of bytes
                left = left[received:]
                if left and received < _SHORT_RECORD_BYTES and self._is_server:
                    self._hold_back()

    def read_some(self, most: int) -> bytes:
        data: bytes = self._decrypted(most)
        return data

    def _decrypted(self, *arguments: Any) -> Any:
        """Calls `SSLObject.read` until a record has arrived."""
        while True:
            try:
                received = self._tls.read(*arguments)
            except ssl.SSLWantReadError:
                self._fill()
                continue
            if not received:
                raise ConnectionResetError(_CLOSED)
            return received

    def _hold_back(self) -> None:
        """Waits after many short records: each takes as long as a long one, and delays others."""
        self._short_records += 1
        pauses, rest = divmod(self._short_records, _SHORT_RECORDS)
        if not rest:
            time.sleep(min(_PAUSE_SECONDS * 2 ** min(pauses, _DOUBLINGS), _MAX_PAUSE_SECONDS))

    def is_readable(self) -> bool:
        return bool(self._tls.pending() or self._incoming.pending) or super().is_readable()

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().send([self._outgoing.read()])

    def _fill(self) -> None:
        """Receives the bytes that have arrived; waits for the first of them."""
        self._prepare_wait(socket.SO_RCVTIMEO)
        received = self.socket.recv_into(self._buffer)
        if not received:
            raise ConnectionResetError(_CLOSED)
        self._incoming.write(self._buffer[:received])


_view: Callable[[bytes | memoryview], memoryview] = memoryview

_ADDRESS_SPACE = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
"""View of all addresses. Slicing it is much faster than making a ctypes array."""
_CLOSED = "the peer has closed the connection"
_SHORTEST_SECONDS = 1e-5
_LIMIT_MARGIN = 1.01
"""Calls with equal deadlines begin to wait at slightly different times. So one limit fits them."""
_MAX_PIECES = 512
"""Maximum number of pieces per call. The kernel accepts at most 1024 (IOV_MAX)."""
_SHORT_RECORD_BYTES = 32
"""Clients send longer pieces: a frame is at least the part of a block."""
_SHORT_RECORDS = 64
"""After as many records of a client that are shorter, and do not fill their memory, it is not read
for a while. As many more double the time."""
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, _DOUBLINGS = 0.005, 0.25, 6
_TLS_CHUNK_BYTES = 64 << 10
"""Bytes of TLS records per system call. Bounds what a peer can send before the handshake."""
