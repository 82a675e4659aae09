"""When to try again what the server did not take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Backoff"]

_FIRST_S = 1.0
_LAST_S = 30.0


@dataclass
class Backoff:
    """Growing intervals: a full server costs a call now and then, not one per step. Times are the caller's, in seconds."""

    interval_s: float = _FIRST_S
    until: float = 0.0

    def is_over(self, now: float) -> bool:
        """Whether it may be tried (again)."""
        return now >= self.until

    def start(self, now: float) -> None:
        """Something was not taken: wait one interval."""
        self.until = now + self.interval_s

    def grow(self, now: float) -> None:
        """It is tried again: the next wait is twice as long."""
        self.interval_s = min(2 * self.interval_s, _LAST_S)
        self.until = now + self.interval_s

    def reset(self) -> None:
        """Something was taken."""
        self.interval_s, self.until = _FIRST_S, 0.0
