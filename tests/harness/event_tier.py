"""A tier of which the log of events knows only names, for tests of the publisher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtier.tiers.core.event_log import EventLog
from kvtier.tiers.secondary_tier import NamespaceId

__all__ = ["NAMESPACE", "EventTier"]

NAMESPACE = NamespaceId(b"n" * 32)


class EventTier:
    """Blocks of one namespace, and their events."""

    def __init__(self, log: EventLog, number: int = 0) -> None:
        self.keys: dict[bytes, Any] = {}
        self._events = log.add_tier(number, self)

    def counts(self) -> Iterable[tuple[NamespaceId, int]]:
        return [(NAMESPACE, len(self.keys))] if self.keys else []

    def copy_of(self, _: NamespaceId) -> dict[bytes, Any]:
        return self.keys.copy()

    def has(self, _: NamespaceId, key: bytes) -> bool:
        return key in self.keys

    def store(self, *keys: bytes) -> None:
        for key in keys:
            self.keys[key] = True
            if self._events.is_on:
                self._events.stored(NAMESPACE, key)

    def remove(self, key: bytes) -> None:
        del self.keys[key]
        if self._events.is_on:
            self._events.removed(NAMESPACE, key)

    def clear(self) -> None:
        self.keys.clear()
        if self._events.is_on:
            self._events.cleared(NAMESPACE)
