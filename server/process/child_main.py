"""The child's side of a process that serves the server (`child` is the other): its end with its parent, and messages.

A message is a header, which is JSON, and bytes that follow it. Imports nothing of the server, so that a child is up at once.
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["MAX_MESSAGE_BYTES", "SIZES_BYTES", "Channel", "connect", "pack", "read_sizes", "unpack"]

MAX_MESSAGE_BYTES: Final = 64 << 20
_SIZES: Final = struct.Struct("<II")  # of the header, of what follows it
SIZES_BYTES: Final = _SIZES.size
_PR_SET_PDEATHSIG: Final = 1


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Returns a message as it travels."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return _SIZES.pack(len(text), len(payload)) + text + payload


def read_sizes(data: bytes) -> tuple[int, int]:
    """Returns the sizes of header and payload from the first SIZES_BYTES of a message. Raises ValueError for nonsense."""
    header, payload = _SIZES.unpack(data)
    if header + payload > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {header + payload} bytes")
    return header, payload


def unpack(body: bytes, header_bytes: int) -> tuple[dict[str, Any], bytes]:
    """Returns header and payload of what follows the sizes. Raises ValueError for nonsense."""
    header = json.loads(body[:header_bytes])
    if not isinstance(header, dict):
        raise ValueError("a header is an object")  # noqa: TRY004 - for whoever reads, all nonsense is one
    return header, body[header_bytes:]


class Channel:
    """Messages to and from the parent. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a message; waits while the parent is behind. Raises OSError where the parent is gone."""
        with self._sending:
            self._connection.sendall(pack(header, payload))

    def __iter__(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields messages until the parent hangs up."""
        while sizes := self._receive(SIZES_BYTES):
            header_bytes, payload_bytes = read_sizes(sizes)
            yield unpack(self._receive(header_bytes + payload_bytes), header_bytes)

    def _receive(self, nbytes: int) -> bytes:
        """Returns so many bytes; none where the parent is gone."""
        data = bytearray(nbytes)
        view, filled = memoryview(data), 0
        while filled < nbytes:
            try:
                got = self._connection.recv_into(view[filled:])
            except ConnectionError:
                got = 0
            if not got:
                return b""
            filled += got
        return bytes(data)


def connect(fd: int) -> Channel:
    """Takes over the socket that `Child` handed down. From here on the process dies with its parent."""
    # The parent may have died before this line: then the socket is at its end, and the loop over its messages as well.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # may reach the whole group; the parent decides, when it has drained
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return Channel(socket.socket(fileno=fd))
