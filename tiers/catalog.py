"""What the core knows of a secondary tier: which blocks are there, and which go next."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable

from .base import Entry, NamespaceId
from .policies import EvictionPolicy

__all__ = ["Catalog", "CatalogEntry", "EntryState"]


class EntryState(enum.Enum):
    """How far a block has come in a secondary tier."""

    STORING = enum.auto()
    HELD = enum.auto()


class CatalogEntry:
    """One block that a secondary tier holds, or is about to hold."""

    __slots__ = ("key", "loads", "namespace", "nbytes", "state")

    def __init__(self, namespace: NamespaceId, key: bytes, nbytes: int, state: EntryState) -> None:
        self.namespace = namespace
        self.key = key
        self.nbytes = nbytes
        self.state = state
        self.loads = 0
        """Loads that run; an entry that is being loaded is not evicted."""


class Catalog:
    """The blocks of one secondary tier, never more than its capacity.

    An entry exists from the moment when its store is submitted, so that the room is taken and no block is stored twice.
    """

    def __init__(self, capacity_bytes: int, new_policy: Callable[[], EvictionPolicy[CatalogEntry]]) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._order = new_policy()
        self._entries: dict[NamespaceId, dict[bytes, CatalogEntry]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._order)

    def recover(self, entries: Iterable[Entry]) -> list[CatalogEntry]:
        """Takes in what the tier kept from an earlier life, oldest first; returns what no longer fits."""
        for entry in entries:
            self._add(CatalogEntry(entry.namespace, entry.key, entry.nbytes, EntryState.HELD))
        return self._evict(self._victims(self.used_bytes - self.capacity_bytes) or [])

    def get(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        """Returns the entry of a block, whatever its state."""
        entries = self._entries.get(namespace)
        return entries.get(key) if entries else None

    def held(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        """Returns the entry of a block that can be loaded."""
        entry = self.get(namespace, key)
        return entry if entry and entry.state is EntryState.HELD else None

    def touch(self, entries: Iterable[CatalogEntry]) -> None:
        """Takes note that these were used, given head first; the head stays the longest."""
        for entry in reversed(list(entries)):
            self._order.touch(entry)

    def begin_store(self, namespace: NamespaceId, key: bytes, nbytes: int) -> list[CatalogEntry] | None:
        """Adds an entry in state STORING and returns what must be removed for it, or None if there is no room.

        Entries that are being stored or loaded are not evicted.
        """
        victims = self._victims(self.used_bytes + nbytes - self.capacity_bytes)
        if victims is None:
            return None
        self._evict(victims)
        self._add(CatalogEntry(namespace, key, nbytes, EntryState.STORING))
        return victims

    def make_room(self, nbytes: int) -> list[CatalogEntry]:
        """Evicts so many bytes, as far as that can be had now; returns what must be removed."""
        return self._evict(self._victims(nbytes) or [])

    def drop(self, entry: CatalogEntry) -> None:
        """Forgets an entry."""
        del self._entries[entry.namespace][entry.key]
        self._order.remove(entry)
        self.used_bytes -= entry.nbytes

    def _add(self, entry: CatalogEntry) -> None:
        self._entries[entry.namespace][entry.key] = entry
        self._order.insert(entry)
        self.used_bytes += entry.nbytes

    def _victims(self, excess_bytes: int) -> list[CatalogEntry] | None:
        """Returns what has to go for so many bytes to become free, or None if that cannot be had now."""
        victims: list[CatalogEntry] = []
        if excess_bytes <= 0:
            return victims
        for entry in self._order.victims():
            if entry.state is EntryState.HELD and not entry.loads:
                victims.append(entry)
                excess_bytes -= entry.nbytes
                if excess_bytes <= 0:
                    return victims
        return None

    def _evict(self, victims: list[CatalogEntry]) -> list[CatalogEntry]:
        for entry in victims:
            self.drop(entry)
        self.evictions += len(victims)
        return victims
