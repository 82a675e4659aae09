"""Stores in flight, and the quarantined slots of ended stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import InvalidItem, LimitExceeded, NotOwner, StoreNotFound
from ..types import EngineKey, EngineSession, Owner, StoreAnswer, StoreId, StoreOrigin, tenant_of
from .block import Block
from .byte_ranges import MAX_GAPS, ByteRanges
from .call_specs import StoreSpec
from .cpu_tier import CpuTier
from .pin_budget import add_to_counter
from .requests import Request
from .slot_records import session_tag

__all__ = ["STORE_SLICE", "InFlightStores", "Preparation", "Store"]

STORE_SLICE = 256
"""Keys per slice of a store: 2 to 3 µs per key at its begin, and 4 to 6 µs at its end."""

MAX_STORES = 16_384
"""Limit of the stores of a tenant in flight or in quarantine. Each tick examines all of them."""


@dataclass(slots=True, eq=False)
class Store:
    """A store in flight: pinned blocks, each with a granted slot of one rank."""

    id: StoreId
    owner: Owner
    rank: int
    expires_at: float
    blocks: list[Block]
    request: Request | None = None
    """None if the client has not begun the request."""
    begun_at: float = 0.0
    """In seconds of the core's clock."""
    number: int = 0
    """Number of stores that had begun before this one."""
    others: list[Block] = field(default_factory=list)
    """Pinned blocks of earlier slices of the preparation that need no slot. They count as held."""
    failed: Collection[int] | None = None
    """Positions of the blocks not written; None until the client completes the store."""
    completed: int = 0
    """Number of blocks that the completion has already removed from `blocks`."""
    user: Hashable = None
    """The request, for eviction policies. A store in slices counts as one use of its blocks."""
    received: ByteRanges = field(default_factory=ByteRanges)
    """Positions, in the sequence of parts, of the bytes that the server itself has written."""
    is_streamed: bool = False
    """Whether a stream may have written to the slots. Then the server must have received all bytes,
    even if the client maps the region."""
    unreceived: list[int] | None = None
    """Positions of the blocks that the completion has failed, because the server lacks bytes of
    them; None if the bytes may come through a mapping of the region."""
    writers: frozenset[int] = frozenset()
    """Connections that could write to the slots when the store was closed. Those that have ended
    are removed before the quarantine begins."""
    _completed_bytes: int = 0

    @property
    def origin(self) -> StoreOrigin:
        return StoreOrigin(self.owner.engine[1], self.begun_at)

    def receive(self, start: int, end: int) -> bool:
        """Records bytes that the server has written. Returns False if there are too many gaps."""
        self.received.most = len(self.blocks) + MAX_GAPS
        return self.received.add(start, end)

    def missing_of(self, blocks: Sequence[Block]) -> Collection[int]:
        """Returns the positions of the not written ones of the next blocks of the completion."""
        failed = self.failed or frozenset()
        if self.unreceived is None:
            return failed
        missing, end = set(), self._completed_bytes
        for number, block in enumerate(blocks, start=self.completed):
            start, end = end, end + block.part_bytes
            if number in failed:
                missing.add(number)
            elif not self.received.covers(start, end):
                missing.add(number)
                self.unreceived.append(number)
        self._completed_bytes = end
        return missing

    def slots(self, blocks: Sequence[Block] | None = None) -> list[int]:
        """Returns the slots of these blocks of the store; None: of all."""
        blocks = self.blocks if blocks is None else blocks
        return [offset for block in blocks if (offset := block.slots[self.rank]) is not None]


@dataclass(slots=True, eq=False)
class Preparation:
    """The begin of a store. Between two slices the store owns the pins of all blocks.

    Attributes:
        store: the store; None until the first slice, and if no block needs a slot.
    """

    session: EngineSession
    owner: Owner
    keys: Sequence[bytes]
    spec: StoreSpec
    retain_until: float
    slice_keys: int = STORE_SLICE
    store: Store | None = None
    statuses: bytearray = field(default_factory=bytearray)
    slots: list[int] = field(default_factory=list)
    not_retained: int = 0

    def answer(self) -> StoreAnswer:
        store_id = self.store.id if self.store is not None else None
        return StoreAnswer(store_id, bytes(self.statuses), self.slots, self.not_retained)


