"""Codec of copy plans: blocks and slots as integer arrays in the payload of a message."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

__all__ = ["Groups", "pack_plan", "unpack_plan"]

Groups: TypeAlias = Mapping[int, tuple[Sequence[int], Sequence[int]]]
"""By group of the cache: blocks, and the offsets of their slots in the region."""


def pack_plan(groups: Groups) -> tuple[list[tuple[int, int]], bytes]:
    """Returns pairs (group, number of blocks), and the payload: all blocks, then all offsets."""
    blocks, offsets = array("Q"), array("Q")
    for of_group in groups.values():
        blocks.extend(of_group[0])
        offsets.extend(of_group[1])
    return [(group, len(ids)) for group, (ids, _) in groups.items()], (blocks + offsets).tobytes()


def unpack_plan(counts: Sequence[tuple[int, int]], payload: bytes) -> Iterator[tuple[int, array[int], array[int]]]:
    """Yields group, blocks and offsets from the result of `pack_plan`."""
    numbers = array("Q", payload)
    start, half = 0, len(numbers) // 2
    for group, count in counts:
        yield group, numbers[start : start + count], numbers[half + start : half + start + count]
        start += count
