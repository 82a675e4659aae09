"""Background warm-up of a mapped region: fills the page table and pins the region for a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from .pinning import PinError, Pinning, split_at_chunks
from .region import HostRegion, RegionError

__all__ = ["warm_up"]

_Chunk: TypeAlias = tuple[int, int]  # offset, bytes

_ROUNDS = 60
_ROUND_SECONDS = 1.0


def warm_up(
    region: HostRegion,
    pinning: Pinning | None,
    over: Callable[[], bool],
    refused: Callable[[PinError], object],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Enters the region into this process's page table chunk by chunk, and pins it.

    So the first copies cause no page faults. A server that has just started is still backing its
    region. Chunks that are not backed yet are tried again every second. If a minute passes without
    progress, the remaining chunks are left out. A chunk is pinned only after it is backed.
    Otherwise pinning would allocate pages, and the kernel would count them against this process's
    cgroup. If the driver refuses to pin a chunk, calls ``refused`` and pins no more. Returns when
    all is done or ``over()`` is true.
    """
    unpinned: list[_Chunk] = []
    rounds = 0
    with contextlib.suppress(RegionError):  # the region was closed
        # A driver might not pin a chunk of two pools, which are two mappings.
        unbacked = [chunk for begin, end, _ in region.pools for chunk in split_at_chunks(begin, end - begin)]
        while (unbacked or unpinned) and not over():
            left = [chunk for chunk in unbacked if region.populate(*chunk) < chunk[1]]
            if pinning is not None:
                unpinned = _pin(pinning, unpinned + [chunk for chunk in unbacked if chunk not in left], refused)
            rounds = rounds + 1 if len(left) == len(unbacked) else 0
            unbacked = left if rounds < _ROUNDS else []
            if unbacked or unpinned:
                sleep(_ROUND_SECONDS)


def _pin(pinning: Pinning, chunks: Sequence[_Chunk], refused: Callable[[PinError], object]) -> list[_Chunk]:
    """Pins chunks; returns those that must be tried again."""
    try:
        return [chunk for chunk in chunks if not pinning.pin(*chunk)]
    except PinError as error:
        pinning.abandon()
        refused(error)
        return []
