"""Stores in flight: the slots that clients may write to, and those that somebody might still write to.

A `Store` pins blocks, and slots, for one rank's writing. Like a lease it belongs to an engine, falls with the session that
it was granted to, and ends once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import NotOwner, StoreNotFound
from ..types import EngineKey
from .block import Block
from .commands import StoreId
from .leases import Owner

if TYPE_CHECKING:
    from .requests import Request

__all__ = ["Store", "StoreTable"]


@dataclass(slots=True, eq=False)
class Store:
    """A write in flight: pinned blocks with a granted slot each, all for one rank."""

    id: StoreId
    owner: Owner
    rank: int
    expires_at: float
    blocks: Sequence[Block]
    request: Request | None = None
    """The request on whose behalf it is; None for one that was never begun."""
    begun_at: float = 0.0
    """In the core's seconds."""

    def slots(self) -> list[int]:
        """Returns the granted slots, in the order of the blocks."""
        return [offset for block in self.blocks if (offset := block.slots[self.rank]) is not None]


@dataclass(slots=True)
class _Quarantine:
    """Slots of a store that ended while somebody might still write to them."""

    offsets: list[int]
    nbytes: int
    engine: EngineKey
    writers: set[int]


@dataclass(slots=True)
class StoreTable:
    """The stores in flight, and the slots of those that ended before their writers did.

    A writer is a connection that keeps the region mapped (`Region` in the wire contract). A slot is given
    away again only when nobody can still write to it: when its store was completed, or when every writer that its
    session had is gone.
    """

    release_slots: Callable[[Iterable[int]], None]
    next_id: int = 1
    _stores: dict[StoreId, Store] = field(default_factory=dict)
    _quarantine: dict[StoreId, _Quarantine] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots that are out of use because of a writer that may still be there."""
        return sum(entry.nbytes for entry in self._quarantine.values())

    def begin(
        self,
        owner: Owner,
        rank: int,
        expires_at: float,
        blocks: Sequence[Block],
        request: Request | None = None,
        *,
        now: float = 0.0,
    ) -> Store:
        """Registers a store of blocks that are pinned and have a slot for the rank."""
        store = Store(StoreId(self.next_id), owner, rank, expires_at, blocks, request, now)
        self.next_id += 1
        self._stores[store.id] = store
        return store

    def get(self, store_id: StoreId, engine: EngineKey) -> Store:
        """Returns a store of this engine.

        Raises:
            StoreNotFound: it ended, or never was.
            NotOwner: it belongs to another engine.
        """
        store = self._stores.get(store_id)
        if store is None:
            raise StoreNotFound(f"there is no store {store_id}: it was completed, expired or fell with its session")
        if store.owner.engine != engine:
            raise NotOwner(f"store {store_id} belongs to another engine")
        return store

    def end(self, store: Store) -> None:
        """Forgets a store; its pins and slots are the caller's from now on."""
        del self._stores[store.id]

    def quarantine(self, store: Store, offsets: list[int], nbytes: int, writers: set[int]) -> None:
        """Keeps slots of an ended store out of use until all of these writers are gone."""
        self._quarantine[store.id] = _Quarantine(offsets, nbytes, store.owner.engine, set(writers))
        self._lift_if_free(store.id)

    def writer_gone(self, writer: int) -> None:
        """Takes note that a connection has ended."""
        for store_id, entry in list(self._quarantine.items()):
            entry.writers.discard(writer)
            self._lift_if_free(store_id)

    def writer_done(self, store_id: StoreId, engine: EngineKey) -> None:
        """Takes note of a completion that came too late: at least, nobody writes any more."""
        entry = self._quarantine.get(store_id)
        if entry is not None and entry.engine == engine:
            entry.writers.clear()
            self._lift_if_free(store_id)

    def __iter__(self) -> Iterator[Store]:
        """Iterates over all stores in flight, the oldest first."""
        return iter(self._stores.values())

    def owned_by(self, session_id: bytes) -> list[Store]:
        """Returns the stores of a session."""
        return [store for store in self._stores.values() if store.owner.session_id == session_id]

    def expired(self, now: float) -> list[Store]:
        """Returns the stores whose time is over."""
        return [store for store in self._stores.values() if store.expires_at <= now]

    def _lift_if_free(self, store_id: StoreId) -> None:
        if not self._quarantine[store_id].writers:
            self.release_slots(self._quarantine.pop(store_id).offsets)
