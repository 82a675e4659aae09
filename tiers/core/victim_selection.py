"""Victim selection in the host region: which blocks to evict to free slots or extents.

To free slots, blocks of the same size class are evicted. Memory moves between classes as whole
extents: class A gets an extent of class B if B's longest idle block has been idle for longer than
A's. Without this rule, blocks of an unloaded model would occupy the region forever. Class A gets an
extent without this condition if it has no victim, or if the tenant that needs the memory is within
its quota. If each extent of another class has a pinned block, the class gets one that retires
(`retiring_extents.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, islice
from operator import attrgetter

from ..eviction.queues import EvictionQueue, EvictionQueues
from ..eviction.quotas import Quotas, TenantShare, pick_victims
from .block import Block
from .slot_allocator import Extent, SizeClass, SlotAllocator

__all__ = ["SlotReclaimer", "SpareRoom"]

_EXTENT_CANDIDATES = 256
"""How many victims of another class are examined to find an extent."""
_SEARCHED_SLOTS = 8192
"""How many slots and extents are examined if there is no other victim: 1 ms. The next search goes
on there."""

MAX_SPARE = 1024
"""Limit of slots that are freed in advance, so that the event loop is not delayed."""

_FEW_SPARES = 8


class SlotReclaimer:
    def __init__(self, memory: SlotAllocator, queues: EvictionQueues[Block], owners: Mapping[int, Block]) -> None:
        """`owners` maps the offset of a slot to its block."""
        self._memory = memory
        self._lines = queues
        self._owners = owners
        self._searched: dict[int, Extent] = {}
        """The extent of each pool at which the last search of `_any_idle_extent` ended."""
        self._weighed: dict[int, Extent] = {}
        """The same for `extent_to_retire`."""

    def victims(self, share: TenantShare, slot_bytes: int, count: int) -> list[Block]:
        """Returns blocks whose eviction frees some of `count` slots, or an extent; may be empty."""
        within = (share.quota - share.used) // slot_bytes
        if within > 0:
            # With `within` more slots the share does not exceed its quota. So evict from shares
            # above their quota, in any size class.
            others = self._chosen(share, slot_bytes, min(count, within), with_own=False)
            victims = others or self._idle_extent(share, slot_bytes, None, with_own=False)
            if victims:
                return victims
        chosen = self._chosen(share, slot_bytes, count)
        if len(self._lines.all()) == 1:
            return chosen  # there is no other class to take an extent from
        idle = self._idle_extent(share, slot_bytes, self._oldest(share, slot_bytes) if chosen else None)
        return idle or chosen or self._any_idle_extent(share, slot_bytes)

    def declined(self, share: TenantShare, slot_bytes: int, count: int, new: Collection[Block]) -> list[Block]:
        """Returns the new blocks that would be among the victims, if a share needed `count` slots.

        `new`: blocks without slots that their queue already orders.
        """
        queues = [
            (queue.share, (block for block in queue.victims() if block.pins == 0 or block in new))
            for queue in self._donors(share, slot_bytes)
        ]
        chosen = pick_victims(
            share, count * slot_bytes, queues, lambda block: slot_bytes if block in new else _freed_bytes(block)
        )
        return [block for block in chosen if block in new]

    def own_victims(self, share: TenantShare, slot_bytes: int, nbytes: int) -> list[Block]:
        """Returns blocks of a share that free `nbytes` if possible, first of this slot size."""
        mine = [queue for queue in self._lines.all() if queue.share is share]
        mine.sort(key=lambda queue: queue.size_class != slot_bytes)
        queue = chain.from_iterable(map(_evictable, mine))
        return pick_victims(share, nbytes, [(share, queue)], _freed_bytes)

    def _chosen(self, share: TenantShare, slot_bytes: int, count: int, *, with_own: bool = True) -> list[Block]:
        queues = [queue for queue in self._donors(share, slot_bytes) if with_own or queue.share is not share]
        return pick_victims(
            share, count * slot_bytes, [(queue.share, _evictable(queue)) for queue in queues], _freed_bytes
        )

    def _donors(self, share: TenantShare, slot_bytes: int) -> Iterator[EvictionQueue[Block]]:
        """Yields the queues of a class and a pool whose blocks a share may evict."""
        for queue in self._lines.of_class(slot_bytes):
            if queue.share is share or (queue.share.pool == share.pool and queue.share.excess > 0):
                yield queue

    def _oldest(self, share: TenantShare, slot_bytes: int) -> int | None:
        """Returns the last use of the longest idle evictable block of a class."""
        oldest = [queue.oldest() for queue in self._donors(share, slot_bytes)]
        return min((block.last_use for block in oldest if block is not None), default=None)

    def _idle_extent(
        self, share: TenantShare, slot_bytes: int, than: int | None, *, with_own: bool = True
    ) -> list[Block] | None:
        """Returns the blocks of an extent of another class that this class may claim, or None.

        The other class must have a block that was last used before `than` (None: at any time). The
        extent contains that block or one of the next victims, and no slot in it is pinned, being
        written or quarantined.
        """
        if slot_bytes > self._memory.extent_bytes:
            return None
        others: list[tuple[int, int, Block, EvictionQueue[Block]]] = []
        for number, queue in enumerate(self._lines.all()):
            if queue.size_class == slot_bytes or queue.share.pool != share.pool:
                continue
            if not (with_own if queue.share is share else queue.share.excess > 0):
                continue
            oldest = queue.oldest()
            if oldest is not None and (than is None or oldest.last_use < than):
                others.append((oldest.last_use, number, oldest, queue))
        for _, _, oldest, queue in sorted(others, key=lambda entry: entry[:2]):
            blocked: set[int] = set()
            candidates = islice(_evictable(queue), _EXTENT_CANDIDATES)
            for block in chain([oldest] if oldest.pins == 0 else [], candidates):
                blocks = self._blocks_of_extent(block, share, blocked)
                if blocks:
                    return blocks
        return None

    def _any_idle_extent(self, share: TenantShare, slot_bytes: int) -> list[Block]:
        """Returns the blocks of any extent of another class whose blocks can all be evicted.

        The next victims of that class can all be in extents with a pinned block.
        """
        if slot_bytes > self._memory.extent_bytes:
            return []
        examined = 0
        for extent in self._memory.extents_after(self._searched.get(share.pool), share.pool):
            if examined >= _SEARCHED_SLOTS:
                break
            self._searched[share.pool] = extent
            examined += 1
            if extent.slot_bytes in (0, slot_bytes):
                continue
            for number, owner in enumerate(map(self._owners.get, self._memory.slots_of(extent)), start=1):
                if owner is not None and (owner.pins or owner.retained):
                    examined += number
                    break
            else:
                examined += self._memory.extent_bytes // extent.slot_bytes
                blocks = self._owners_of(extent)
                if blocks and _all_evictable(blocks, share):
                    return blocks
        return []

    def extent_to_retire(self, share: TenantShare, slot_bytes: int, taken: Container[Extent]) -> Extent | None:
        """Returns the extent of another class that costs least to retire, among those examined.

        `taken`: extents that do not retire. A class with extents takes none from a class with
        fewer, or with one more, because neither of them could keep it. A share within its quota
        takes from each class, if the extent has not only its own blocks.
        """
        is_within = share.quota - share.used >= slot_bytes
        per_class = self._memory.extents_per_class(share.pool)
        least = per_class[slot_bytes] + 2 if per_class[slot_bytes] else 1
        examined, found = 0, list[tuple[tuple[int, ...], Extent]]()
        for extent in self._memory.extents_after(self._weighed.get(share.pool), share.pool):
            if examined >= _SEARCHED_SLOTS:
                break
            self._weighed[share.pool] = extent
            examined += 1
            is_larger = per_class[extent.slot_bytes] >= least
            if extent.slot_bytes in (0, slot_bytes) or extent in taken or not (is_larger or is_within):
                continue
            examined += self._memory.extent_bytes // extent.slot_bytes
            cost = self._cost(extent, share, is_within=is_within, may_be_own=is_larger)
            if cost is not None:
                found.append((cost, extent))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _cost(self, extent: Extent, taker: TenantShare, *, is_within: bool, may_be_own: bool) -> tuple[int, ...] | None:
        """Returns what the retirement of an extent costs, the most important part first.

        Returns None if a lost process may write to a slot, or if other shares would lose more than
        they must. Only a share within its quota takes retained blocks, and blocks of shares within
        theirs: up to half an extent, so that few blocks of a share do not keep all extents.
        """
        owners = [self._owners.get(slot) for slot in self._memory.in_use(extent)]
        blocks = {owner for owner in owners if owner is not None}
        if None in owners or (not is_within and any(block.retained for block in blocks)):
            return None
        freed = _freed_per_share(blocks)
        if freed.keys() == {taker} and not may_be_own:
            return None
        guaranteed = sum(nbytes for share, nbytes in freed.items() if share is not taker and share.excess < nbytes)
        if guaranteed > (self._memory.extent_bytes // 2 if is_within else 0):
            return None
        return guaranteed, extent.setbacks, sum(block.pins > 0 for block in blocks), extent.used

    def _blocks_of_extent(self, block: Block, share: TenantShare, blocked: set[int]) -> list[Block] | None:
        """Returns all blocks of an extent that has a slot of `block`, if all are evictable.

        Adds each extent with a block that is not evictable to `blocked`.
        """
        for offset in block.slots:
            if offset is None:
                continue
            extent = self._memory.extent_at(offset)
            if extent.offset in blocked:
                continue
            blocks = self._owners_of(extent)
            if blocks and _all_evictable(blocks, share):
                return blocks
            blocked.add(extent.offset)
        return None

    def _owners_of(self, extent: Extent) -> list[Block] | None:
        """Returns the blocks in an extent, or None if one of them cannot be evicted."""
        blocks: dict[Block, None] = {}
        for slot in self._memory.in_use(extent):
            owner = self._owners.get(slot)
            if owner is None or owner.pins or owner.retained:
                return None
            blocks[owner] = None
        return list(blocks)


class SpareRoom:
    """How many slots of each size class are freed in advance of a store."""

    def __init__(self, memory: SlotAllocator, part: float, shares: Quotas) -> None:
        """`part`: largest fraction of each memory pool that is freed in advance.

        Nothing is freed in advance in a pool of several shares: which of them must free memory
        depends on the tenant of the next store.
        """
        self._memory = memory
        self._part = part
        self._shares = shares
        self.under_pressure: set[SizeClass] = set()
        """Size classes for which a store found too few free slots. A class stays in the set until
        more than twice the slots of its last store are free."""
        self.demand: dict[SizeClass, int] = {}
        """Per size class under pressure, the number of slots that its last store needed. `next`
        removes a class."""

    def wanted(self, size_class: SizeClass, count: int, *, has_enough: bool) -> None:
        """Called when a store has needed `count` slots."""
        if not has_enough:
            self.under_pressure.add(size_class)
        is_alone = self._shares.only_share_of(size_class[0]) is not None
        if is_alone and size_class in self.under_pressure and self.slots(size_class, count):
            self.demand[size_class] = count

    def next(self) -> tuple[TenantShare, int, int]:
        """Returns the share and slot size of a class with a demand, and how many slots it lacks."""
        size_class, count = self.demand.popitem()
        share = self._shares.only_share_of(size_class[0])
        assert share is not None
        free = self._memory.free_slots(size_class)
        missing = self.slots(size_class, count) - free
        if missing <= 0 and free > 2 * count:
            self.under_pressure.discard(size_class)
        return share, size_class[1], missing

    def slots(self, size_class: SizeClass, count: int) -> int:
        """Returns the slots to keep free for a store of `count` slots; 0 if that is too many.

        The size classes under pressure share the spare part of their pool equally.
        """
        pool, slot_bytes = size_class
        classes = sum(each == pool for each, _ in self.under_pressure)
        most = int(self._part / max(1, classes) * self._memory.available_bytes(pool) / slot_bytes)
        return min(count, most, MAX_SPARE) if count <= _FEW_SPARES * most else 0

    def forget_classes(self, blocks_of: Callable[[int], object]) -> None:
        """Forgets the demand of slot sizes without blocks, which shares the spare part."""
        for size_class in [each for each in self.under_pressure if not blocks_of(each[1])]:
            self.under_pressure.discard(size_class)
            self.demand.pop(size_class, None)


def _evictable(queue: EvictionQueue[Block]) -> Iterator[Block]:
    # A tenant whose blocks are all pinned has nothing to evict: 58,000 blocks take 3 ms, not 20.
    return filterfalse(attrgetter("pins"), queue.victims())


def _freed_bytes(block: Block) -> int:
    return block.queue.size_class * (len(block.slots) - block.slots.count(None))


def _all_evictable(blocks: Sequence[Block], taker: TenantShare) -> bool:
    """Returns whether every share except the taker keeps its quota after the eviction."""
    freed = _freed_per_share(blocks)
    return all(share is taker or share.excess >= nbytes for share, nbytes in freed.items())


def _freed_per_share(blocks: Iterable[Block]) -> Mapping[TenantShare, int]:
    freed: dict[TenantShare, int] = {}
    for block in blocks:
        share = block.queue.share
        freed[share] = freed.get(share, 0) + _freed_bytes(block)
    return freed
