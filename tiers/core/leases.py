"""Lease table: pins on looked-up blocks, each with an owner and an expiry.

A lease belongs to an engine and ends with the session that it was granted to.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, TypeVar

from ..errors import InvalidItem, LeaseNotFound, NotOwner, NotReady
from ..types import EngineKey, EngineSession, KeyStatus, LeaseId, Owner, tenant_of
from .block import Block
from .cpu_tier import CpuTier
from .pin_budget import add_to_counter
from .sliced_work import UnpinQueue
from .waiters import Waiters, take_items

if TYPE_CHECKING:
    from ..stats.request_log import LookupRecord


__all__ = ["PENDING_COST", "BlockLease", "LeaseTable"]

K = TypeVar("K")

LEASE_COST = 1024
"""Number of items that a lease counts as, in addition to its own, so that leases are few."""
PENDING_COST = 16
"""Number of items that a pending item counts as for the tenant, in addition: it takes 200 bytes,
any other item 9."""

_OF_MISSING = bytes([KeyStatus.HIT, KeyStatus.MISS]).ljust(256, b"\0")
"""Status of an item, by whether it is a miss."""


@dataclass(slots=True, eq=False)
class BlockLease:
    """A lease on the blocks that a lookup found.

    Attributes:
        items: per key the pinned block, or None for a miss; trailing misses are omitted. The lease
            of a claim has only the hits.
        keys: number of looked-up keys.
        indices: index in `items` of each hit of a claim, by its number in the hold; None for a
            lookup.
        sources: per item the position of the tier that had the block; undefined for misses.
        cpu_tier: the CPU tier, which counts the loaded bytes.
        granted_at: time of the grant, in seconds of the core's clock.
        pending: number of items whose block is not ready.
        awaited: these items, by block.
        hits: number of items that are not a miss.
        record: the lookup in the request log.
        counted: whether the hits and misses of its items are counted.
        lost: items that were hits of the lookup, and whose blocks could not be loaded or stored.
        readers: number of copies from its slots by processes of the server. The blocks stay pinned
            until the lease and all its readers have ended.
        copied_bytes: number of bytes that clients copied without a call before the copy.
    """

    id: LeaseId
    owner: Owner
    expires_at: float
    items: list[Block | None]
    keys: int
    sources: bytes
    cpu_tier: CpuTier
    granted_at: float = 0.0
    pending: int = 0
    awaited: dict[Block, list[int]] = field(default_factory=dict)
    hits: int = 0
    record: LookupRecord | None = None
    counted: bool = True
    indices: dict[int, int] | None = None
    lost: set[int] | None = None
    readers: int = 0
    copied_bytes: int = 0

    @property
    def found(self) -> int:
        """Number of items that were a hit when they were looked up."""
        return self.hits + len(self.lost or ())

    def copied(self, nbytes: int, largest_block: int) -> None:
        """Counts loaded bytes, which a client named: at most those of the lease, each once."""
        nbytes = max(0, min(nbytes, self.hits * largest_block - self.copied_bytes))
        self.copied_bytes += nbytes
        self.cpu_tier.loaded_bytes += nbytes

    def blocks(self, items: Sequence[int]) -> list[Block | None]:
        """Returns the blocks of items; None for an item that is not a hit or does not exist."""
        held, indices = self.items, self.indices
        if indices is not None:
            return [held[indices[item]] if item in indices else None for item in items]
        return [held[item] if item < len(held) else None for item in items]

    def statuses(self) -> bytes:
        held = self.items if self.indices is None else self.blocks(range(self.keys))
        is_missing = bytes(map(is_, held, repeat(None)))
        known = bytearray(is_missing.translate(_OF_MISSING))
        if self.pending:
            pending = int(KeyStatus.HIT_PENDING)
            for item, block in enumerate(self.items):
                if block is not None and not block.ready:
                    known[item] = pending
        return bytes(known.ljust(self.keys, bytes([KeyStatus.MISS])))

    def slots(self, items: Sequence[int], rank: int | None) -> list[int]:
        """Returns the slots of one rank's parts, or with None of all ranks, item by item.

        Raises InvalidItem, NotReady.
        """
        offsets: list[int] = []
        for item, block in zip(items, self.blocks(items), strict=True):
            if block is None or not block.ready:
                raise self._refusal(item, block)
            # A block that is ready has all its slots.
            offsets += block.slots if rank is None else block.slots[rank : rank + 1]  # type: ignore[arg-type]
        return offsets

    def read(self, items: Iterable[int], rank: int, *, counted: bool = True) -> tuple[list[int], list[int]]:
        """Returns slots and sizes of one rank's parts, for a load. Raises InvalidItem, NotReady.

        `counted`: whether to count the bytes as loaded from the CPU tier.
        """
        items = list(items)
        slots = self.slots(items, rank)
        sizes = [block.part_bytes for block in self.blocks(items) if block is not None]
        if counted:
            self.cpu_tier.loaded_bytes += sum(sizes)
        return slots, sizes

    def _refusal(self, item: int, block: Block | None) -> InvalidItem | NotReady:
        if item >= self.keys:
            return InvalidItem(f"the lease has {self.keys} items; there is no item {item}")
        if block is None and self.indices is None and item not in (self.lost or ()):
            return InvalidItem(f"item {item} of the lease is a miss")
        return NotReady(f"item {item} of the lease is not ready, or its block is lost")


class LeaseTable:
    """The leases by id, and the pending blocks that leases wait for."""

    def __init__(self, cpu_tier: CpuTier, new_ids: Iterator[int], unpins: UnpinQueue) -> None:
        self._cpu_tier, self._unpins = cpu_tier, unpins
        self._leases: dict[LeaseId, BlockLease] = {}
        self._closed: dict[BlockLease, None] = {}  # no call finds them; they have not ended
        self.waiters = Waiters[BlockLease]()
        self._by_session: dict[bytes, dict[BlockLease, None]] = defaultdict(dict)
        self._by_request: dict[tuple[EngineKey, str], dict[BlockLease, None]] = defaultdict(dict)
        self.by_grant: dict[tuple[bytes, int], BlockLease] = {}
        """Leases whose clients chose an id, by session and this id."""
        self._items: dict[bytes, int] = defaultdict(int)
        self._tenant_items: Counter[bytes] = Counter()
        """Number of items by the tag of the tenant, with the costs of leases and pending items."""
        self.leased_bytes: Counter[bytes] = Counter()
        """Bytes of the blocks that leases pin, by the tag of the tenant. A block counts once."""
        self.only_held_bytes: Counter[bytes] = Counter()
        """Bytes of the blocks with `Block.held` and without a lease, by the tag of the tenant."""
        self._new_ids = new_ids

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        owner: Owner,
        expires_at: float,
        items: list[Block | None],
        sources: bytes,
        *,
        keys: int,
        now: float,
        record: LookupRecord | None = None,
        all_ready: bool = False,
        indices: dict[int, int] | None = None,
    ) -> BlockLease:
        """Grants a lease that owns the pins of its blocks. `all_ready`: no block is pending."""
        lease_id = LeaseId(next(self._new_ids))
        while lease_id in self._leases:
            lease_id = LeaseId(next(self._new_ids))
        lease = BlockLease(
            lease_id,
            owner,
            expires_at,
            [],
            keys,
            b"",
            self._cpu_tier,
            now,
            record=record,
            indices=indices,
        )
        self._leases[lease.id] = lease
        if owner.grant_id:
            self.by_grant[owner.grant] = lease
        self._by_session[owner.session_id][lease] = None
        self._by_request[owner.engine, owner.request_id][lease] = None
        self._items[owner.session_id] += LEASE_COST
        add_to_counter(self._tenant_items, tenant_of(owner.engine[0]), LEASE_COST)
        if items:
            self.extend(lease, items, sources, all_ready=all_ready)
        return lease

    def check_grant(self, session: EngineSession, owner: Owner) -> None:
        """Raises InvalidItem if the client has withdrawn the grant, or uses its id already."""
        session.check_wanted(owner.grant_id)
        if owner.grant_id and owner.grant in self.by_grant:
            raise InvalidItem(f"grant_id {owner.grant_id} belongs to another lease of the session")

    def extend(
        self, lease: BlockLease, items: Sequence[Block | None], sources: bytes, *, all_ready: bool = False
    ) -> None:
        """Adds items to a lease, which then owns the pins of their blocks."""
        pending = lease.pending
        for item, block in enumerate(() if all_ready else items, start=len(lease.items)):
            if block is not None and not block.ready:
                lease.pending += 1
                lease.awaited.setdefault(block, []).append(item)
                self.waiters.add(lease, block)
        tenant = tenant_of(lease.owner.engine[0])
        self._count_blocks(items, tenant)
        lease.items += items
        lease.hits += len(items) - items.count(None)
        lease.sources += sources
        self._items[lease.owner.session_id] += len(items)
        add_to_counter(self._tenant_items, tenant, len(items) + PENDING_COST * (lease.pending - pending))

    def _count_blocks(self, items: Sequence[Block | None], tenant: bytes) -> None:
        nbytes = held = 0  # of one rank
        for block in items:
            if block is not None:
                block.leases = leases = block.leases + 1
                if leases == 1:
                    nbytes += (size := block.queue.size_class)
                    held += size if block.held else 0
        if nbytes:
            ranks = _ranks_of(items)
            add_to_counter(self.leased_bytes, tenant, ranks * nbytes)
            if held:
                add_to_counter(self.only_held_bytes, tenant, -ranks * held)

    def _unpin(self, blocks: Sequence[Block]) -> None:
        """Removes one pin of a lease per block. The blocks belong to one namespace."""
        nbytes = held = 0  # of one rank
        for block in blocks:
            block.leases = leases = block.leases - 1
            if not leases:
                nbytes += (size := block.queue.size_class)
                held += size if block.held else 0
        if nbytes:
            ranks, tenant = _ranks_of(blocks), tenant_of(blocks[0].namespace)
            add_to_counter(self.leased_bytes, tenant, -ranks * nbytes)
            if held:
                self.only_held_bytes[tenant] += ranks * held
        self._cpu_tier.unpin(blocks)

    def is_open(self, lease: BlockLease) -> bool:
        return self._leases.get(lease.id) is lease

    def get(self, lease_id: LeaseId, engine: EngineKey) -> BlockLease:
        lease = self._leases.get(lease_id)
        if lease is None or tenant_of(lease.owner.engine[0]) != tenant_of(engine[0]):
            raise LeaseNotFound(f"there is no lease {lease_id}: it was released, expired or ended with its session")
        if lease.owner.engine != engine:
            raise NotOwner(f"lease {lease_id} belongs to another engine")
        return lease

    def close(self, lease: BlockLease) -> None:
        """Hides an open lease from all calls. `end` must follow, later."""
        if self.is_open(lease):
            del self._leases[lease.id]
            self.by_grant.pop(lease.owner.grant, None)
            self._closed[lease] = None

    def is_closed(self, lease: BlockLease) -> bool:
        return lease in self._closed

    def end(self, lease: BlockLease) -> None:
        """Ends a lease. Its pins remain until it has no reader and the unpin queue removes them."""
        self._forget(lease)
        if not lease.readers:
            self._unpins.add(lease.owner.engine[0], self._unpin, lease.items)

    def end_reader(self, lease: BlockLease) -> None:
        """Ends a reader. The unpin queue then removes the pins of an ended lease."""
        lease.readers -= 1
        if not lease.readers and not self.is_open(lease) and not self.is_closed(lease):
            self._unpins.add(lease.owner.engine[0], self._unpin, lease.items)

    def _forget(self, lease: BlockLease) -> None:
        self.close(lease)
        del self._closed[lease]
        owner, tenant = lease.owner, tenant_of(lease.owner.engine[0])
        self._items[owner.session_id] -= LEASE_COST + len(lease.items)
        add_to_counter(self._tenant_items, tenant, -LEASE_COST - len(lease.items) - PENDING_COST * lease.pending)
        _discard(self._by_request, (owner.engine, owner.request_id), lease)
        if _discard(self._by_session, owner.session_id, lease):
            del self._items[owner.session_id]
        for block in lease.awaited:
            self.waiters.remove(lease, block)
        lease.awaited = {}

    def settle(self, lease: BlockLease, block: Block, most: int) -> list[int]:
        """Called when a block is no longer pending; returns items of the lease that have waited.

        If the block is not ready, these items become misses. A closed lease keeps waiting.
        """
        if block not in lease.awaited or lease in self._closed:
            return []
        items = take_items(lease.awaited, block, most)
        if block not in lease.awaited:
            self.waiters.remove(lease, block)
        lease.pending -= len(items)
        add_to_counter(self._tenant_items, tenant_of(lease.owner.engine[0]), -PENDING_COST * len(items))
        if not block.ready:
            for item in items:
                lease.items[item] = None
            lease.lost = lease.lost or set()
            lease.lost.update(items)
            lease.hits -= len(items)
            self._unpin([block] * len(items))
        return items

    def __iter__(self) -> Iterator[BlockLease]:
        return iter(self._leases.values())

    def of_session(self, session_id: bytes) -> list[BlockLease]:
        return list(self._by_session.get(session_id, ()))

    def of_request(self, engine: EngineKey, request_id: str) -> list[BlockLease]:
        return list(self._by_request.get((engine, request_id), ()))

    def oldest_age(self, now: float) -> float:
        """Returns the age of the oldest lease in seconds, or 0."""
        oldest = next(iter(self._leases.values()), None)
        return max(0.0, now - oldest.granted_at) if oldest is not None else 0.0

    def items_of(self, session: EngineSession) -> tuple[int, int]:
        """Returns the number of items of the leases of a session, and of its tenant.

        Each lease counts `LEASE_COST` more, and for the tenant each pending item `PENDING_COST`.
        """
        return self._items.get(session.id, 0), self._tenant_items.get(tenant_of(session.namespace.id), 0)

    def expired(self, now: float) -> list[BlockLease]:
        return [lease for lease in self._leases.values() if lease.expires_at <= now]


def _ranks_of(blocks: Iterable[Block | None]) -> int:
    """Returns the number of ranks of the namespace. To ask each block would cost a cache miss."""
    for block in blocks:
        if block is not None:
            return len(block.slots)
    return 0


def _discard(index: dict[K, dict[BlockLease, None]], key: K, lease: BlockLease) -> bool:
    leases = index[key]
    del leases[lease]
    if not leases:
        del index[key]
    return not leases
