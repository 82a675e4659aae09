"""What the core knows of a secondary tier: which blocks are there, and which go next."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice

from .base import Entry, NamespaceId
from .history import MissReason
from .policies import EvictionPolicy

__all__ = ["Catalog", "CatalogEntry", "EntryState"]


RUN = 16
"""So many blocks, in the order in which a tier stored them, are taken for a piece of a chain after a restart."""

AHEAD = 256
"""So many victims are looked for at a time."""


class EntryState(enum.Enum):
    """How far a block has come in a secondary tier."""

    STORING = enum.auto()
    HELD = enum.auto()
    LOST = enum.auto()
    """Out of the catalog, for the tier found it damaged; a load of it may still run."""


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

    @property
    def name(self) -> tuple[NamespaceId, bytes]:
        """What the block is known by when it has gone and comes again."""
        return self.namespace, self.key


class Catalog:
    """The blocks of one secondary tier, never more than its capacity.

    An entry exists from the moment when its store is submitted, so that the room is taken and no block is stored twice.
    """

    def __init__(
        self,
        capacity_bytes: int,
        new_policy: Callable[[], EvictionPolicy[CatalogEntry]],
        left: Callable[[NamespaceId, bytes, MissReason], None],
    ) -> None:
        """`left` is told of every block that is evicted."""
        self._left = left
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._order = new_policy()
        self._next: deque[CatalogEntry] = deque()
        """Who goes next, as long as nothing is used: a policy may put what is being stored first, to be skipped each time."""
        self._entries: dict[NamespaceId, dict[bytes, CatalogEntry]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._order)

    def recover(self, entries: Iterable[Entry]) -> list[CatalogEntry]:
        """Takes in what the tier kept from an earlier life, oldest first; returns what no longer fits."""
        recovered = deque(self._add(entry.namespace, entry.key, entry.nbytes, EntryState.HELD) for entry in entries)
        doomed = []
        while self.used_bytes > self.capacity_bytes:
            doomed.append(recovered.popleft())
            self._evict(doomed[-1:])
        while recovered:
            self._order.use([recovered.popleft() for _ in range(min(RUN, len(recovered)))])
        return doomed

    def get(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        """Returns the entry of a block, whatever its state."""
        entries = self._entries.get(namespace)
        return entries.get(key) if entries else None

    def held(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        """Returns the entry of a block that can be loaded."""
        entry = self.get(namespace, key)
        return entry if entry and entry.state is EntryState.HELD else None

    def use(self, entries: Sequence[CatalogEntry], request: Hashable) -> None:
        """Takes note that a request used these, given head first (see `EvictionPolicy.use`)."""
        self._next.clear()
        self._order.use(entries, request)

    def finish(self, request: Hashable) -> None:
        """Takes note that a request is over."""
        self._order.finish(request)

    def begin_store(self, namespace: NamespaceId, key: bytes, nbytes: int) -> list[CatalogEntry] | None:
        """Adds an entry in state STORING and returns what must be removed for it, or None if there is no room.

        Entries that are being stored or loaded are not evicted. The caller says who uses the entry (`use`).
        """
        victims = self._victims(self.used_bytes + nbytes - self.capacity_bytes)
        if victims is None:
            return None
        self._evict(victims)
        self._add(namespace, key, nbytes, EntryState.STORING)
        return victims

    def make_room(self, nbytes: int) -> list[CatalogEntry]:
        """Evicts so many bytes, as far as that can be had now; returns what must be removed."""
        return self._evict(self._victims(nbytes) or [])

    def drop(self, entry: CatalogEntry) -> None:
        """Forgets an entry."""
        del self._entries[entry.namespace][entry.key]
        self._order.remove(entry)
        self.used_bytes -= entry.nbytes

    def _add(self, namespace: NamespaceId, key: bytes, nbytes: int, state: EntryState) -> CatalogEntry:
        entry = self._entries[namespace][key] = CatalogEntry(namespace, key, nbytes, state)
        self.used_bytes += nbytes
        return entry

    def _victims(self, excess_bytes: int) -> list[CatalogEntry] | None:
        """Returns what has to go for so many bytes to become free, or None if that cannot be had now."""
        victims: list[CatalogEntry] = []
        while self._next and excess_bytes > 0:
            entry = self._next.popleft()
            if self._may_go(entry):
                victims.append(entry)
                excess_bytes -= entry.nbytes
        if excess_bytes <= 0:
            return victims
        chosen = set(victims)
        line = (entry for entry in self._order.victims() if entry not in chosen and self._may_go(entry))
        for entry in line:
            victims.append(entry)
            excess_bytes -= entry.nbytes
            if excess_bytes <= 0:
                self._next.extend(islice(line, AHEAD))
                return victims
        self._next.extend(victims)
        return None

    def _may_go(self, entry: CatalogEntry) -> bool:
        return entry.state is EntryState.HELD and not entry.loads and self.get(*entry.name) is entry

    def _evict(self, victims: list[CatalogEntry]) -> list[CatalogEntry]:
        for entry in victims:
            self.drop(entry)
            self._left(entry.namespace, entry.key, MissReason.EVICTED)
        self.evictions += len(victims)
        return victims
