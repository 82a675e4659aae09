"""Places of accepted connections for streams: which connection gives way to another one.

Each connection has a thread, so their number is limited. If all places are taken, a connection of
the tenant with most connections gives way. So a tenant cannot keep others out: not with idle
connections, and not with streams that it does not continue.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..refused import Refused

__all__ = ["ConnectionPlaces", "Place"]

_MAX_CONNECTIONS = 128


class Place:
    """Place of one connection."""

    def __init__(self, tenant: str, end: Callable[[], object]) -> None:
        self.tenant = tenant
        self.end = end
        """Ends the connection. Any thread may call it."""


class _Places:
    """Places of one tenant. The longest idle connection, and the oldest stream, are first."""

    def __init__(self) -> None:
        self.idle: dict[Place, None] = {}
        self.busy: dict[Place, None] = {}

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class ConnectionPlaces:
    """Places of all tenants. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, _Places] = {}

    def take(self, tenant: str, end: Callable[[], object]) -> Place:
        """Takes a place, if necessary that of another connection. Raises `Refused` without one."""
        place = Place(tenant, end)
        with self._lock:
            other = None
            if sum(map(len, self._tenants.values())) >= _MAX_CONNECTIONS:
                other = self._giving_way(tenant)
                if other is None:
                    raise Refused("LIMIT_EXCEEDED", "all connections for streams are in use")
                self._remove(other)
            self._tenants.setdefault(tenant, _Places()).busy[place] = None
        if other is not None:
            other.end()
        return place

    def leave(self, place: Place) -> None:
        with self._lock:
            self._remove(place)

    @contextlib.contextmanager
    def idling(self, place: Place) -> Iterator[None]:
        """Marks a connection as idle, so that it gives way before connections with a stream."""
        self._move(place, idle=True)
        try:
            yield
        finally:
            self._move(place, idle=False)

    def _giving_way(self, tenant: str) -> Place | None:
        """Returns the connection that gives way to a new one of a tenant; None if none does.

        A stream gives way only to a tenant that still has fewer connections afterwards.
        """
        own = self._tenants.get(tenant, _Places())
        most = max(self._tenants.values(), key=len)
        if len(most) > len(own):
            if most.idle:
                return next(iter(most.idle))
            if len(most) > len(own) + 1:
                return next(iter(most.busy))
        return next(iter(own.idle), None)

    def _move(self, place: Place, *, idle: bool) -> None:
        with self._lock:
            places = self._tenants.get(place.tenant)
            if places is None or (place not in places.idle and place not in places.busy):
                return  # the connection has given way, and is about to end
            for each, belongs in ((places.idle, idle), (places.busy, not idle)):
                if belongs:
                    each[place] = None
                else:
                    each.pop(place, None)

    def _remove(self, place: Place) -> None:
        places = self._tenants.get(place.tenant)
        if places is not None:
            places.idle.pop(place, None)
            places.busy.pop(place, None)
            if not len(places):
                del self._tenants[place.tenant]
