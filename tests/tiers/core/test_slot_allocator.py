"""State machine of the slot allocator, compared with a set of slots in use."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvtier.tiers.core.slot_allocator import SlotAllocator
from kvtier.tiers.types import SLOT_ALIGNMENT

PAGE = SLOT_ALIGNMENT
EXTENT = 12 * PAGE
CLASSES = [PAGE, 2 * PAGE, 5 * PAGE, EXTENT]
"""Five pages leave a remainder of an extent; one slot of twelve fills it."""


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(EXTENT)
        self.end = 0
        self.used: dict[int, int] = {}
        """Size of each slot in use, by its offset."""
        self.retiring: dict[int, int] = {}
        """Class that wants an extent, by the extent's number."""
        self.reserved: dict[int, int] = {}
        """Class that has got an extent and has not used it, by the extent's number."""

    def size_of(self, extent: int) -> int:
        """Returns the class of an extent; 0 if it has none."""
        mine = (size for offset, size in self.used.items() if offset // EXTENT == extent)
        return next(mine, 0) or self.reserved.get(extent, 0)

    def room(self, size: int) -> int:
        extents = [extent for extent in range(self.end // EXTENT) if extent not in self.retiring]
        mine = [extent for extent in extents if self.size_of(extent) in (0, size)]
        return sum(EXTENT // size - self.slots_in(extent) for extent in mine)

    def slots_in(self, extent: int) -> int:
        return sum(offset // EXTENT == extent for offset in self.used)

    @rule(extents=st.integers(1, 3), remainder=st.sampled_from([0, PAGE]))
    def add_memory(self, extents: int, remainder: int) -> None:
        if self.end < 12 * EXTENT:
            self.allocator.add_memory(self.end, extents * EXTENT + remainder)
            self.end += extents * EXTENT

    @rule(size=st.sampled_from(CLASSES), count=st.integers(0, 30))
    def allocate(self, size: int, count: int) -> None:
        room = self.room(size)
        offsets = self.allocator.allocate((0, size), count)
        assert len(offsets) == min(count, room)
        assert offsets == sorted(set(offsets))
        assert not self.retiring.keys() & {offset // EXTENT for offset in offsets}
        self.used.update(dict.fromkeys(offsets, size))
        for offset in offsets:
            self.reserved.pop(offset // EXTENT, None)
        assert self.allocator.slot_bytes_of(offsets) == len(offsets) * size

    @rule(size=st.just(13 * PAGE), count=st.integers(1, 3))
    def allocate_more_than_an_extent(self, size: int, count: int) -> None:
        assert self.allocator.allocate((0, size), count) == []

    @rule(choice=st.randoms(use_true_random=False), part=st.sampled_from([0.1, 0.5, 1.0]))
    def release(self, choice: random.Random, part: float) -> None:
        gone = [offset for offset in self.used if choice.random() < part]
        choice.shuffle(gone)
        for offset in gone:
            del self.used[offset]
        self.allocator.release(gone)
        for extent in [each for each in self.retiring if not self.slots_in(each)]:
            self.reserved[extent] = self.retiring.pop(extent)

    @rule(number=st.integers(0, 11), size=st.sampled_from(CLASSES))
    def retire(self, number: int, size: int) -> None:
        used = sorted({offset // EXTENT for offset in self.used} - self.retiring.keys())
        if used and size != self.size_of(number := used[number % len(used)]):
            self.allocator.retire(self.allocator.extent_at(number * EXTENT), size)
            self.retiring[number] = size

    @rule(number=st.integers(0, 11))
    def restore(self, number: int) -> None:
        if self.retiring:
            number = sorted(self.retiring)[number % len(self.retiring)]
            del self.retiring[number]
            self.allocator.restore(self.allocator.extent_at(number * EXTENT))

    @rule(number=st.integers(0, 11))
    def give_back_unused(self, number: int) -> None:
        if number < self.end // EXTENT:
            self.reserved.pop(number, None)
            self.allocator.give_back_unused(self.allocator.extent_at(number * EXTENT))

    @invariant()
    def slots_do_not_overlap(self) -> None:
        end = 0
        for offset, size in sorted(self.used.items()):
            assert offset >= end, "two slots share bytes"
            end = offset + size
            assert offset // EXTENT == (end - 1) // EXTENT, "a slot lies in one extent"
            assert size == self.size_of(offset // EXTENT), "an extent has one class"
        assert end <= self.end

    @invariant()
    def books(self) -> None:
        assert self.allocator.available_bytes() == self.end
        assert self.allocator.used_bytes() == sum(self.used.values())
        wanted = {number: self.retiring.get(number) or self.size_of(number) for number in range(self.end // EXTENT)}
        assert self.allocator.extents_per_class(0) == Counter(wanted.values())
        for size in CLASSES:
            assert self.allocator.free_slots((0, size)) == self.room(size)
        for number, extent in enumerate(self.allocator.extents_after(None, 0)):
            mine = {offset for offset in self.used if offset // EXTENT == number}
            assert extent.offset == number * EXTENT
            assert self.allocator.in_use(extent) == mine
            assert extent.used == len(mine)
            assert extent.slot_bytes == self.size_of(number)
            assert extent.next_class == self.retiring.get(number, 0)
            assert self.allocator.extent_at(extent.offset + EXTENT - 1) is extent
            assert [each.offset // EXTENT for each in self.allocator.extents_after(extent, 0)] == [
                *range(number + 1, self.end // EXTENT),
                *range(number + 1),
            ]


def test_the_slots_of_an_allocator() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=60, stateful_step_count=40))
