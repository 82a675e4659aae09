"""Stand-in for a Mooncake master with one node, in this process: values in memory.

Clients are processes that import `fake_mooncake/mooncake` in place of Mooncake's package. The
stand-in keeps the old value at a put of an existing key and reports success, as Mooncake does.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.ports import ReservedPort

__all__ = ["PACKAGE", "MooncakeMaster"]

PACKAGE = Path(__file__).parent / "fake_mooncake"
"""Folder for the path of Python."""
NO_AVAILABLE_HANDLE, OBJECT_NOT_FOUND = -200, -704


class MooncakeMaster:
    """`start` may be called again after `kill`, which forgets all values."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.capacity_bytes = 1 << 30
        self.answers = threading.Event()
        """Cleared while the master hangs."""
        self.answers.set()
        self._port = ReservedPort()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._open: set[socket.socket] = set()
        self._changing = threading.Lock()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port.number}"

    def start(self) -> None:
        self._listener = listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port.number))
        listener.listen()
        self._thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Closes all connections and forgets all values. May be repeated."""
        if self._listener is None or self._thread is None:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._listener = None
        with self._changing:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.values.clear()

    def end(self) -> None:
        self.answers.set()
        self.kill()
        self._port.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # killed
                return
            with self._changing:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), Connection(socket.dup(accepted.fileno())) as connection:
            while True:
                call, keys, values = connection.recv()
                self.answers.wait()
                with self._changing:
                    answer = self._answer(call, keys, values)
                connection.send(answer)
        with self._changing:
            self._open.discard(accepted)
        accepted.close()

    def _answer(self, call: str, keys: list[str], values: list[bytes]) -> list[Any]:
        match call:
            case "exist":
                return [int(key in self.values) for key in keys]
            case "size":
                return [len(self.values[key]) if key in self.values else OBJECT_NOT_FOUND for key in keys]
            case "remove":
                return [0 if self.values.pop(key, None) is not None else OBJECT_NOT_FOUND for key in keys]
            case "get":
                return [self.values.get(key) for key in keys]
        return list(map(self._put, keys, values))

    def _put(self, key: str, value: bytes) -> int:
        if key not in self.values:
            if sum(map(len, self.values.values())) + len(value) > self.capacity_bytes:
                return NO_AVAILABLE_HANDLE
            self.values[key] = value
        return 0
