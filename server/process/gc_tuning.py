"""How Python's cycle collector runs in the server.

The index of a full server is a million objects that live for hours and are in no cycle. A full collection walks over all of
them, and nothing is answered meanwhile: 90 ms with 200,000 blocks, in a process where one comes whenever a quarter more objects
are there. What calls leave behind in cycles (gRPC and asyncio do) is young: of 80,000 lookups and releases nothing had become
old when it was garbage. So only the young are collected by themselves, and the old when nobody calls.
"""

from __future__ import annotations

import gc
import time

__all__ = ["FullCollector", "disable_full_gc"]

_YOUNG = 2000
"""New objects between two collections of them: half a millisecond's work."""
_YOUNG_ROUNDS = 10
"""Collections of the youngest until those that survived one are looked at as well."""
_NEVER = 1 << 30

_IDLE_SECONDS = 60.0
_BUSY_SECONDS = 3600.0
_SHARE = 2000
"""A full collection may take this part of the time at most: 0.1 s, which half a million blocks take, every 200 s."""


def disable_full_gc() -> None:
    """Takes what is there by now for good, and collects of what comes only what is young. Called before serving."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _YOUNG_ROUNDS, _NEVER)


class FullCollector:
    """Has the old collected as well: now and then where nobody calls, once an hour where somebody always does.

    What becomes garbage when it is old (sessions, errors of a bad day) is little; but a server runs for months.
    """

    def __init__(self, now: float) -> None:
        self._collected_at = now
        self._took = 0.0
        self._calls = 0

    def tick(self, now: float, calls: int) -> bool:
        """Takes note of the time, in seconds, and of how many calls there have been so far; returns whether it collected."""
        idle, self._calls = calls == self._calls, calls
        pause = max(_IDLE_SECONDS if idle else _BUSY_SECONDS, self._took * _SHARE)
        if now - self._collected_at < pause:
            return False
        started = time.perf_counter()
        gc.collect()
        self._took = time.perf_counter() - started
        self._collected_at = now
        return True
