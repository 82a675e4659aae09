"""TCP proxy to one socket of a server, with an optional delay."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["delay_proxy"]


class _Connection(socketserver.BaseRequestHandler):
    """One connection: delayed, then forwarded."""

    server: _Port
    request: socket.socket

    def handle(self) -> None:
        time.sleep(self.server.delay)
        with self.server.connect_upstream() as inner:
            back = threading.Thread(target=_forward, args=(inner, self.request))
            back.start()
            _forward(self.request, inner)
            back.join()


class _Port(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, to: Path | str, delay: float) -> None:
        super().__init__((host, 0), _Connection)
        self._to, self.delay = to, delay

    def connect_upstream(self) -> socket.socket:
        if isinstance(self._to, str):
            host, _, port = self._to.rpartition(":")
            return socket.create_connection((host, int(port)))
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._to))
        return connection


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 20):
            target.sendall(piece)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def delay_proxy(to: Path | str, *, host: str = "127.0.0.1", delay: float = 0.0) -> Iterator[str]:
    """Runs a proxy to a Unix socket or TCP address with `delay` seconds per connection.

    Yields its address.
    """
    with _Port(host, to, delay) as port:
        serving = threading.Thread(target=port.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield "{}:{}".format(*port.server_address)
        finally:
            port.shutdown()
            serving.join()
