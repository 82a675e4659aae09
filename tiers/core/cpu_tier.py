"""The CPU tier: blocks in the host region, with their slots, pins and eviction."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter

from ..eviction.queues import EvictionQueue, EvictionQueues, by_queue
from ..eviction.quotas import TenantShare
from ..secondary_tier import NamespaceId
from ..stats.eviction_history import EvictionHistory
from ..types import MissReason, NamespaceSpec, tenant_of
from .block import Block, put_slots
from .block_index import BlockIndex
from .event_log import EventLog
from .retiring_extents import RetiringExtents
from .slot_allocator import SizeClass, SlotAllocator
from .slot_records import NoRecords
from .victim_selection import SlotReclaimer, SpareRoom

__all__ = ["CpuTier"]

SLICE = 512
"""Number of blocks that one slice of a reset drops: 1 ms, or 4 ms with a million blocks."""

_TICKS_PER_SECOND = 1e6

_MAX_CACHED_QUEUES = 4096


class CpuTier:
    """Blocks in the host region. The used bytes of a tenant share include quarantined slots."""

    def __init__(
        self,
        *,
        extent_bytes: int,
        pool_starts: Sequence[int] = (0,),
        queues: EvictionQueues[Block],
        history: EvictionHistory,
        spare_part: float,
        events: EventLog | None = None,
        records: NoRecords | None = None,
    ) -> None:
        """`spare_part`: largest fraction of a memory pool that is freed in advance of a store."""
        self.records = records or NoRecords()
        self.memory = SlotAllocator(extent_bytes, self.records.cut, pool_starts)
        self.queues = queues
        self.evictions = 0
        self.no_room = 0
        """Number of requested slots that were not available."""
        self.stored_bytes = 0
        self.loaded_bytes = 0
        self.has_more_room = False
        """Whether blocks were unpinned or slots were freed since this was last cleared."""
        self.declines = 0
        """Number of blocks that were not stored because the policy valued them less than others."""
        self._history = history
        self._events = (events or EventLog()).add_tier(0, self)
        self._index = BlockIndex(self.records.forget)
        self._owners: dict[int, Block] = {}
        self._detached: dict[int, TenantShare] = {}
        """Tenant share of each slot without a block, by offset."""
        self._reclaimer = SlotReclaimer(self.memory, queues, self._owners)
        self.retiring = RetiringExtents(
            self.memory,
            self._reclaimer,
            owner_of=self._owners.get,
            evict=self._evict,
            evict_pinned=self._evict_pinned,
        )
        queues.may_retain = lambda block: not (self.retiring and self.retiring.retires(block))
        self._queue_of: dict[tuple[NamespaceId, int], EvictionQueue[Block]] = {}
        """Cache of `queues.queue_for`, by namespace and part size."""
        self._spare = SpareRoom(self.memory, spare_part, queues.shares)
        self._unevictable: set[TenantShare] = set()
        """Shares at their limit without an evictable block. A search would look at all of their
        blocks, which are pinned: 15 ms for 58,000 blocks. An unpinned block ends this state."""
        self._clock = 0
        """Logical time of the last use. It grows with each use, and is at least the microseconds of
        the clock at the last tick."""

    def __len__(self) -> int:
        return len(self._index)

    def blocks_of(self, namespace: NamespaceId) -> dict[bytes, Block]:
        return self._index.of(namespace).blocks

    def counts(self) -> Iterable[tuple[NamespaceId, int]]:
        return self._index.counts()

    def skipped_blocks(self) -> list[Block]:
        """Returns ready blocks that a tier failed to store, most recently used first."""
        failed = MissReason.STORE_FAILED
        skipped = (block for block in self._index if block.skip_reason is failed and block.ready)
        return sorted(skipped, key=attrgetter("last_use"), reverse=True)

    def find_or_add(self, spec: NamespaceSpec, keys: Sequence[bytes]) -> list[Block]:
        """Returns the blocks with these keys, and adds an empty block for each missing key.

        The caller must pin the blocks and unpin them later, because `unpin` drops empty blocks. The
        caller must also record the use of the blocks that stay (`use`). Raises InvalidKey if a key
        names an unknown group; then no block was added.
        """
        index = self._index.of(spec.id)
        index.spec, blocks = spec, index.blocks
        found = list(map(blocks.get, keys))
        if all(found):
            return found  # type: ignore[return-value]  # none of them is None
        spec.check(keys)
        one_size = len(set(spec.part_bytes)) == 1
        queue = None
        for number, key in enumerate(keys):
            if found[number] is not None:
                continue
            block = blocks.get(key)  # a key may occur twice
            if block is None:
                if queue is None or not one_size:
                    part_bytes = spec.part_bytes_of(key)
                    queue = self._queue_of.get((spec.id, part_bytes)) or self._new_queue(spec, part_bytes)
                block = blocks[key] = Block(spec, key, part_bytes, queue, index)
            found[number] = block
        return found  # type: ignore[return-value]

    def recover(self, spec: NamespaceSpec, number: int, slots: Mapping[bytes, tuple[int, ...]]) -> Sequence[Block]:
        """Adds complete blocks of an earlier server; `slots`: their slots per rank, by key.

        `number`: number of the namespace in the records. The caller must record the use.
        """
        index = self._index.of(spec.id)
        index.spec, index.number = spec, number
        if not slots:
            self.records.forget(index)
        blocks = self.find_or_add(spec, list(slots))
        for block, offsets in zip(blocks, slots.values(), strict=True):
            block.slots, block.written, block.ready = offsets, (1 << spec.world_size) - 1, True
            self._owners.update(dict.fromkeys(offsets, block))
        for queue, mine in by_queue(blocks):
            queue.share.used += queue.size_class * spec.world_size * len(mine)
        return blocks

    def use(self, blocks: Sequence[Block], request: Hashable, retain_until: float = 0.0) -> int:
        """Records a request's use of distinct indexed blocks; returns how many are not retained."""
        self._clock = now = self._clock + 1
        for block in blocks:
            block.last_use = now
        if retain_until:
            for block in blocks:
                block.retain_until = max(block.retain_until, retain_until)
        return self.queues.use(blocks, request, retain_until)

    def retain(self, blocks: Sequence[Block], until: float) -> list[Block]:
        """Retains blocks without a use; returns those that are not retained (`EvictionQueues`)."""
        for block in blocks:
            block.retain_until = max(block.retain_until, until)
        return self.queues.retain(blocks, until)

    def finish(self, request: Hashable) -> None:
        self.queues.finish(request)

    def used_at(self, namespace: NamespaceId, key: bytes) -> float | None:
        """Returns the last use in seconds, up to 1 s too early; None if the block is not ready."""
        block = self._index.get(namespace, key)
        return block.last_use / _TICKS_PER_SECOND if block is not None and block.ready else None

    def made_room(self) -> None:
        """Called when memory was added, or when retained blocks can be evicted or were dropped."""
        self.has_more_room = True
        self._unevictable.clear()

    def tick(self, now: float) -> bool:
        """Advances the time, drops some expired blocks; returns whether expired blocks are left."""
        self._clock = max(self._clock, int(now * _TICKS_PER_SECOND))
        self.made_room()  # for example, the retention of blocks has ended
        self._index.forget_empty()
        self._spare.forget_classes(self.queues.of_class)
        gone = []
        for block in self.queues.tick(now):
            if block.pins or block.retained:
                self.queues.postpone(block)
            else:
                gone.append(block)
        self.drop(gone, MissReason.EXPIRED)
        self.queues.expired += len(gone)
        return self.queues.overdue

    def reserve(self, blocks: Sequence[Block], rank: int | None = None) -> None:
        """Allocates missing slots: for all parts of each block, or for one rank's part.

        Evicts blocks if necessary. If no slot can be freed, the part keeps None. The blocks must be
        pinned, so that none of them is evicted to make room for another.
        """
        for queue, mine in by_queue(blocks):
            wanted = mine if rank is not None else [each for each in mine for _ in range(each.slots.count(None))]
            offsets = self._take(queue, len(wanted), tenant_of(mine[0].namespace))
            self.no_room += len(wanted) - len(offsets)
            self._owners.update(zip(offsets, wanted, strict=False))
            if rank is not None:
                put_slots(wanted, rank, offsets)
                continue
            left = iter(offsets)
            for block in mine:
                block.fill_slots(left)

    def declined(self, blocks: Sequence[Block]) -> list[Block]:
        """Returns the blocks that the eviction policy would evict first if they were stored now.

        The blocks are new and without slots; the caller has pinned them and recorded their use.
        """
        declined: list[Block] = []
        for queue, new in by_queue(blocks):
            missing = self._missing_slots((queue.share.pool, queue.size_class), len(new))
            if missing > 0 and queue.policy.declines:
                declined += self._reclaimer.declined(queue.share, queue.size_class, missing, frozenset(new))
        self.declines += len(declined)
        return declined

    def may_decline(self, blocks: Sequence[Block]) -> bool:
        """Returns whether `declined` may return any of these new blocks."""
        return any(
            queue.policy.declines and self._missing_slots((queue.share.pool, queue.size_class), len(new)) > 0
            for queue, new in by_queue(blocks)
        )

    def _missing_slots(self, size_class: SizeClass, count: int) -> int:
        """Returns how many blocks to evict for a store of `count` slots that leaves spare slots."""
        free = self.memory.free_slots(size_class)
        spare = self._spare.slots(size_class, count) if size_class in self._spare.under_pressure else 0
        return count - max(0, free - spare)

    def unpin(self, blocks: Iterable[Block]) -> None:
        """Removes one pin per block; drops unpinned blocks that are empty or must be evicted."""
        self.has_more_room = True
        blocks = list(blocks) if self.retiring else blocks
        dropped: dict[MissReason, list[Block]] = {}
        for block in blocks:
            block.pins = pins = block.pins - 1
            if pins or (block.ready and not block.evict_on_unpin and not block.namespace_index.invalidated):
                if self._unevictable and not pins:
                    self._unevictable.discard(block.queue.share)
                continue
            if (
                block.invalidated
                or block.evict_on_unpin
                or not (block.ready or any(slot is not None for slot in block.slots))
            ):
                reason = MissReason.EXPIRED if block.evict_on_unpin else MissReason.RESET
                dropped.setdefault(reason, []).append(block)
            else:
                self._unevictable.discard(block.queue.share)
        for reason, gone in dropped.items():
            self.drop(gone, reason)
        if self.retiring:
            self.retiring.unpinned(blocks)

    def detach_slot(self, block: Block, rank: int) -> int:
        """Removes the slot of an unwritten part from the block. `release` frees the slot later."""
        offset = block.slots[rank]
        if offset is None:
            raise ValueError(f"rank {rank} of {block!r} has no slot")
        put_slots((block,), rank, (None,))
        del self._owners[offset]
        self._detached[offset] = block.queue.share
        return offset

    def release(self, offsets: Iterable[int]) -> None:
        """Frees detached slots. Call this only when no client can write to them any more."""
        self.has_more_room = True
        offsets = list(offsets)
        for offset in offsets:
            self._detached.pop(offset).used -= self.memory.extent_at(offset).slot_bytes
        self.records.free(offsets)
        self.memory.release(offsets)

    def reset(self, namespace: NamespaceId) -> bool:
        """Starts to drop all blocks of a namespace; returns whether `reset_slice` must be called.

        From now on, lookups do not find the blocks, and pending stores are never published (B4.13).
        """
        self._index.invalidate(namespace)
        if self._events.is_on:
            self._events.cleared(namespace)
        return self.reset_slice()

    def reset_slice(self) -> bool:
        taken = self._index.take_invalidated(SLICE)
        for block in taken:
            if block.ready:
                self._history.record_all(block.namespace, (block.key,), MissReason.RESET)
            self.queues.remove(block)
        self.drop([block for block in taken if not block.pins])
        self.made_room()
        return self._index.resetting

    def pending_reset_blocks(self, namespace: NamespaceId) -> int:
        return self._index.pending_reset_blocks(namespace)

    def unlink(self, block: Block) -> None:
        if block.ready:  # otherwise a client may write to its slots
            self.records.free([slot for slot in block.slots if slot is not None])
        self._index.unlink(block)
        self.queues.remove(block)

    def drop(self, blocks: Sequence[Block], reason: MissReason = MissReason.EVICTED) -> None:
        """Drops unpinned blocks and frees their slots. Evictions, expiries and resets call this."""
        remove = self._index.remove
        in_line: list[Block] = []
        gone: list[tuple[NamespaceId, MissReason, list[bytes]]] = []
        freed: list[int] = []
        for block in blocks:
            if remove(block):
                in_line.append(block)
                if block.ready:
                    why = MissReason.RESET if block.namespace_index.invalidated else block.skip_reason or reason
                    if not (gone and gone[-1][0] == block.namespace and gone[-1][1] is why):
                        gone.append((block.namespace, why, []))
                    gone[-1][2].append(block.key)
                    if self._events.is_on and not block.namespace_index.invalidated:
                        self._events.removed(block.namespace, block.key)
            slots = block.slots
            if None in slots:
                slots = tuple(slot for slot in slots if slot is not None)
            block.queue.share.used -= block.queue.size_class * len(slots)
            freed += slots  # type: ignore[arg-type]  # none of them is None
            block.clear()
        self.queues.remove_all(in_line)
        for namespace, why, keys in gone:
            self._history.record_all(namespace, keys, why)
        for slot in freed:
            del self._owners[slot]
        self.records.free(freed)
        self.memory.release(freed)

    def became_ready(self, blocks: Sequence[Block]) -> None:
        """Records blocks that readers can find from now on, and their events."""
        self.records.ready(blocks)
        if self._events.is_on:
            for block in blocks:
                self._events.stored(block.namespace, block.key)

    def not_stored(self, block: Block) -> None:
        """Called when the store of a block has failed, so that its content is not kept."""
        if self._events.is_on:
            self._events.not_stored(block.namespace, block.key)

    def all_of(self, namespace: NamespaceId) -> Collection[Block]:
        return self._index.of(namespace).blocks.values()

    def copy_of(self, namespace: NamespaceId) -> dict[bytes, Block]:
        return self._index.of(namespace).blocks.copy()

    def has(self, namespace: NamespaceId, key: bytes) -> bool:
        block = self._index.get(namespace, key)
        return block is not None and block.ready

    def contains(self, block: Block) -> bool:
        return self._index.get(*block.name) is block

    def is_evictable(self, block: Block, *, retained: bool) -> bool:
        return not block.pins and (retained or not block.retained)

    @staticmethod
    def last_used(block: Block) -> float:
        return block.last_use / _TICKS_PER_SECOND

    @staticmethod
    def nbytes_of(block: Block) -> int:
        return block.queue.size_class * sum(slot is not None for slot in block.slots)

    def evict(self, blocks: Sequence[Block]) -> None:
        """Drops blocks for an operator, also retained ones, and counts them as evictions."""
        self.made_room()
        self._evict(blocks)

    def _evict(self, blocks: Sequence[Block]) -> None:
        self.drop(blocks)
        self.evictions += len(blocks)

    def _evict_pinned(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.discard(block, block.skip_reason or MissReason.EVICTED)
        self.evictions += len(blocks)

    def discard(self, block: Block, reason: MissReason) -> None:
        """Removes a ready block from the index. Its slots stay in use until its last pin ends."""
        self._history.record(block.namespace, block.key, reason)
        if self._events.is_on:
            self._events.removed(block.namespace, block.key)
        self.unlink(block)

    def _new_queue(self, spec: NamespaceSpec, part_bytes: int) -> EvictionQueue[Block]:
        queue = self.queues.queue_for(spec.id, self.memory.slot_bytes_for(part_bytes, spec.world_size))
        if len(self._queue_of) >= _MAX_CACHED_QUEUES:
            self._queue_of.clear()
        self._queue_of[spec.id, part_bytes] = queue
        return queue

    def _take(self, queue: EvictionQueue[Block], count: int, tenant: bytes) -> list[int]:
        """Returns up to `count` free slots for a queue, in ascending order; evicts if necessary."""
        share, slot_bytes = queue.share, queue.size_class
        size_class = (share.pool, slot_bytes)
        count = self._within_limit(share, slot_bytes, count)
        offsets = self.memory.allocate(size_class, count)
        share.used += slot_bytes * len(offsets)
        self._spare.wanted(size_class, count, has_enough=len(offsets) == count)
        while len(offsets) < count and self._make_room(share, slot_bytes, count - len(offsets)):
            fresh = self.memory.allocate(size_class, count - len(offsets))
            share.used += slot_bytes * len(fresh)
            offsets += fresh
        if len(offsets) < count:
            self.retiring.want(tenant, share, slot_bytes, count - len(offsets))
        offsets.sort()
        return offsets

    @property
    def needs_spare_room(self) -> bool:
        """Whether to call `make_spare_room`, so that the next store need not evict blocks first."""
        return bool(self._spare.demand)

    def make_spare_room(self) -> bool:
        """Evicts for one size class in advance, as if the next store were as large as the last.

        Returns whether another size class needs spare room.
        """
        if self.needs_spare_room:
            share, slot_bytes, missing = self._spare.next()
            if missing > 0:
                self._make_room(share, slot_bytes, missing)
        return self.needs_spare_room

    def _within_limit(self, share: TenantShare, slot_bytes: int, count: int) -> int:
        """Evicts from a share if `count` slots exceed its limit; returns how many it may get."""
        over = share.over_limit(slot_bytes * count)
        if share.limit is None or not over:
            return count
        if share not in self._unevictable:
            victims = self._reclaimer.own_victims(share, slot_bytes, over)
            self._evict(victims)
            if share.over_limit(slot_bytes * count):
                self._unevictable.add(share)
        return min(count, max(0, share.limit - share.used) // slot_bytes)

    def _make_room(self, share: TenantShare, slot_bytes: int, count: int) -> bool:
        """Evicts to free slots or an extent of another class; returns whether it freed any."""
        victims = self._reclaimer.victims(share, slot_bytes, count)
        if not victims and self.queues.end_retention():
            self._unevictable.clear()
            victims = self._reclaimer.victims(share, slot_bytes, count)
        self._evict(victims)
        return bool(victims)
