"""Sequence of bytes formed by the parts of one store or load; see `TransferService`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

__all__ = ["FRAME_BYTES", "PartSequence"]

FRAME_BYTES = 1 << 20
"""Default number of bytes in a frame. Its copies fit into the cache of a processor."""


class PartSequence:
    """Sequence of parts in memory; part `i` has `sizes[i]` bytes at memory offset `offsets[i]`."""

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._offsets, self._sizes = _joined(offsets, sizes)
        self._ends = list(accumulate(self._sizes))
        self.total_bytes = self._ends[-1] if self._ends else 0

    def check(self, position: int, nbytes: int) -> None:
        """Raises ValueError if a range exceeds the sequence."""
        if position + nbytes > self.total_bytes:
            raise ValueError(f"bytes {position} to {position + nbytes} exceed the sequence of {self.total_bytes} bytes")

    def locate(self, position: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yields (memory offset, bytes) of a range's pieces. Raises ValueError beyond the end."""
        self.check(position, nbytes)
        number = bisect_right(self._ends, position)
        while nbytes:
            within = position - (self._ends[number] - self._sizes[number])
            size = min(nbytes, self._sizes[number] - within)
            yield self._offsets[number] + within, size
            position += size
            nbytes -= size
            number += 1


def _joined(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Joins parts that are adjacent in memory, because fewer and larger copies are faster."""
    starts: list[int] = []
    lengths: list[int] = []
    end = -1
    for offset, size in zip(offsets, sizes, strict=True):
        if offset == end:
            lengths[-1] += size
        else:
            starts.append(offset)
            lengths.append(size)
        end = offset + size
    return starts, lengths
