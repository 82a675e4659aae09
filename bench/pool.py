"""Engine memory for copies: ordinary pages that are already allocated, larger than the caches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH", "Pool", "copy_blocks", "page_aligned"]

BATCH = 64
"""Number of blocks in one call."""
POOL_BYTES = 512 << 20
PAGE_BYTES = 4096


class Pool:
    """Memory in blocks of one size.

    A batch has every second block of a range, so that no two blocks of it are adjacent.
    """

    def __init__(self, memory: NDArray[np.uint8], block_bytes: int, batch: int = BATCH) -> None:
        """`batch` is the number of blocks in a batch."""
        self.block_bytes = block_bytes
        self.blocks = batch
        self._memory = memory.reshape(-1, block_bytes)
        self.batches = len(self._memory) // batch

    @staticmethod
    def allocate(seed: int | None) -> NDArray[np.uint8]:
        """Returns memory with random bytes, or with zeros if `seed` is None."""
        memory = page_aligned(POOL_BYTES)
        if seed is None:
            memory[:] = 0
        else:
            words = np.random.default_rng(seed).integers(0, 2**64, POOL_BYTES // 8, np.uint64, endpoint=False)
            memory.view(np.uint64)[:] = words
        return memory

    def batch(self, number: int) -> NDArray[np.uint8]:
        """Returns batch `number` (modulo the number of batches) as an array (blocks, bytes)."""
        number %= self.batches
        start = number // 2 * 2 * self.blocks + number % 2
        return self._memory[start : start + 2 * self.blocks : 2]

    def buffers(self, number: int) -> list[memoryview]:
        """Returns the batch as a list of views, as engines pass it to a client."""
        return [block.data for block in self.batch(number)]


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Returns page-aligned memory, because engines' pinned memory and the region's slots are too.

    Numpy allocates large arrays 16 bytes after the beginning of a page. If memcpy is `rep movsb`,
    copies between buffers of different alignment take up to 1.8 times as long.
    """
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + nbytes]


def copy_blocks(destination: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copies a batch in one call of numpy. Its speed is that of memcpy for this block size."""
    np.copyto(destination, source)
