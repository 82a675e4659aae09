"""Limit of connections that the server has not accepted yet, in all and per address.

Each of these connections may hold memory of the server before its client has proved its identity:
at most 64 KiB of received bytes, and the buffers of a TLS handshake.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ...protos.endpoint import network_of

__all__ = ["NewConnections"]

_MAX_CONNECTIONS = 64
_MAX_PER_ADDRESS = 32


class NewConnections:
    """Connections without an accepted hello. Thread-safe.

    At the limit the server ends the oldest connection of an address: of the new connection's own
    address, or of the address that has most. So silent clients cannot keep others out, because a
    client that says hello needs only milliseconds.
    """

    def __init__(self, most: int = _MAX_CONNECTIONS, per_address: int = _MAX_PER_ADDRESS) -> None:
        self._most, self._per_address = most, per_address
        self._lock = threading.Lock()
        self._by_address: dict[str, dict[object, Callable[[], object]]] = {}
        """Functions that end the connections of each address, the oldest first."""

    @contextlib.contextmanager
    def counting(self, address: str, end: Callable[[], object]) -> Iterator[None]:
        """Counts a connection until its hello is accepted. Any thread may call `end`."""
        key, address = object(), network_of(address)
        with self._lock:
            endings = self._make_room(address)
            self._by_address.setdefault(address, {})[key] = end
        for end_other in endings:
            end_other()
        try:
            yield
        finally:
            with self._lock:
                self._remove(address, key)

    def _make_room(self, address: str) -> list[Callable[[], object]]:
        """Removes the connection that gives way, if there is one; returns its `end`."""
        if len(self._by_address.get(address, ())) >= self._per_address:
            fullest = address
        elif sum(map(len, self._by_address.values())) >= self._most:
            fullest = max(self._by_address, key=lambda each: len(self._by_address[each]))
        else:
            return []
        oldest = next(iter(self._by_address[fullest]))
        return [self._remove(fullest, oldest)]

    def _remove(self, address: str, key: object) -> Callable[[], object]:
        connections = self._by_address.get(address, {})
        end = connections.pop(key, lambda: None)
        if not connections:
            self._by_address.pop(address, None)
        return end
