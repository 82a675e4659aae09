"""HTTP/2 connection with gRPC calls whose requests never end."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Self

__all__ = ["UnfinishedCalls"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_HEADERS, _END_STREAM, _ACK = 4, 1, 1
_WINDOW = 65_535
_CHUNK = 16 << 10


class UnfinishedCalls:
    """Calls of one method. Each announces a request of `nbytes` and never sends its last byte."""

    def __init__(
        self,
        address: str | tuple[str, int],
        method: str,
        calls: int,
        nbytes: int,
        *,
        context: ssl.SSLContext | None = None,
        headers: Sequence[Sequence[tuple[str, str]]] = ((),),
    ) -> None:
        """`headers`: further headers of each call; the entries are repeated."""
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.connect(address)
        else:
            self.socket = socket.create_connection(address, 60)
            if context is not None:
                self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.ended: set[int] = set()
        """Streams that the server has answered or reset."""
        self._buffer = b""
        self._windows = {0: _WINDOW, **{2 * number + 1: _WINDOW for number in range(calls)}}
        self._initial = _WINDOW
        self._left = {stream: nbytes + 4 for stream in self._windows if stream}
        self.sent = 0
        start = b"".join(
            _frame(_HEADERS, _END_HEADERS, stream, _header_block(method, headers[number % len(headers)]))
            for number, stream in enumerate(self._left)
        )
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + start)
        self._prefix = struct.pack(">BI", 0, nbytes)
        self._fresh = set(self._left)

    def send_for(self, seconds: float) -> None:
        """Sends what the flow control of the server permits."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._receive()
            for stream in self._left:
                if stream not in self.ended:
                    self._send(stream)

    def receive_until(self, calls: int, seconds: float = 60.0) -> bool:
        """Waits until the server has ended this many calls; returns whether it has."""
        deadline = time.monotonic() + seconds
        while len(self.ended) < calls and time.monotonic() < deadline:
            self._receive()
        return len(self.ended) >= calls

    def _send(self, stream: int) -> None:
        room = min(self._windows[0], self._windows[stream], self._left[stream], _CHUNK)
        if room < (len(self._prefix) if stream in self._fresh else 1):
            return
        payload = self._prefix.ljust(room, b"\0") if stream in self._fresh else bytes(room)
        self._fresh.discard(stream)
        for window in (0, stream):
            self._windows[window] -= room
        self._left[stream] -= room
        self.sent += room
        self.socket.settimeout(10)
        self.socket.sendall(_frame(_DATA, 0, stream, payload))

    def _receive(self) -> None:
        self.socket.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            self._buffer += self.socket.recv(1 << 16)
        while len(self._buffer) >= 9 and len(self._buffer) >= 9 + int.from_bytes(self._buffer[:3], "big"):
            length, kind, flags = int.from_bytes(self._buffer[:3], "big"), self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big")
            payload, self._buffer = self._buffer[9 : 9 + length], self._buffer[9 + length :]
            if kind == _SETTINGS and not flags & _ACK:
                self._apply(payload)
                self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                self.socket.sendall(_frame(_PING, _ACK, 0, payload))
            elif kind == _RST_STREAM or (kind in {_HEADERS, _DATA} and flags & _END_STREAM):
                self.ended.add(stream)
            elif kind == _WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(payload, "big")

    def _apply(self, settings: bytes) -> None:
        for place in range(0, len(settings), 6):
            name, value = struct.unpack_from(">HI", settings, place)
            if name == 4:  # INITIAL_WINDOW_SIZE
                change, self._initial = value - self._initial, value
                for stream in self._left:
                    self._windows[stream] += change

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _header_block(method: str, more: Sequence[tuple[str, str]]) -> bytes:
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method if method.startswith("/") else f"/kvtier.v1.{method}"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *more,
    ]
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in headers
    )
