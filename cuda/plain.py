"""Memory into and out of sockets without a copy in between. The GIL is free while bytes move."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

import xxhash

__all__ = ["checksum", "limit_waits", "receive", "send", "views_of"]


def views_of(addresses: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """Returns views of memory that the caller keeps mapped as long as they are used."""
    return [
        memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        for address, size in zip(addresses, sizes, strict=True)
    ]


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
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def send(connection: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """Sends all of these bytes. Raises OSError."""
    left = [memoryview(piece) for piece in pieces]
    while left:
        sent = connection.sendmsg(left[:_MOST_PIECES])
        while left and sent >= left[0].nbytes:
            sent -= left.pop(0).nbytes
        if sent:
            left[0] = left[0][sent:]


def receive(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fills all of these views. Raises OSError, and ConnectionError where the other side has hung up."""
    left = list(views)
    while left:
        received = connection.recvmsg_into(left[:_MOST_PIECES], 0, socket.MSG_WAITALL)[0]
        if not received:
            raise ConnectionResetError("the other side has hung up")
        while left and received >= left[0].nbytes:
            received -= left.pop(0).nbytes
        if received:
            left[0] = left[0][received:]


_MOST_PIECES = 512
"""The kernel takes 1024 at once (IOV_MAX)."""
