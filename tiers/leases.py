"""Leases: the pins that clients hold, each with an owner and an expiry.

A `Lease` pins blocks for reading; a `Store` pins blocks, and slots, for writing. Both belong to an engine, fall with
the session that they were granted to, and end once.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from .blocks import Block
from .commands import LeaseId, StoreId
from .errors import InvalidItem, LeaseNotFound, NotOwner, NotReady, StoreNotFound

if TYPE_CHECKING:
    from .requests import Request

__all__ = ["KeyStatus", "Lease", "LeaseTable", "Owner", "Store", "StoreTable"]

K = TypeVar("K")


class KeyStatus(enum.IntEnum):
    """What a lookup says of one key. Numbers as in `kvtier.v1.KeyStatus`."""

    HIT = 1
    MISS = 2
    HIT_PENDING = 3
    RETRY = 4


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lease: a session of an engine, on behalf of a request (or none)."""

    engine_id: str
    session_id: bytes
    request_id: str


@dataclass(slots=True, eq=False)
class Lease:
    """A pin on what a lookup found.

    Attributes:
        items: per looked-up key the pinned block, or None for a miss; misses at the end are left out.
        keys: number of keys that were looked up.
        sources: per key the index of the tier where it was found; meaningless for misses.
        pending: items whose block is not ready yet.
    """

    id: LeaseId
    owner: Owner
    expires_at: float
    items: list[Block | None]
    keys: int
    sources: bytes
    pending: int = 0

    def statuses(self) -> bytes:
        """Returns a `KeyStatus` per looked-up key."""
        hit, miss, pending = KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT_PENDING
        if not self.pending and None not in self.items:
            known = bytes([hit]) * len(self.items)
        else:
            known = bytes(miss if block is None else hit if block.ready else pending for block in self.items)
        return known + bytes([miss]) * (self.keys - len(known))

    def slots(self, items: Iterable[int], rank: int) -> list[int]:
        """Returns the slots of one rank's parts of some items.

        Raises:
            InvalidItem: there is no such item.
            NotReady: an item is a miss, or not ready yet.
        """
        offsets = []
        for item in items:
            if item >= self.keys:
                raise InvalidItem(f"the lease has {self.keys} items, there is no item {item}")
            block = self.items[item] if item < len(self.items) else None
            offset = block.slots[rank] if block is not None and block.ready else None
            if offset is None:
                raise NotReady(f"item {item} of the lease is not a hit")
            offsets.append(offset)
        return offsets