@dataclass(slots=True)
class _Quarantine:
    """Slots of an ended store, to which the client may still write."""

    offsets: list[int]
    nbytes: int
    engine: EngineKey
    writers: set[int]
    grant: tuple[bytes, int]


@dataclass(slots=True)
class InFlightStores:
    """The stores in flight, and the quarantined slots of ended stores.

    A writer is a connection that keeps the region mapped (`Region` in the wire contract). A slot is
    reused only when no client can write to it any more: after the store's completion, or when every
    writer connection of the session has ended.
    """

    cpu_tier: CpuTier
    new_ids: Iterator[int]
    granted_bytes: Counter[bytes] = field(default_factory=Counter)
    """Bytes of the slots of stores in flight and in quarantine, by the tag of the tenant."""
    begun: int = 0
    """Number of stores that have begun so far."""
    by_grant: dict[tuple[bytes, int], StoreId] = field(default_factory=dict)
    """Ids of stores in flight and in quarantine, by session and the id that the client chose."""
    _stores: dict[StoreId, Store] = field(default_factory=dict)
    _closed: dict[StoreId, Store] = field(default_factory=dict)
    """Stores that no call finds any more, and that have not ended yet."""
    _quarantine: dict[StoreId, _Quarantine] = field(default_factory=dict)
    _by_writer: dict[int, dict[StoreId, None]] = field(default_factory=dict)
    """Quarantined stores per writer connection."""
    _per_tenant: Counter[bytes] = field(default_factory=Counter)
    """Number of stores in flight and in quarantine, by the tag of the tenant."""

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def quarantined_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._quarantine.values())

    def begin(
        self,
        owner: Owner,
        rank: int,
        expires_at: float,
        blocks: list[Block],
        request: Request | None = None,
        *,
        now: float = 0.0,
    ) -> Store:
        """Registers a store of pinned blocks that have a slot for the rank."""
        store_id = next(new_id for new_id in map(StoreId, self.new_ids) if new_id not in self._stores)
        store = Store(store_id, owner, rank, expires_at, blocks, request, now, number=self.begun)
        self.begun += 1
        self._stores[store.id] = store
        if owner.grant_id:
            self.by_grant[owner.grant] = store.id
        self._count(owner.engine, 1)
        return store

    def check(self, store: Store | None, owner: Owner) -> None:
        """Checks a store that a call extends; None for a new store. Raises like `get`.

        For a new store, raises LimitExceeded if the tenant of the owner has too many, and
        InvalidItem if the owner's `grant_id` belongs to another store.
        """
        if store is not None:
            self.get(store.id, owner.engine)
            return
        if owner.grant_id and owner.grant in self.by_grant:
            raise InvalidItem(f"grant_id {owner.grant_id} belongs to another store of the session")
        if self._per_tenant.get(tenant_of(owner.engine[0]), 0) >= MAX_STORES:
            raise LimitExceeded(f"the tenant has {MAX_STORES} stores that are not completed")

    def add_blocks(self, store: Store, blocks: Sequence[Block]) -> None:
        """Adds blocks, each with a granted slot, to a store."""
        self.cpu_tier.records.granted(session_tag(store.owner.session_id), store.slots(blocks))
        store.blocks += blocks
        self._count_bytes(store.owner.engine, sum([block.queue.size_class for block in blocks]))

    def take_blocks(self, store: Store, blocks: Sequence[Block], *, tail: bool = False) -> None:
        """Removes the first blocks of a store, or its last ones, whose slots it no longer has."""
        store.blocks = store.blocks[: -len(blocks)] if tail else store.blocks[len(blocks) :]
        self._count_bytes(store.owner.engine, -sum([block.queue.size_class for block in blocks]))

    def _count_bytes(self, engine: EngineKey, change: int) -> None:
        add_to_counter(self.granted_bytes, tenant_of(engine[0]), change)

    def _count(self, engine: EngineKey, change: int) -> None:
        tenant = tenant_of(engine[0])
        self._per_tenant[tenant] += change
        if not self._per_tenant[tenant]:
            del self._per_tenant[tenant]

    def get(self, store_id: StoreId, engine: EngineKey) -> Store:
        store = self._stores.get(store_id)
        if store is None or store.failed is not None or tenant_of(store.owner.engine[0]) != tenant_of(engine[0]):
            raise StoreNotFound(f"there is no store {store_id}: it was completed, expired or ended with its session")
        if store.owner.engine != engine:
            raise NotOwner(f"store {store_id} belongs to another engine")
        return store

    def is_open(self, store: Store) -> bool:
        return self._stores.get(store.id) is store

    def close(self, store: Store, writers: Iterable[int] = ()) -> None:
        """Hides an open store from all calls. `end` must follow, later."""
        if self.is_open(store):
            store.writers = frozenset(writers)
            del self._stores[store.id]
            self._closed[store.id] = store

    def closed(self, store_id: StoreId) -> Store | None:
        """Returns the store with this id that is closed and has not ended."""
        return self._closed.get(store_id)

    def end(self, store: Store) -> None:
        """Removes a store; the caller must then release the store's pins and slots."""
        self.close(store)
        del self._closed[store.id]
        self.by_grant.pop(store.owner.grant, None)
        self._count(store.owner.engine, -1)

    def quarantine(self, store: Store) -> None:
        """Begins a quarantine, which lasts until all of the store's writers have ended."""
        self._quarantine[store.id] = _Quarantine([], 0, store.owner.engine, set(store.writers), store.owner.grant)
        if store.owner.grant_id:
            self.by_grant[store.owner.grant] = store.id
        for writer in store.writers:
            self._by_writer.setdefault(writer, {})[store.id] = None
        self._count(store.owner.engine, 1)
        self._lift_if_free(store.id)

    def add_to_quarantine(self, store: Store, offsets: list[int], nbytes: int) -> None:
        """Keeps detached slots out of use until the store's quarantine ends."""
        entry = self._quarantine.get(store.id)
        if entry is None:
            self.cpu_tier.release(offsets)
        else:
            entry.offsets += offsets
            entry.nbytes += nbytes
            self._count_bytes(entry.engine, self.cpu_tier.memory.slot_bytes_of(offsets))

    def take_writer(self, writer: int) -> Collection[StoreId]:
        """Returns the quarantined stores of a writer connection that has ended, for `lift`."""
        return self._by_writer.pop(writer, {})

    def lift(self, store_id: StoreId, writer: int) -> None:
        """Ends a store's quarantine if this ended connection was its last writer."""
        if (entry := self._quarantine.get(store_id)) is not None:
            entry.writers.discard(writer)
            self._lift_if_free(store_id)

    def is_quarantined(self, store_id: StoreId, engine: EngineKey) -> bool:
        """Returns whether an ended or closed store of this engine has slots out of use."""
        if (closed := self._closed.get(store_id)) is not None:
            return closed.owner.engine == engine
        entry = self._quarantine.get(store_id)
        return entry is not None and entry.engine == engine

    def writer_done(self, store_id: StoreId, engine: EngineKey) -> None:
        if self.is_quarantined(store_id, engine):
            writers = self._quarantine[store_id].writers
            for writer in writers & self._by_writer.keys():
                del self._by_writer[writer][store_id]
                if not self._by_writer[writer]:
                    del self._by_writer[writer]
            writers.clear()
            self._lift_if_free(store_id)

    def __iter__(self) -> Iterator[Store]:
        return iter(self._stores.values())

    def owned_by(self, session_id: bytes) -> list[Store]:
        """Returns the stores of a session, with the closed ones."""
        stores = (*self._stores.values(), *self._closed.values())
        return [store for store in stores if store.owner.session_id == session_id]

    def expired(self, now: float) -> list[Store]:
        """Returns the expired stores. A store whose completion has begun does not expire."""
        return [store for store in self._stores.values() if store.failed is None and store.expires_at <= now]

    def _lift_if_free(self, store_id: StoreId) -> None:
        if not self._quarantine[store_id].writers:
            ended = self._quarantine.pop(store_id)
            self.by_grant.pop(ended.grant, None)
            self._count(ended.engine, -1)
            self._count_bytes(ended.engine, -self.cpu_tier.memory.slot_bytes_of(ended.offsets))
            self.cpu_tier.release(ended.offsets)
