"""Wait between attempts that fail. Pure: the caller gives the time, in seconds of any clock."""

from __future__ import annotations

import math

__all__ = ["Backoff"]


class Backoff:
    """Wait of `delay` seconds. The caller decides what starts it, and what makes it grow."""

    def __init__(self, first: float, most: float) -> None:
        self.first, self.most = first, most
        self.reset()

    def reset(self) -> None:
        """Ends the wait, and makes the delay the first one again."""
        self.delay, self.until = self.first, -math.inf

    def start(self, now: float) -> None:
        self.until = now + self.delay

    def grow(self) -> None:
        """Doubles the delay, up to `most`."""
        self.delay = min(2 * self.delay, self.most)

    def ended(self, now: float, *, was_good: bool) -> None:
        """Starts a wait after an attempt. It has the first delay if the attempt was good."""
        if was_good:
            self.reset()
        self.start(now)
        self.grow()

    def is_over(self, now: float) -> bool:
        return now >= self.until

    def remaining(self, now: float) -> float:
        return max(0.0, self.until - now)
