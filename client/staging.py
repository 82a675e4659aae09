"""Pool of staging buffers for blocks that are sent to or received from a server by streams.

In a process with a GPU the buffers are pinned, so that copies between GPU and buffer use DMA.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from ..cuda.host.copy import address_of
from ..cuda.host.pinning import PIN_CHUNK_BYTES, Pin, PinError
from .session.fork_guard import ForkGuarded

__all__ = ["StagingPool"]

_log = logging.getLogger(__name__)

_SMALLEST_BYTES = 4 << 20
_size_of = attrgetter("size_bytes")


class StagingPool(ForkGuarded):
    """Pool of page-aligned buffers; keeps the `keep` largest free buffers. Thread-safe."""

    def __init__(self, pin: Pin | None = None, keep: int = 4) -> None:
        """`pin` pins each buffer before its first use, or as soon as pinning is allowed."""
        self._pin = pin
        self._keep = keep
        # The garbage collector may return a buffer on a thread that holds the lock.
        self._lock = threading.RLock()
        self._free: list[_Buffer] = []
        self.refusal = ""
        """Why no further buffers are pinned."""

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[memoryview]:
        """Lends a buffer of at least `nbytes` bytes. On exit another caller may get the buffer."""
        buffer = self._take(nbytes)
        try:
            if buffer is None:
                # Rounded up to a power of two, so that batches of similar size can reuse it.
                buffer = _Buffer(1 << (max(nbytes, _SMALLEST_BYTES) - 1).bit_length(), self._pin)
            refusal = buffer.pin() if self._pin is not None else ""
            if refusal:
                self._pin = None  # the driver would refuse the next buffers too
                self.refusal = f"staging buffers are not pinned, so copies to and from the GPU are slower: {refusal}"
                _log.warning("kvtier: %s", self.refusal)
            yield memoryview(buffer.memory)
        finally:
            if buffer is not None:
                self._give_back(buffer)

    def close(self) -> None:
        """Frees all buffers. A buffer in use is freed when it is returned.

        In a forked child, keeps all buffers: their pinning belongs to the parent.
        """
        if self._is_forked:
            return
        with self._lock:
            self._keep = 0
            gone, self._free = self._free, []
        for buffer in gone:
            buffer.close()

    def _take(self, nbytes: int) -> _Buffer | None:
        with self._lock:
            for buffer in self._free.copy():
                if buffer.size_bytes >= nbytes and buffer in self._free:
                    self._free.remove(buffer)
                    return buffer
        return None

    def _give_back(self, buffer: _Buffer) -> None:
        with self._lock:
            insort(self._free, buffer, key=_size_of)
            gone = []
            while len(self._free) > self._keep and not self._is_forked:
                gone.append(self._free.pop(0))
        for smallest in gone:
            smallest.close()


@dataclass(frozen=True, slots=True)
class _Pages:
    """Address range of a buffer, for the pinning, which must not keep the buffer alive."""

    address: int
    size_bytes: int


class _Buffer:
    """Anonymous memory mapping, which Python unmaps after the last view is released."""

    def __init__(self, size_bytes: int, pin: Pin | None) -> None:
        self.memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages = _Pages(*address_of(self.memory))
        self.size_bytes = pages.size_bytes
        self._pinning = pin(pages) if pin is not None else None
        self._unpinned = list(range(0, size_bytes, PIN_CHUNK_BYTES)) if pin is not None else []
        """Offsets of chunks that are not pinned yet."""
        if self._pinning is not None:
            # Unpins the buffer even if the client is never closed. Otherwise pinning would fail for
            # the next mapping at this address.
            weakref.finalize(self, self._pinning.close).atexit = False

    def pin(self) -> str:
        """Pins the chunks that it may pin now; returns why the driver refuses, or ""."""
        try:
            while self._pinning is not None and self._unpinned:
                start = self._unpinned[-1]
                if not self._pinning.pin(start, min(PIN_CHUNK_BYTES, self.size_bytes - start)):
                    break
                self._unpinned.pop()
        except PinError as error:
            self._unpinned.clear()
            return str(error)
        return ""

    def close(self) -> None:
        """Unpins the buffer while it is still mapped."""
        if self._pinning is not None:
            self._pinning.close()
