"""How lookups end, counted for vLLM's metrics."""

from __future__ import annotations

from enum import Enum

from ...offload import CacheGeometry
from .stats import Tally

__all__ = ["LookupCounts"]


class _Outcome(Enum):
    """By the names in ``metrics``."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"


class LookupCounts:
    """Counts each lookup that somebody waits for, once. Any thread."""

    def __init__(self, geometry: CacheGeometry, tally: Tally) -> None:
        # A draft model's last block is computed anew, however much is there.
        self._never_hit = geometry.step_tokens if geometry.drop_last_block else 0
        self._tally = tally

    def not_begun(self) -> None:
        """There is nobody to ask."""
        self._count(_Outcome.UNAVAILABLE)

    def timed_out(self, seconds: float) -> None:
        """It was not waited for any longer."""
        self._count(_Outcome.TIMEOUT, seconds)

    def answered(self, start: int, limit: int, hit: int | None, seconds: float) -> None:
        """[``start``, ``limit``) tokens were asked for, and there is a hit up to ``hit``; None: the server refused or failed."""
        if hit is None:
            self._count(_Outcome.UNAVAILABLE, seconds)
        elif hit <= start:
            self._count(_Outcome.MISS, seconds)
        else:
            self._count(_Outcome.HIT if hit >= limit - self._never_hit else _Outcome.PARTIAL, seconds)

    def _count(self, outcome: _Outcome, seconds: float | None = None) -> None:
        self._tally.count(f"lookups:{outcome.value}")
        if seconds is not None:
            self._tally.observe("lookup_seconds", seconds)
