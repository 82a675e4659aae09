"""Staging buffers: where bytes wait on their way to or from a server that shares no memory with us.

In a process that has a GPU they are pinned, so that its copies to and from them are DMA.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from ..cuda.host.copy import address_of
from ..cuda.host.pinning import PIN_CHUNK_BYTES, Pin, PinError

__all__ = ["StagingPool"]

_log = logging.getLogger(__name__)

_SMALLEST_BYTES = 4 << 20


class StagingPool:
    """Lends page-aligned buffers and keeps the largest few for the next time. Any thread may use it."""

    def __init__(self, pin: Pin | None = None, keep: int = 4) -> None:
        """`pin` makes what pins a buffer: before it is lent for the first time, or as soon after as that is allowed."""
        self._pin = pin
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[_Buffer] = []

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        """Lends a buffer of at least `nbytes`; its first bytes are whatever was there before.

        When it is given back no copy may be under way: it is another's then, or not pinned any more.
        """
        buffer = self._take(nbytes)
        try:
            if buffer is None:
                # A power of two, for the next batch to fit as well.
                buffer = _Buffer(1 << (max(nbytes, _SMALLEST_BYTES) - 1).bit_length(), self._pin)
            if self._pin is not None and not buffer.pin():
                self._pin = None  # what the driver refused once, it will refuse again
            yield buffer.view()
        finally:
            if buffer is not None:
                self._give_back(buffer)

    def close(self) -> None:
        """Lets go of all buffers; of those that are lent, when they are given back."""
        with self._lock:
            self._keep = 0
            gone, self._free = self._free, []
        for buffer in gone:
            buffer.close()

    def _take(self, nbytes: int) -> _Buffer | None:
        with self._lock:
            for number, buffer in enumerate(self._free):
                if buffer.size_bytes >= nbytes:
                    return self._free.pop(number)
        return None

    def _give_back(self, buffer: _Buffer) -> None:
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=lambda kept: kept.size_bytes)
            surplus = max(0, len(self._free) - self._keep)
            gone, self._free = self._free[:surplus], self._free[surplus:]
        for smallest in gone:
            smallest.close()


@dataclass(frozen=True, slots=True)
class _Pages:
    """Where a buffer is, for what pins it: that must not keep the buffer itself."""

    address: int
    size_bytes: int


class _Buffer:
    """Memory of the pool's. It is unmapped with the last view of it, and unpinned before."""

    def __init__(self, size_bytes: int, pin: Pin | None) -> None:
        self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages = _Pages(*address_of(self._memory))
        self.size_bytes = pages.size_bytes
        self._pinning = pin(pages) if pin is not None else None
        self._loose = list(range(0, size_bytes, PIN_CHUNK_BYTES)) if pin is not None else []
        """Where the chunks begin that are not pinned yet."""
        if self._pinning is not None:
            # Also where a client is dropped without being closed: the next mapping at this address would not be what is registered.
            weakref.finalize(self, self._pinning.close).atexit = False

    def view(self) -> memoryview:
        """Returns all of it; whoever has the view may release it."""
        return memoryview(self._memory)

    def pin(self) -> bool:
        """Pins what may be pinned now and is not; returns False where the driver refuses, once."""
        try:
            while self._pinning is not None and self._loose:
                start = self._loose[-1]
                if not self._pinning.pin(start, min(PIN_CHUNK_BYTES, self.size_bytes - start)):
                    break
                self._loose.pop()
        except PinError as error:
            self._loose.clear()
            _log.warning("kvtier: staging buffers are not pinned, copies of the GPU will be slower: %s", error)
            return False
        return True

    def close(self) -> None:
        """Unpins it, while it is still mapped."""
        if self._pinning is not None:
            self._pinning.close()
