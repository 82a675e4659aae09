"""Staging buffers: where bytes wait on their way to or from a server that shares no memory with us."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

__all__ = ["StagingPool"]

_SMALLEST_BYTES = 4 << 20


class StagingPool:
    """Lends page-aligned buffers and keeps the largest few for the next time. Any thread may use it."""

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        """Lends a buffer of at least `nbytes`; its first bytes are whatever was there before."""
        buffer = self._take(nbytes)
        try:
            yield memoryview(buffer)
        finally:
            with self._lock:
                self._free.append(buffer)
                self._free.sort(key=len)
                # Those that are let go are unmapped with the last view of them.
                del self._free[: -self._keep]

    def _take(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            for number, buffer in enumerate(self._free):
                if len(buffer) >= nbytes:
                    return self._free.pop(number)
        size = 1 << (max(nbytes, _SMALLEST_BYTES) - 1).bit_length()
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
