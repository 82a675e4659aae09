"""An HTTP server on threads that lets nobody have one for long: slow requests end, and one too many ends the oldest."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

__all__ = ["PatientServer"]

_CONNECTION_SECONDS = 30.0
"""A connection's whole life: a scrape takes less, and the next one connects again."""
_MAX_CONNECTIONS = 64


class PatientServer(ThreadingHTTPServer):
    """Ends each connection after 30 s, however busy or slow it is, and has 64 of them at the most.

    One more ends the oldest: idle ones would keep out a probe of the health otherwise, and with it the server.
    """

    _lives: dict[socket.socket, float]
    _lock: threading.Lock

    def server_activate(self) -> None:
        """Begins to listen."""
        self._lives, self._lock = {}, threading.Lock()
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection on a thread of its own."""
        oldest = None
        with self._lock:
            if len(self._lives) >= _MAX_CONNECTIONS:
                oldest = next(iter(self._lives))
                del self._lives[oldest]
            self._lives[request] = time.monotonic() + _CONNECTION_SECONDS
        if oldest is not None:
            _hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection, and forgets it."""
        with self._lock:
            self._lives.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called between two requests, several times in a second: ends what has lasted too long."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, end in self._lives.items() if end <= now]
        for request in late:
            _hang_up(request)


def _hang_up(request: socket.socket) -> None:
    """Has a connection's thread wake up from whatever it waits for, and close it."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
