"""Limit of connections that the server has not accepted yet, in all and per address.

Each of these connections may hold memory of the server before its client has proved its identity:
at most 64 KiB of received bytes, and the buffers of a TLS handshake.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

__all__ = ["NewConnections"]

_MAX_CONNECTIONS = 64
_MAX_PER_ADDRESS = 32


class NewConnections:
    """Number of connections without an accepted hello. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_address: Counter[str] = Counter()

    @contextlib.contextmanager
    def counting(self, address: str) -> Iterator[None]:
        """Counts a connection until its hello is accepted. Raises ConnectionError at the limit."""
        with self._lock:
            if self._by_address.total() >= _MAX_CONNECTIONS or self._by_address[address] >= _MAX_PER_ADDRESS:
                raise ConnectionError("too many connections without an accepted hello")
            self._by_address[address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._by_address[address] -= 1
                if not self._by_address[address]:
                    del self._by_address[address]
