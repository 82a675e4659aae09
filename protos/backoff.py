"""Wait between attempts that fail. Pure: the caller gives the time, in seconds of any clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Wait of `delay` seconds: at first `first`, doubled by `grow` up to `most`.

    The caller decides which event starts a wait and which one makes the delay grow. It also adds
    jitter to the delay, if necessary.
    """

    first: float
    most: float
    delay: float = field(init=False)
    until: float = field(init=False, default=-math.inf)
    """Time at which the wait ends."""

    def __post_init__(self) -> None:
        self.delay = self.first

    def start(self, now: float) -> None:
        self.until = now + self.delay

    def grow(self) -> None:
        self.delay = min(2 * self.delay, self.most)

    def reset(self) -> None:
        """Ends the wait, and makes the delay the first one again."""
        self.delay, self.until = self.first, -math.inf

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
