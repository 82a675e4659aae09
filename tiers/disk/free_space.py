"""Free-page allocator of the slabs: best fit, with coalescing.

If no run is long enough, a block gets several runs. So every block can use every free page. Extents
per size class, as in the region, would not work. The core evicts blocks until enough bytes are
free, but these bytes can be spread over many extents. In a full tier, a growing size class could
wait forever until another class has an empty extent (docs/decisions/0007-disk-tier.md).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable

from .format import PageRun

__all__ = ["FreePages"]


class FreePages:
    """The free pages, as runs. A run does not cross the end of a slab."""

    def __init__(self, slab_pages: int) -> None:
        self.free_pages = 0
        self._slab_pages = slab_pages
        self._starts: dict[int, int] = {}
        """Length of each run by its first page."""
        self._ends: dict[int, int] = {}
        """First page of each run, by the page after its last page."""
        self._by_length: dict[int, OrderedDict[int, None]] = {}
        """First pages of the runs of a length. A plain dict would find the first one behind the
        places of all removed ones."""
        self._lengths: list[int] = []

    def take(self, pages: int) -> PageRun | None:
        """Allocates pages of the shortest run that is long enough; None if all are shorter."""
        at = bisect_left(self._lengths, pages)
        if at == len(self._lengths):
            return None
        start = next(iter(self._by_length[self._lengths[at]]))
        return self._take_from(start, pages)

    def gather(self, pages: int) -> list[PageRun] | None:
        """Allocates pages from as few runs as possible; None if there are not enough."""
        if pages > self.free_pages:
            return None
        taken: list[PageRun] = []
        while pages:
            longest = self._lengths[-1]
            # If the rest fits into one run, take the best fit.
            run = (
                self.take(pages) if longest >= pages else self._take_from(next(iter(self._by_length[longest])), longest)
            )
            assert run is not None
            taken.append(run)
            pages -= run.pages
        return taken

    def give_back(self, runs: Iterable[PageRun]) -> None:
        for start, pages in runs:
            self.free_pages += pages
            end = start + pages
            if start % self._slab_pages and (before := self._ends.get(start)) is not None:
                self._drop(before)
                start = before  # noqa: PLW2901 - the run grows
            if end % self._slab_pages and (length := self._starts.get(end)) is not None:
                self._drop(end)
                end += length
            self._add(start, end - start)

    def _take_from(self, start: int, pages: int) -> PageRun:
        length = self._drop(start)
        if length > pages:
            self._add(start + pages, length - pages)
        self.free_pages -= pages
        return PageRun(start, pages)

    def _add(self, start: int, pages: int) -> None:
        self._starts[start] = pages
        self._ends[start + pages] = start
        if pages not in self._by_length:
            self._by_length[pages] = OrderedDict()
            insort(self._lengths, pages)
        self._by_length[pages][start] = None

    def _drop(self, start: int) -> int:
        pages = self._starts.pop(start)
        del self._ends[start + pages]
        same = self._by_length[pages]
        del same[start]
        if not same:
            del self._by_length[pages]
            del self._lengths[bisect_left(self._lengths, pages)]
        return pages
