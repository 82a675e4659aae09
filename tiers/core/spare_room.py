"""Spare room: how many slots of each size class are freed in advance of a store."""

from __future__ import annotations

from collections.abc import Callable

from .slot_allocator import SlotAllocator

__all__ = ["SpareRoom"]

MAX_SPARE = 1024
"""Limit of slots that are freed in advance, so that the event loop is not delayed."""

_FEW_SPARES = 8


class SpareRoom:
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
