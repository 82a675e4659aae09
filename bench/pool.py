"""The engine's side of a copy: ordinary memory, touched, larger than every cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH", "Pool", "copy_blocks", "page_aligned"]

BATCH = 64
"""Blocks in one call."""
POOL_BYTES = 512 << 20
PAGE_BYTES = 4096


class Pool:
    """Blocks of one size in a pool; batch `n` is every second block of a run, so that no two of them are neighbours."""

    def __init__(self, memory: NDArray[np.uint8], block_bytes: int, batch: int = BATCH) -> None:
        """`batch` is how many blocks a batch has."""
        self.block_bytes = block_bytes
        self.blocks = batch
        self._memory = memory.reshape(-1, block_bytes)
        self.batches = len(self._memory) // batch

    @staticmethod
    def allocate(seed: int | None) -> NDArray[np.uint8]:
        """Returns the memory of a pool, filled with random bytes, or with zeros where `seed` is None."""
        memory = page_aligned(POOL_BYTES)
        if seed is None:
            memory[:] = 0
        else:
            words = np.random.default_rng(seed).integers(0, 2**64, POOL_BYTES // 8, np.uint64, endpoint=False)
            memory.view(np.uint64)[:] = words
        return memory

    def batch(self, number: int) -> NDArray[np.uint8]:
        """Returns batch `number`, modulo how many there are: an array (blocks, bytes)."""
        number %= self.batches
        start = number // 2 * 2 * self.blocks + number % 2
        return self._memory[start : start + 2 * self.blocks : 2]

    def buffers(self, number: int) -> list[memoryview]:
        """Returns the batch as a list of views, as an engine hands it over."""
        return [block.data for block in self.batch(number)]


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Returns memory that begins with a page, as an engine's pinned memory and the region's slots do.

    numpy's own begins 16 bytes behind one. On processors whose memcpy is `rep movsb` copies between the two take up to 1.8 times as
    long as copies between two that are alike, which is all that a memcpy within numpy's memory would show.
    """
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + nbytes]


def copy_blocks(destination: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copies a batch block by block in one call of numpy: what memcpy can do with blocks of this size."""
    np.copyto(destination, source)