class LeaseTable:
    """The leases that are held, by id, and who waits for which block."""

    def __init__(self, unpin: Callable[[Block], None], first_id: int = 1) -> None:
        self._unpin = unpin
        self._leases: dict[LeaseId, Lease] = {}
        self._waiting: dict[Block, list[Lease]] = defaultdict(list)
        self._by_session: dict[bytes, dict[Lease, None]] = defaultdict(dict)
        self._by_request: dict[tuple[str, str], dict[Lease, None]] = defaultdict(dict)
        self._items: dict[bytes, int] = defaultdict(int)
        self._next_id = first_id

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, owner: Owner, expires_at: float, items: list[Block | None], sources: bytes, *, keys: int) -> Lease:
        """Grants a lease on blocks that are pinned already; the pins are the lease's from now on."""
        lease = Lease(LeaseId(self._next_id), owner, expires_at, items, keys, sources)
        self._next_id += 1
        for block in items:
            if block is not None and not block.ready:
                lease.pending += 1
                self._waiting[block].append(lease)
        self._leases[lease.id] = lease
        self._by_session[owner.session_id][lease] = None
        self._by_request[owner.engine_id, owner.request_id][lease] = None
        self._items[owner.session_id] += len(items)
        return lease

    def get(self, lease_id: LeaseId, engine_id: str) -> Lease:
        """Returns a lease of this engine.

        Raises:
            LeaseNotFound: it ended, or never was.
            NotOwner: it belongs to another engine.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFound(f"there is no lease {lease_id}: it was released, expired or fell with its session")
        if lease.owner.engine_id != engine_id:
            raise NotOwner(f"lease {lease_id} belongs to another engine")
        return lease

    def release(self, lease: Lease) -> None:
        """Ends a lease: its pins fall."""
        del self._leases[lease.id]
        owner = lease.owner
        self._items[owner.session_id] -= len(lease.items)
        _discard(self._by_request, (owner.engine_id, owner.request_id), lease)
        if _discard(self._by_session, owner.session_id, lease):
            del self._items[owner.session_id]
        if lease.pending:
            self._stop_waiting(lease)
        for block in lease.items:
            if block is not None:
                self._unpin(block)

    def _stop_waiting(self, lease: Lease) -> None:
        for block in lease.items:
            waiting = self._waiting.get(block) if block is not None else None
            if block is None or waiting is None:
                continue
            waiting[:] = [other for other in waiting if other is not lease]
            if not waiting:
                del self._waiting[block]

    def settle(self, block: Block) -> list[LeaseId]:
        """Takes note that a block is not pending any more; returns the leases that have nothing pending left.

        If the block did not become ready it is a miss for those who waited.
        """
        settled = []
        for lease in self._waiting.pop(block, ()):
            lease.pending -= 1
            if not block.ready:
                lease.items[lease.items.index(block)] = None
                self._unpin(block)
            if not lease.pending:
                settled.append(lease.id)
        return settled

    def of_session(self, session_id: bytes) -> list[Lease]:
        """Returns the leases of a session."""
        return list(self._by_session.get(session_id, ()))

    def of_request(self, engine_id: str, request_id: str) -> list[Lease]:
        """Returns the leases of a request."""
        return list(self._by_request.get((engine_id, request_id), ()))

    def items_of(self, session_id: bytes) -> int:
        """Returns how many items the leases of a session add up to."""
        return self._items.get(session_id, 0)

    def expired(self, now: float) -> list[Lease]:
        """Returns the leases whose time is over."""
        return [lease for lease in self._leases.values() if lease.expires_at <= now]


def _discard(index: dict[K, dict[Lease, None]], key: K, lease: Lease) -> bool:
    """Takes a lease out of an index; returns whether it was the last one under its key."""
    leases = index[key]
    del leases[lease]
    if not leases:
        del index[key]
    return not leases


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

    def slots(self) -> list[int]:
        """Returns the granted slots, in the order of the blocks."""
        return [offset for block in self.blocks if (offset := block.slots[self.rank]) is not None]


@dataclass(slots=True)
class _Quarantine:
    """Slots of a store that ended while somebody might still write to them."""

    offsets: list[int]
    nbytes: int
    engine_id: str
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
        self, owner: Owner, rank: int, expires_at: float, blocks: Sequence[Block], request: Request | None = None
    ) -> Store:
        """Registers a store of blocks that are pinned and have a slot for the rank."""
        store = Store(StoreId(self.next_id), owner, rank, expires_at, blocks, request)
        self.next_id += 1
        self._stores[store.id] = store
        return store

    def get(self, store_id: StoreId, engine_id: str) -> Store:
        """Returns a store of this engine.

        Raises:
            StoreNotFound: it ended, or never was.
            NotOwner: it belongs to another engine.
        """
        store = self._stores.get(store_id)
        if store is None:
            raise StoreNotFound(f"there is no store {store_id}: it was completed, expired or fell with its session")
        if store.owner.engine_id != engine_id:
            raise NotOwner(f"store {store_id} belongs to another engine")
        return store

    def end(self, store: Store) -> None:
        """Forgets a store; its pins and slots are the caller's from now on."""
        del self._stores[store.id]

    def quarantine(self, store: Store, offsets: list[int], nbytes: int, writers: set[int]) -> None:
        """Keeps slots of an ended store out of use until all of these writers are gone."""
        self._quarantine[store.id] = _Quarantine(offsets, nbytes, store.owner.engine_id, set(writers))
        self._lift_if_free(store.id)

    def writer_gone(self, writer: int) -> None:
        """Takes note that a connection has ended."""
        for store_id, entry in list(self._quarantine.items()):
            entry.writers.discard(writer)
            self._lift_if_free(store_id)

    def writer_done(self, store_id: StoreId, engine_id: str) -> None:
        """Takes note of a completion that came too late: at least, nobody writes any more."""
        entry = self._quarantine.get(store_id)
        if entry is not None and entry.engine_id == engine_id:
            entry.writers.clear()
            self._lift_if_free(store_id)

    def owned_by(self, session_id: bytes) -> list[Store]:
        """Returns the stores of a session."""
        return [store for store in self._stores.values() if store.owner.session_id == session_id]

    def expired(self, now: float) -> list[Store]:
        """Returns the stores whose time is over."""
        return [store for store in self._stores.values() if store.expires_at <= now]

    def _lift_if_free(self, store_id: StoreId) -> None:
        if not self._quarantine[store_id].writers:
            self.release_slots(self._quarantine.pop(store_id).offsets)
