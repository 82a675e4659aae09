"""Socket I/O of memory ranges, without an extra copy and without the GIL."""

from __future__ import annotations

import ctypes
import math
import socket
import struct
import sys
import time
from collections.abc import Sequence

import xxhash

__all__ = ["Deadline", "checksum", "limit_waits", "receive", "send", "views_of"]


def views_of(addresses: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """Views of memory ranges. The caller keeps the memory mapped as long as a view is used."""
    return [_ADDRESS_SPACE[address : address + size] for address, size in zip(addresses, sizes, strict=True)]


def checksum(views: Sequence[memoryview]) -> int:
    """The xxh3-64 of the concatenated views."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Sets a time-out for each call of a blocking socket. A late call raises `BlockingIOError`.

    `socket.settimeout` would make the socket non-blocking. Then each call would transfer only the
    bytes that fit the socket's buffer.
    """
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _limit(connection, option, seconds)


class Deadline:
    """Deadline of several calls on one blocking connection."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.at = time.monotonic() + seconds
        """Time of the monotonic clock, in seconds."""
        self._connection = connection
        self._limits: dict[int, float] = {}

    def limit(self, option: int) -> None:
        """Limits the next call to the time left, or up to 1/9 more.

        `option` is SO_RCVTIMEO or SO_SNDTIMEO. The kernel applies its limit to each single call,
        and a slow peer causes many calls. So the limit must shrink. The limit is set again only
        when the time left has shrunk by a tenth, because setting it costs as much as a call. Raises
        `BlockingIOError` after the deadline.
        """
        left = self.at - time.monotonic()
        if left < _SHORTEST_SECONDS:  # zero microseconds mean no limit
            raise BlockingIOError("the deadline has passed")
        if left <= 0.9 * self._limits.get(option, math.inf):
            _limit(self._connection, option, left)
            self._limits[option] = left


def send(connection: socket.socket, pieces: Sequence[bytes | memoryview], deadline: Deadline | None = None) -> None:
    """Sends all bytes. Raises OSError, after the deadline `BlockingIOError`."""
    left = [memoryview(piece) for piece in pieces]
    while left:
        if deadline is not None:
            deadline.limit(socket.SO_SNDTIMEO)
        sent = connection.sendmsg(left[:_MAX_PIECES])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive(connection: socket.socket, views: Sequence[memoryview], deadline: Deadline | None = None) -> None:
    """Fills all views. Raises what `send` raises, and ConnectionError if the peer has closed."""
    left = list(views)
    while left:
        if deadline is not None:
            deadline.limit(socket.SO_RCVTIMEO)
        received = connection.recvmsg_into(left[:_MAX_PIECES], 0, socket.MSG_WAITALL)[0]
        if not received:
            raise ConnectionResetError("the peer has closed the connection")
        while left and received >= left[0].nbytes:
            received -= left.pop(0).nbytes
        if received:
            left[0] = left[0][received:]


def _limit(connection: socket.socket, option: int, seconds: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


_ADDRESS_SPACE = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
"""View of all addresses. Slicing it is much faster than making a ctypes array."""
_SHORTEST_SECONDS = 1e-5
_MAX_PIECES = 512
"""Maximum number of pieces per call. The kernel accepts at most 1024 (IOV_MAX)."""
