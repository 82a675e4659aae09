"""How late the event loop is: what a call waits before anything is done for it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

__all__ = ["LoopLag", "watch_loop"]

_SECONDS = 0.1
"""Ten times a second costs some ten microseconds each, and meets what holds the loop up for a tenth of a second for certain."""
_RECENT_SECONDS = 5.0


async def watch_loop(*observers: Callable[[float], object]) -> None:
    """Tells all observers, until it is cancelled, how many seconds later than asked for each of its sleeps ends."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _SECONDS
        await asyncio.sleep(_SECONDS)
        late = max(0.0, loop.time() - due)
        for observe in observers:
            observe(late)


class LoopLag:
    """The latest wake-up of the last seconds, for people who look now."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: deque[tuple[float, float]] = deque()
        """When, and how late, in seconds; those that no later one outdoes."""

    def observe(self, seconds: float) -> None:
        """Takes note of a wake-up."""
        while self._seen and self._seen[-1][1] <= seconds:
            self._seen.pop()
        self._seen.append((self._now(), seconds))
        self._forget()

    @property
    def worst(self) -> float:
        """How late it was, in seconds; 0 where nothing was seen lately."""
        self._forget()
        return self._seen[0][1] if self._seen else 0.0

    def _forget(self) -> None:
        while self._seen and self._seen[0][0] <= self._now() - _RECENT_SECONDS:
            self._seen.popleft()
