"""Backing of the region: a thread allocates its pages, and reports what they lack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import chain

from ..cuda.host.region import HUGE_PAGE_BYTES, HostRegion, RegionError
from .telemetry.downgrades import Downgrades
from .telemetry.logs import get_logger

__all__ = ["RegionBacking"]

_log = get_logger(__name__)

_CHUNK_BYTES = 64 << 20
_START_BYTES = 1 << 30
"""How much of the pools' first ranges is backed before the server is ready: 0.07 to 0.17 seconds
with huge pages."""
_HUGE_PART = 0.9
"""Part of the region that should be on huge pages. The kernel often lacks some of them."""


class RegionBacking:
    """Attributes: `error`: why the region is smaller than configured; None if it is not."""

    def __init__(
        self, region: HostRegion, downgrades: Downgrades, add: Callable[[int, int], object], *, is_warm: bool = False
    ) -> None:
        """`add` gets offset and length of each backed range, on a thread.

        `is_warm`: whether an earlier server has backed pages.
        """
        self._region = region
        self._downgrades = downgrades
        self._add = add
        self._is_warm = is_warm
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: str | None = None

    def start(self, first_bytes: int) -> None:
        """Backs the first bytes of the pools, and starts a thread that backs the others. Blocks.

        If there are many pools, the thread backs the first bytes of some.
        """
        rounds = self._region.rounds(first_bytes, max(first_bytes, _CHUNK_BYTES))
        firsts, at_once = next(rounds), max(1, _START_BYTES // first_bytes)
        if self.back(firsts[:at_once]):
            left = chain([firsts[at_once:]], rounds)
            self._thread = threading.Thread(target=self._back_all, args=(left,), name="kvtier-backing", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. Blocks."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def back(self, chunks: Iterable[tuple[int, int]]) -> bool:
        """Backs and adds ranges. Returns False if memory is short, or after `close`."""
        region = self._region
        for offset, nbytes in chunks:
            if self._closing.is_set():
                return False
            try:
                region.back(offset, nbytes)
            except RegionError as error:
                self.error = f"only {region.backed_bytes} of {region.size_bytes} bytes are backed: {error}"
                _log.error("region is smaller than configured", backed_bytes=region.backed_bytes, error=str(error))
                remedy = (
                    "raise the memory limit, or lower region_size; docs/troubleshooting.md#kvtier-region-not-backed"
                )
                self._downgrades.report("region", self.error, remedy, is_logged=False)
                return False
            self._add(offset, nbytes)
        return True

    def _back_all(self, rounds: Iterable[Iterable[tuple[int, int]]]) -> None:
        if not all(map(self.back, rounds)):
            return
        region, placed = self._region, ",".join(map(str, self._region.nodes)) or "chosen by the kernel"
        if region.misplaced is not None:
            placed = f"chosen by the kernel: {region.misplaced}"
        self.report_placement()
        _log.info("region backed", bytes=region.size_bytes, huge_bytes=region.huge_bytes, memory_nodes=placed)

    def report_placement(self) -> None:
        """Reports pages that are smaller, or on other NUMA nodes, than they should be."""
        region, possible = self._region, self._region.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if self._is_warm:
            region.count_huge_pages()
        if region.huge_bytes < possible * _HUGE_PART:
            part = f"{region.huge_bytes / region.size_bytes:.0%} of the region is on huge pages"
            why = "memory is fragmented" if region.huge_bytes else "the kernel gives none (before 6.1, or they are off)"
            remedy = "kvtier doctor --only huge_pages; docs/troubleshooting.md#it-is-slow"
            self._downgrades.report("region", f"{part}, because {why}: copies are slower", remedy, subject="huge pages")
        if region.misplaced is not None:
            cause = f"the kernel chose the NUMA nodes of the region: {region.misplaced}"
            remedy = "permit the system call mbind, or set numa = off"
            self._downgrades.report("region", cause, remedy, subject="numa")
