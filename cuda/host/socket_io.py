"""Memory into and out of sockets without a copy in between. The GIL is free while bytes move."""

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
    """Returns views of memory that the caller keeps mapped as long as they are used."""
    return [_MEMORY[address : address + size] for address, size in zip(addresses, sizes, strict=True)]


def checksum(views: Sequence[memoryview]) -> int:
    """Returns the xxh3-64 of these bytes, one after the other."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def limit_waits(connection: socket.socket, seconds: float) -> None:
    """Bounds each wait of a blocking socket, which then ends in `BlockingIOError`.

    Python's own time-outs make a socket non-blocking: then each call moves what fits its buffer, and no more.
    """
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _limit(connection, option, seconds)


class Deadline:
    """When all that is sent and received over one connection must be over."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """The connection is one that blocks."""
        self.at = time.monotonic() + seconds
        """On the monotonic clock."""
        self._connection = connection
        self._limits: dict[int, float] = {}

    def limit(self, option: int) -> None:
        """Bounds the next call (SO_RCVTIMEO, SO_SNDTIMEO) by what is left, or a ninth more. Raises `BlockingIOError` if nothing is.

        The kernel bounds each call, and a peer that trickles has many of them; telling it anew each time costs as much as one.
        """
        left = self.at - time.monotonic()
        if left < _SHORTEST_SECONDS:  # of zero microseconds the kernel makes for ever
            raise BlockingIOError("the time is up")
        if left <= 0.9 * self._limits.get(option, math.inf):
            _limit(self._connection, option, left)
            self._limits[option] = left


def send(connection: socket.socket, pieces: Sequence[bytes | memoryview], deadline: Deadline | None = None) -> None:
    """Sends all of these bytes. Raises OSError, `BlockingIOError` when the deadline has passed."""
    left = [memoryview(piece) for piece in pieces]
    while left:
        if deadline is not None:
            deadline.limit(socket.SO_SNDTIMEO)
        sent = connection.sendmsg(left[:_MOST_PIECES])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive(connection: socket.socket, views: Sequence[memoryview], deadline: Deadline | None = None) -> None:
    """Fills all of these views. Otherwise like `send`; raises ConnectionError where the other side has hung up."""
    left = list(views)
    while left:
        if deadline is not None:
            deadline.limit(socket.SO_RCVTIMEO)
        received = connection.recvmsg_into(left[:_MOST_PIECES], 0, socket.MSG_WAITALL)[0]
        if not received:
            raise ConnectionResetError("the other side has hung up")
        while left and received >= left[0].nbytes:
            received -= left.pop(0).nbytes
        if received:
            left[0] = left[0][received:]


def _limit(connection: socket.socket, option: int, seconds: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")
"""All there can be: a slice of it is had in a fraction of the time that an array of ctypes takes."""
_SHORTEST_SECONDS = 1e-5
_MOST_PIECES = 512
"""The kernel takes 1024 at once (IOV_MAX)."""
