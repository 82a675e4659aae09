"""Event-loop lag: how long a call waits before the loop runs it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

__all__ = ["LoopLag", "watch_loop"]

_SECONDS = 0.1
"""Interval of measurements. Each costs about 10 us; every delay of at least 0.1 s is detected."""
_RECENT_SECONDS = 5.0


async def watch_loop(*observers: Callable[[float], object]) -> None:
    """Sleeps repeatedly and passes the delay of each wake-up to all observers, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _SECONDS
        await asyncio.sleep(_SECONDS)
        late = max(0.0, loop.time() - due)
        for observe in observers:
            observe(late)


class LoopLag:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: deque[tuple[float, float]] = deque()
        """Time and lag of the samples that are larger than all later samples."""

    def observe(self, seconds: float) -> None:
        while self._seen and self._seen[-1][1] <= seconds:
            self._seen.pop()
        self._seen.append((self._now(), seconds))
        self._forget()

    @property
    def worst(self) -> float:
        """Maximum lag of the last 5 seconds, in seconds; 0 if there is no sample."""
        self._forget()
        return self._seen[0][1] if self._seen else 0.0

    def _forget(self) -> None:
        while self._seen and self._seen[0][0] <= self._now() - _RECENT_SECONDS:
            self._seen.popleft()
