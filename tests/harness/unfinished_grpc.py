"""HTTP/2 connection with gRPC calls whose requests never end."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Self

__all__ = ["UnfinishedCalls"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_HEADERS, _ACK = 4, 1
_WINDOW = 65_535
_CHUNK = 16 << 10


class UnfinishedCalls:
    """Calls of one method. Each announces a request of `nbytes` and never sends its last byte."""

    def __init__(self, path: str, method: str, calls: int, nbytes: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self._buffer = b""
        self._windows = {0: _WINDOW, **{2 * number + 1: _WINDOW for number in range(calls)}}
        self._initial = _WINDOW
        self._left = {stream: nbytes + 4 for stream in self._windows if stream}
        self.sent = 0
        headers = _header_block(method)
        start = b"".join(_frame(_HEADERS, _END_HEADERS, stream, headers) for stream in self._left)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + start)
        self._prefix = struct.pack(">BI", 0, nbytes)
        self._fresh = set(self._left)

    def send_for(self, seconds: float) -> None:
        """Sends what the flow control of the server permits."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._receive()
            for stream in self._left:
                self._send(stream)

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


def _header_block(method: str) -> bytes:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/kvtier.v1.{method}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
