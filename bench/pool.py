"""The engine's side of a copy: ordinary memory, touched, larger than every cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH", "Pool", "copy_blocks"]

BATCH = 64
"""Blocks in one call."""
POOL_BYTES = 512 << 20


class Pool:
    """Blocks of one size in a pool; batch `n` is every second block of a run, so that no two of them are neighbours."""

    def __init__(self, memory: NDArray[np.uint8], block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._blocks = memory.reshape(-1, block_bytes)
        self.batches = len(self._blocks) // BATCH

    @staticmethod
    def allocate(seed: int | None) -> NDArray[np.uint8]:
        """Returns the memory of a pool, filled with random bytes, or with zeros where `seed` is None."""
        if seed is None:
            return np.full(POOL_BYTES, 0, np.uint8)
        words = np.random.default_rng(seed).integers(0, 2**64, POOL_BYTES // 8, np.uint64, endpoint=False)
        return words.view(np.uint8)

    def batch(self, number: int) -> NDArray[np.uint8]:
        """Returns batch `number`, modulo how many there are: an array (blocks, bytes)."""
        number %= self.batches
        start = number // 2 * 2 * BATCH + number % 2
        return self._blocks[start : start + 2 * BATCH : 2]

    def buffers(self, number: int) -> list[memoryview]:
        """Returns the batch as a list of views, as an engine hands it over."""
        return [block.data for block in self.batch(number)]


def copy_blocks(destination: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copies a batch block by block in one call of numpy: what memcpy can do with blocks of this size."""
    np.copyto(destination, source)
