"""Set of byte ranges, compared with a set of numbers."""

import random
from itertools import pairwise

from kvtier.tiers.core.byte_ranges import ByteRanges


def test_ranges_are_a_set_of_bytes() -> None:
    """Random additions and removals, with every answer compared."""
    chance = random.Random(7)
    for _ in range(300):
        ranges, model = ByteRanges(), set[int]()
        for _ in range(40):
            start = chance.randrange(60)
            end = start + chance.randrange(12)
            if chance.random() < 0.7:
                assert ranges.add(start, end)
                model |= {*range(start, end)}
            else:
                ranges.remove(start, end)
                model -= {*range(start, end)}
            pieces = list(ranges)
            assert {byte for low, high in pieces for byte in range(low, high)} == model
            assert all(low < high for low, high in pieces)
            assert all(one[1] < other[0] for one, other in pairwise(pieces))
            low = chance.randrange(60)
            high = low + 1 + chance.randrange(12)
            assert ranges.covers(low, high) == ({*range(low, high)} <= model)
            gaps = [byte for first, last in ranges.gaps(low, high) for byte in range(first, last)]
            assert gaps == [byte for byte in range(low, high) if byte not in model]
            assert ranges.leading == next(byte for byte in range(99) if byte not in model)


def test_the_number_of_ranges_is_bounded() -> None:
    """Further ranges are refused; a range that adjoins another is not a further one."""
    ranges = ByteRanges(most=2)
    assert ranges.add(0, 1)
    assert ranges.add(2, 3)
    assert not ranges.add(4, 5)
    assert ranges.add(3, 4)
    assert list(ranges) == [(0, 1), (2, 4)]
    ranges.remove(3, 3)
    ranges.remove(2, 3)
    assert list(ranges) == [(0, 1), (3, 4)]
    assert ranges.add(1, 3)
    ranges.most = 1
    ranges.remove(1, 2)
    assert list(ranges) == [(0, 1)]
