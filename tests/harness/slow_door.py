"""A way to a server that takes its time to let anybody in, as on a host that is busy or far away."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["slow_door"]


class _Passage(socketserver.BaseRequestHandler):
    """One connection: kept waiting, then passed on."""

    server: _Door
    request: socket.socket

    def handle(self) -> None:
        time.sleep(self.server.seconds)
        with socket.socket(socket.AF_UNIX) as inner:
            inner.connect(str(self.server.path))
            back = threading.Thread(target=_pass_on, args=(inner, self.request))
            back.start()
            _pass_on(self.request, inner)
            back.join()


class _Door(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(("127.0.0.1", 0), _Passage)
        self.path, self.seconds = path, seconds


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slow_door(path: Path, seconds: float) -> Iterator[str]:
    """Leads from a port of the loopback to a Unix socket, for everybody so many seconds later; yields its address."""
    with _Door(path, seconds) as door:
        serving = threading.Thread(target=door.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield "{}:{}".format(*door.server_address)
        finally:
            door.shutdown()
            serving.join()
