"""Slot allocator of the host region: extents that size classes claim and return.

Blocks of several sizes share one region (groups of a hybrid model, or two models). A size class
claims an extent and cuts it into equal slots. When all slots of an extent are free again, any class
may claim the extent. So there is no fragmentation within a class. A retiring extent gives no slot.
When all of its slots are free, it goes to the class that wants it.

The region consists of memory pools: a common one, and one for each tenant that has memory of its
own. An extent never leaves its pool, and each pool has size classes of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import TypeAlias

from ..types import SLOT_ALIGNMENT

__all__ = ["Extent", "SizeClass", "SlotAllocator", "extent_bytes_for"]

SizeClass: TypeAlias = tuple[int, int]
"""Number of a memory pool, and bytes of a slot."""

_BYTES_PER_OFFSET = 64
"""Slot bytes per rank: the offsets of a block, 8 bytes each, take an eighth of a slot or less. This
matters only for more than 64 ranks."""


def extent_bytes_for(region_bytes: int) -> int:
    """Returns the size of an extent: 64 MiB in a region of at least 2 GiB and less than 64 GiB.

    In a smaller region an extent is 1/32 of the region, but at least 64 KiB. In a larger region an
    extent is 1/512 of the region, but at most 256 MiB. The size is rounded down to a power of two.
    A part of a block must fit into an extent, and each size class wastes at most one extent.
    """
    wanted = max(min(region_bytes // 32, 64 << 20), min(region_bytes // 512, 256 << 20))
    return 1 << (max(wanted, 64 << 10).bit_length() - 1)


class Extent:
    """A piece of a memory pool that belongs to one size class or to none."""

    __slots__ = ("free", "next_class", "offset", "pool", "setbacks", "slot_bytes", "used")

    def __init__(self, offset: int, pool: int = 0) -> None:
        self.offset = offset
        self.pool = pool
        self.slot_bytes = 0
        self.free: list[int] = []
        """Offsets of free slots; allocated from the end."""
        self.used = 0
        self.next_class = 0
        """Bytes of a slot of the class that gets the extent when all slots are free; 0 if it is not
        retiring."""
        self.setbacks = 0
        """How often the extent has stayed with its class, although another one wanted it."""


class SlotAllocator:
    """Allocates slots. Sizes and offsets are in bytes, relative to the start of the region."""

    def __init__(
        self,
        extent_bytes: int,
        on_cut: Callable[[int, int], object] = lambda _, __: None,
        pool_starts: Sequence[int] = (0,),
    ) -> None:
        """`on_cut` gets offset and slot size of each extent that is divided into slots.

        `pool_starts`: offset at which each memory pool begins, multiples of `extent_bytes`.
        """
        self.extent_bytes = extent_bytes
        self._on_cut = on_cut
        self._pool_starts = pool_starts
        self._extents: dict[int, Extent] = {}
        self._per_pool = [0] * len(pool_starts)
        self._unclaimed: list[list[Extent]] = [[] for _ in pool_starts]
        self._with_room: dict[SizeClass, dict[Extent, None]] = {}

    def extents_in(self, pool: int) -> int:
        """Returns the number of extents of a pool."""
        return self._per_pool[pool]

    def available_bytes(self, pool: int | None = None) -> int:
        """Returns the bytes of the extents of one pool, or of all."""
        return (sum(self._per_pool) if pool is None else self._per_pool[pool]) * self.extent_bytes

    def pool_at(self, offset: int) -> int:
        return bisect_right(self._pool_starts, offset) - 1

    def add_memory(self, offset: int, nbytes: int) -> None:
        """Adds whole extents, without those that it has; a remainder at the end is not used."""
        starts = range(offset, offset + nbytes - self.extent_bytes + 1, self.extent_bytes)
        fresh = [self._add(start) for start in starts if start // self.extent_bytes not in self._extents]
        # Extents are claimed from the end of the list. Low offsets come last in the list, because
        # the region allocates their pages first.
        for pool, unclaimed in enumerate(self._unclaimed):
            unclaimed[:0] = [extent for extent in reversed(fresh) if extent.pool == pool]

    def recover(self, offset: int, slot_bytes: int, used: Collection[int]) -> None:
        """Adds an extent of an earlier server with its used slots. No slot is used: any class."""
        extent = self._add(offset)
        if not used:
            self._unclaimed[extent.pool].append(extent)
            return
        extent.slot_bytes = slot_bytes
        extent.free = [slot for slot in reversed(self.slots_of(extent)) if slot not in used]
        extent.used = len(used)
        if extent.free:
            self._has_room(extent)

    def slot_bytes_for(self, part_bytes: int, world_size: int = 1) -> int:
        """Returns the size class of a part, which is large enough for what its block needs.

        A block has a list of `world_size` offsets, even if only one part has a slot.
        """
        least = max(part_bytes, world_size * _BYTES_PER_OFFSET)
        return -(-least // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def allocate(self, size_class: SizeClass, count: int) -> list[int]:
        """Returns up to `count` free slots of a class, in ascending order."""
        taken: list[int] = []
        while len(taken) < count:
            with_room = self._with_room.get(size_class, {})
            extent = next(iter(with_room), None) or self._claim(*size_class)
            if extent is None:
                break
            number = min(count - len(taken), len(extent.free))
            offsets = extent.free[-number:]
            del extent.free[-number:]
            extent.used += number
            taken += offsets
            if not extent.free:
                self._has_no_room(extent)
        taken.sort()
        return taken

    def release(self, offsets: Iterable[int]) -> None:
        for number, together in groupby(offsets, self.extent_bytes.__rfloordiv__):
            extent = self._extents[number]
            free = list(together)
            extent.free += free
            extent.used -= len(free)
            if not extent.next_class:
                self._has_room(extent)
            if not extent.used:
                self._give_back(extent)

    def retire(self, extent: Extent, next_class: int) -> None:
        """Gives no slot of an extent from now on. The extent must have slots in use.

        `next_class`: bytes of a slot of the class that gets the extent.
        """
        extent.next_class = next_class
        self._has_no_room(extent)

    def restore(self, extent: Extent) -> None:
        """Ends the retirement of an extent, which stays with its class."""
        extent.next_class = 0
        extent.setbacks += 1
        if extent.free:
            self._has_room(extent)

    def give_back_unused(self, extent: Extent) -> None:
        """Lets any class claim an extent that a class got after a retirement and has not used."""
        if extent.slot_bytes and not extent.used:
            self._give_back(extent)

    def extents_per_class(self, pool: int) -> Counter[int]:
        """Returns the number of extents of a pool by slot size; of a retiring one by the next."""
        mine = (extent for extent in self._extents.values() if extent.pool == pool)
        return Counter(extent.next_class or extent.slot_bytes for extent in mine)

    def in_use(self, extent: Extent) -> set[int]:
        return set(self.slots_of(extent)).difference(extent.free)

    def extent_at(self, offset: int) -> Extent:
        return self._extents[offset // self.extent_bytes]

    def extents_after(self, extent: Extent | None, pool: int) -> list[Extent]:
        """Returns the extents of a pool, in a fixed order, but those after `extent` first."""
        extents = [each for each in self._extents.values() if each.pool == pool]
        start = 0 if extent is None else extents.index(extent) + 1
        return extents[start:] + extents[:start]

    def slots_of(self, extent: Extent) -> range:
        """Returns the offsets of all slots of an extent; empty if it belongs to no class."""
        last = extent.offset + self.extent_bytes - extent.slot_bytes
        return range(extent.offset, last + 1, extent.slot_bytes) if extent.slot_bytes else range(0)

    def slot_bytes_of(self, offsets: Iterable[int]) -> int:
        """Returns the size of slots in use."""
        return sum(self.extent_at(offset).slot_bytes for offset in offsets)

    def free_slots(self, size_class: SizeClass) -> int:
        """Returns how many slots a class can get without an eviction."""
        pool, slot_bytes = size_class
        claimed = sum(len(extent.free) for extent in self._with_room.get(size_class, ()))
        return claimed + len(self._unclaimed[pool]) * (self.extent_bytes // slot_bytes)

    def used_bytes(self) -> int:
        return sum(extent.used * extent.slot_bytes for extent in self._extents.values())

    def _add(self, offset: int) -> Extent:
        extent = self._extents[offset // self.extent_bytes] = Extent(offset, self.pool_at(offset))
        self._per_pool[extent.pool] += 1
        return extent

    def _claim(self, pool: int, slot_bytes: int) -> Extent | None:
        if not self._unclaimed[pool] or slot_bytes > self.extent_bytes:
            return None
        extent = self._unclaimed[pool].pop()
        self._cut(extent, slot_bytes)
        return extent

    def _cut(self, extent: Extent, slot_bytes: int) -> None:
        """Divides an extent without used slots into slots of a class."""
        extent.slot_bytes = slot_bytes
        extent.free = list(self.slots_of(extent))[::-1]
        self._on_cut(extent.offset, slot_bytes)
        self._has_room(extent)

    def _has_room(self, extent: Extent) -> None:
        self._with_room.setdefault((extent.pool, extent.slot_bytes), {})[extent] = None

    def _has_no_room(self, extent: Extent) -> None:
        """Removes an extent from those with room, and its class if that was the last one."""
        size_class = (extent.pool, extent.slot_bytes)
        with_room = self._with_room.get(size_class, {})
        with_room.pop(extent, None)
        if not with_room:
            self._with_room.pop(size_class, None)

    def _give_back(self, extent: Extent) -> None:
        """Gives an extent without used slots to the class that wants it, or to any class."""
        self._has_no_room(extent)
        extent.setbacks = 0
        if extent.next_class:
            self._cut(extent, extent.next_class)
            extent.next_class = 0
            return
        extent.slot_bytes = 0
        extent.free = []
        self._unclaimed[extent.pool].append(extent)
