"""Set of byte ranges: which bytes of a store have been received."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["MAX_GAPS", "ByteRanges"]

MAX_GAPS = 1024
"""Maximum number of gaps between received ranges, in addition to one per part of a store."""


class ByteRanges:
    """Set of bytes, kept as sorted disjoint ranges. Not thread-safe.

    A client chooses the ranges. `most` bounds their number, and so memory and time.
    """

    def __init__(self, most: int = MAX_GAPS) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.most = most
        """Maximum number of ranges."""

    def __iter__(self) -> zip[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def add(self, start: int, end: int) -> bool:
        """Adds a range. Returns False, and adds nothing, if there would be too many ranges."""
        first, last = self._touching(start, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        elif start >= end or len(self._starts) >= self.most:
            return start >= end
        self._starts[first:last], self._ends[first:last] = [start], [end]
        return True

    def remove(self, start: int, end: int) -> None:
        """Removes a range. If there would be too many ranges, removes more than this range."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if start >= end or first >= last:
            return
        kept = [(self._starts[first], start), (end, self._ends[last - 1])]
        kept = [(low, high) for low, high in kept if low < high]
        if len(kept) > last - first and len(self._starts) >= self.most:
            kept.pop()
        self._starts[first:last], self._ends[first:last] = [low for low, _ in kept], [high for _, high in kept]

    def covers(self, start: int, end: int) -> bool:
        """Returns whether all bytes of a range, which is not empty, are in the set."""
        number = bisect_right(self._starts, start) - 1
        return number >= 0 and end <= self._ends[number]

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the parts of a range that are not in the set, in order."""
        gaps = []
        number = bisect_right(self._ends, start)
        while start < end:
            below = number < len(self._starts)
            until = min(end, self._starts[number]) if below else end
            if start < until:
                gaps.append((start, until))
            start = self._ends[number] if below else end
            number += 1
        return gaps

    @property
    def leading(self) -> int:
        """Number of contiguous bytes in the set, from the first byte on."""
        return self._ends[0] if self._starts and not self._starts[0] else 0

    def _touching(self, start: int, end: int) -> tuple[int, int]:
        """Returns the slice of the ranges that overlap or adjoin a range."""
        return bisect_left(self._ends, start), bisect_right(self._starts, end)
