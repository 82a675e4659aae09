"""Raw peer of a ZeroMQ socket, which can break the rules of the protocol (ZMTP 3.1)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

__all__ = ["GREETING", "RawPeer", "command", "frame", "ready", "subscription"]

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(body: bytes, *, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + body, flags=4)


def ready(socket_type: bytes) -> bytes:
    return command(b"READY", b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)


def subscription(prefix: bytes) -> bytes:
    return frame(b"\x01" + prefix)


class RawPeer:
    """One connection to an address like `127.0.0.1:5557`, or to the path of a Unix socket."""

    def __init__(self, address: str, *, receive_buffer: int | None = None) -> None:
        is_unix = address.startswith("/")
        self.socket = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        host, _, port = address.rpartition(":")
        self.socket.connect(address if is_unix else (host, int(port)))

    def shake_hands(self, socket_type: bytes) -> None:
        self.socket.sendall(GREETING + ready(socket_type))

    def has_been_closed(self) -> bool:
        """Whether the other end has closed the connection. Reads what it sent before."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def flood(self, data: bytes, times: int) -> None:
        """Sends the data until the other end closes the connection."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(times):
                self.socket.sendall(data)

    def frames(self) -> Generator[tuple[int, bytes], None, None]:
        """Yields flags and body of each frame after the greeting, until the connection ends."""
        with self.socket.makefile("rb") as file:
            file.read(len(GREETING))
            while flags := file.read(1):
                length = int.from_bytes(file.read(8 if flags[0] & 2 else 1), "big")
                yield flags[0], file.read(length)

    def close(self) -> None:
        self.socket.close()
