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
from ..eviction.quotas import TenantShare, pick_victims
from .block import Block
from .slot_allocator import Extent, SlotAllocator

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
        self._searched: Extent | None = None
        """The extent at which the last search of `_any_idle_extent` ended."""
        self._weighed: Extent | None = None
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
        return (queue for queue in self._lines.of_class(slot_bytes) if queue.share is share or queue.share.excess > 0)

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
            if queue.size_class == slot_bytes or not (with_own if queue.share is share else queue.share.excess > 0):
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
        for extent in self._memory.extents_after(self._searched):
            if examined >= _SEARCHED_SLOTS:
                break
            self._searched = extent
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
        per_class = self._memory.extents_per_class()
        least = per_class[slot_bytes] + 2 if per_class[slot_bytes] else 1
        examined, found = 0, list[tuple[tuple[int, ...], Extent]]()
        for extent in self._memory.extents_after(self._weighed):
            if examined >= _SEARCHED_SLOTS:
                break
            self._weighed = extent
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

    def __init__(self, memory: SlotAllocator, part: float) -> None:
        """`part`: largest fraction of the memory that is freed in advance."""
        self._memory = memory
        self._part = part
        self.under_pressure: set[int] = set()
        """Size classes for which a store found too few free slots. A class stays in the set until
        more than twice the slots of its last store are free."""
        self.demand: dict[int, int] = {}
        """Per size class under pressure, the number of slots that its last store needed. `next`
        removes a class."""

    def wanted(self, slot_bytes: int, count: int, *, has_enough: bool) -> None:
        """Called when a store has needed `count` slots."""
        if not has_enough:
            self.under_pressure.add(slot_bytes)
        if slot_bytes in self.under_pressure and self.slots(slot_bytes, count):
            self.demand[slot_bytes] = count

    def next(self) -> tuple[int, int]:
        """Returns a size class with a demand, and how many slots it lacks."""
        slot_bytes, count = self.demand.popitem()
        free = self._memory.free_slots(slot_bytes)
        missing = self.slots(slot_bytes, count) - free
        if missing <= 0 and free > 2 * count:
            self.under_pressure.discard(slot_bytes)
        return slot_bytes, missing

    def slots(self, slot_bytes: int, count: int) -> int:
        """Returns the slots to keep free for a store of `count` slots; 0 if that is too many.

        The size classes under pressure share the spare part of the memory equally.
        """
        part = self._part / max(1, len(self.under_pressure))
        most = int(part * self._memory.available_bytes / slot_bytes)
        return min(count, most, MAX_SPARE) if count <= _FEW_SPARES * most else 0

    def forget_classes(self, blocks_of: Callable[[int], object]) -> None:
        """Forgets the demand of size classes without blocks, which shares the spare part."""
        for slot_bytes in [each for each in self.under_pressure if not blocks_of(each)]:
            self.under_pressure.discard(slot_bytes)
            self.demand.pop(slot_bytes, None)


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
