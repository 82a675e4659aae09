"""Tuning of Python's cyclic garbage collector for the server.

The index of a full server has a million long-lived objects without cycles. A full collection visits
all of them and blocks the event loop: 90 ms with 200,000 blocks. By default one runs whenever a
quarter more objects exist. The cycles that calls leave behind (in gRPC and asyncio) are young:
after 80,000 lookups and releases no garbage was old. So only the young generations are collected
automatically, and the old one when the server is idle.
"""

from __future__ import annotations

import gc
import time

__all__ = ["FullCollector", "disable_full_gc"]

_YOUNG = 2000
"""New objects that trigger a collection of the youngest generation, which takes 0.5 ms."""
_YOUNG_ROUNDS = 10
"""Collections of the youngest generation per collection of the next."""
_NEVER = 1 << 30

_IDLE_SECONDS = 60.0
_BUSY_SECONDS = 3600.0
_SHARE = 2000
"""Minimum ratio of pause to duration: 0.1 s (half a million blocks) every 200 s."""


def disable_full_gc() -> None:
    """Exempts existing objects from collection; collects only young ones from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _YOUNG_ROUNDS, _NEVER)


class FullCollector:
    """Runs a full collection every minute when idle and at most hourly under load.

    Little garbage gets old (ended sessions, errors), but a server runs for months.
    """

    def __init__(self, now: float) -> None:
        self._collected_at = now
        self._took = 0.0
        self._calls = 0

    def tick(self, now: float, calls: int) -> bool:
        """Gets the time in seconds and the calls so far; returns whether it collected."""
        idle, self._calls = calls == self._calls, calls
        pause = max(_IDLE_SECONDS if idle else _BUSY_SECONDS, self._took * _SHARE)
        if now - self._collected_at < pause:
            return False
        started = time.perf_counter()
        gc.collect()
        self._took = time.perf_counter() - started
        self._collected_at = now
        return True
