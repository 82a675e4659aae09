"""Tuning of Python's cyclic garbage collector for the server.

The index of a full server has a million long-lived objects without cycles. A full collection visits
all of them and blocks the event loop: 90 ms with 200,000 blocks. By default Python runs a full
collection whenever the number of objects has grown by a quarter. Calls leave cycles of gRPC and
asyncio objects, but these are found by collections of the young generations: after 80,000 lookups
and releases no garbage was in the old generation. So only the young generations are collected
automatically. `FullCollector` collects the old generation.
"""

from __future__ import annotations

import gc
import time

__all__ = ["FullCollector", "disable_full_gc"]

_YOUNG = 2000
"""Number of new objects that triggers a collection of the youngest generation (0.5 ms)."""
_YOUNG_ROUNDS = 10
"""Collections of the youngest generation per collection of the next."""
_NEVER = 1 << 30

_IDLE_SECONDS = 60.0
_BUSY_SECONDS = 3600.0
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
    this garbage would accumulate for months.
    """

    def __init__(self, now: float) -> None:
        self._collected_at = now
        self._took = 0.0
        self._calls = 0

    def tick(self, now: float, calls: int) -> bool:
        """Runs a collection if it is due; returns whether the collection ran.

        `now` is in seconds; `calls` is the number of calls since the start of the server.
        """
        idle, self._calls = calls == self._calls, calls
        pause = max(_IDLE_SECONDS if idle else _BUSY_SECONDS, self._took * _SHARE)
        if now - self._collected_at < pause:
            return False
        started = time.perf_counter()
        gc.collect()
        self._took = time.perf_counter() - started
        self._collected_at = now
        return True
