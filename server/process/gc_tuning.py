"""Tuning of Python's cyclic garbage collector and of malloc's heap for the server.

The index of a full server has a million long-lived objects without cycles. A full collection visits
all of them and blocks the event loop: 90 ms with 200,000 blocks. By default Python runs a full
collection whenever the number of objects has grown by a quarter. Calls leave cycles of gRPC and
asyncio objects, but these are found by collections of the young generations: after 80,000 lookups
and releases no garbage was in the old generation. So only the young generations are collected
automatically. `FullCollector` collects the old generation.

`tune_malloc` makes malloc keep freed memory, so that the memory of a burst of requests would stay
in the process. `HeapTrimmer` returns it to the kernel.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from ...cuda.host.memory import own_bytes, trim_heap

__all__ = ["FullCollector", "HeapTrimmer", "disable_full_gc"]

_YOUNG = 2000
"""Number of new objects that triggers a collection of the youngest generation (0.5 ms)."""
_YOUNG_ROUNDS = 5
"""Collections of the youngest generation per collection of the next."""
_NEVER = 1 << 30

_IDLE_SECONDS = 60.0
_BUSY_SECONDS = 3600.0
_GROWN_BLOCKS = 250_000
"""Number of Python's memory blocks, about 20 MiB, after whose growth a busy server collects like an
idle one."""
_TRIM_SECONDS = 5.0
_KEPT_BYTES = 32 << 20
"""Memory that the process keeps for further requests, in addition to what it had after a trim."""
_AGAIN_SECONDS, _MAX_AGAIN_SECONDS = 10.0, 3600.0
"""Time to a further trim if much memory was in use during the last one, doubled after each."""
_SHARE = 2000
"""Minimum ratio of the pause before a full collection to the duration of the previous one.

A collection of half a million blocks takes 0.1 s, so the next one starts at least 200 s later.
"""


def disable_full_gc() -> None:
    """Exempts existing objects from collection and disables automatic full collections."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _YOUNG_ROUNDS, _NEVER)


class FullCollector:
    """Runs full collections: at most one per hour, or one per minute while no calls arrive.

    Ended sessions and errors leave little garbage in the old generation. Without full collections
    this garbage would accumulate for months. A client that cancels masses of calls leaves more, so
    the server also collects once per minute while the number of objects grows.
    """

    def __init__(self, now: float) -> None:
        self._collected_at = now
        self._took = 0.0
        self._calls = 0
        self._blocks = sys.getallocatedblocks()

    def tick(self, now: float, calls: int) -> bool:
        """Runs a collection if it is due; returns whether the collection ran.

        `now` is in seconds; `calls` is the number of calls since the start of the server.
        """
        idle, self._calls = calls == self._calls, calls
        has_grown = sys.getallocatedblocks() - self._blocks > _GROWN_BLOCKS
        pause = max(_IDLE_SECONDS if idle or has_grown else _BUSY_SECONDS, self._took * _SHARE)
        if now - self._collected_at < pause:
            return False
        started = time.perf_counter()
        gc.collect()
        self._took = time.perf_counter() - started
        self._blocks = sys.getallocatedblocks()
        self._collected_at = now
        return True


class HeapTrimmer:
    """Returns free memory to the kernel if the process has grown in two checks in a row.

    The resident memory decides, not the free bytes of the heap: most of those can be free pages
    that an earlier trim has returned. Memory that was in use during a trim may be free later, which
    the resident memory does not show, so such a trim is repeated.
    """

    def __init__(self, now: float) -> None:
        self._checked_at = now
        self._least = self._floor = own_bytes()
        """The least resident memory: since the last trim, and since the start."""
        self._has_grown = False
        self._again_at = float("inf")
        self._again_seconds = _AGAIN_SECONDS

    async def tick(self, now: float) -> bool:
        """Checks the memory every five seconds; returns whether the heap was trimmed."""
        if now - self._checked_at < _TRIM_SECONDS:
            return False
        self._checked_at = now
        resident = own_bytes()
        self._least = min(self._least, resident)
        had_grown, self._has_grown = self._has_grown, resident > self._least + _KEPT_BYTES
        if had_grown and self._has_grown:
            self._again_seconds = _AGAIN_SECONDS
        elif now < self._again_at:
            return False
        await asyncio.to_thread(trim_heap)  # takes 0.1 s for hundreds of MiB
        self._least, self._has_grown = own_bytes(), False
        self._floor = min(self._floor, self._least)
        self._again_at = float("inf")
        if self._least > self._floor + _KEPT_BYTES:
            self._again_at = now + self._again_seconds
            self._again_seconds = min(2 * self._again_seconds, _MAX_AGAIN_SECONDS)
        return True
