"""Making a mapped region fast to copy from and into, in the background: its pages entered, and pinned where there is a GPU."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from .pinning import PIN_CHUNK_BYTES, PinError, Pinning
from .region import HostRegion, RegionError

__all__ = ["warm_up"]

_log = logging.getLogger(__name__)

_Chunk: TypeAlias = tuple[int, int]  # offset, bytes

_ROUNDS = 60
_ROUND_SECONDS = 1.0


def warm_up(
    region: HostRegion,
    pinning: Pinning | None,
    over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Enters the region into our page table chunk by chunk, so that the first copies do not pay for it, and pins it.

    A server that has just been started is still backing its region: what is not there yet is looked for again, until a minute has
    passed without progress. It is not pinned either, for that would charge us with it. Pinning waits as long as it is not allowed.
    Returns when all is done, or when the session is ``over``.
    """
    bare = [
        (start, min(PIN_CHUNK_BYTES, region.size_bytes - start))
        for start in range(0, region.size_bytes, PIN_CHUNK_BYTES)
    ]
    loose: list[_Chunk] = []
    rounds = 0
    with contextlib.suppress(RegionError):  # closed meanwhile
        while (bare or loose) and not over():
            left = [chunk for chunk in bare if not _populate(region, chunk)]
            if pinning is not None:
                loose = _pin(pinning, loose + [chunk for chunk in bare if chunk not in left])
            rounds = rounds + 1 if len(left) == len(bare) else 0
            bare = left if rounds < _ROUNDS else []
            if bare or loose:
                sleep(_ROUND_SECONDS)


def _populate(region: HostRegion, chunk: _Chunk) -> bool:
    region.populate(*chunk)
    return region.count_backed(*chunk) == chunk[1]


def _pin(pinning: Pinning, chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """Pins what may be pinned now; returns what is to be tried again."""
    try:
        return [chunk for chunk in chunks if not pinning.pin(*chunk)]
    except PinError as error:
        pinning.give_up()
        _log.warning("kvtier: the region is not pinned, copies of the GPU will be slower: %s", error)
        return []
