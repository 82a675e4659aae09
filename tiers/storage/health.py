"""What is wrong with a tier, by the kind of work that it is wrong with."""

from __future__ import annotations

import logging
import math
import threading
import time

from ..base import SecondaryTier

__all__ = ["TierHealth"]

_log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
"""Between two lines about one kind of work: a text may be another for each job."""


class TierHealth:
    """Keeps the `trouble` of a tier. May be used on any thread."""

    def __init__(self, tier: SecondaryTier) -> None:
        self._tier = tier
        self._by_work: dict[str, str] = {}
        self._logged: dict[str, float] = {}
        self._left_out: dict[str, int] = {}
        self._noting = threading.Lock()

    def note(self, work: str, trouble: str | None) -> None:
        """Takes down what is wrong with one kind of work, or that it went well. Logs what is new, not too often."""
        with self._noting:
            if trouble == self._by_work.get(work):
                return
            if trouble is None:
                del self._by_work[work]
            else:
                self._by_work[work] = trouble
                self._say(work, trouble)
            self._tier.trouble = "; ".join(self._by_work.values()) or None

    def _say(self, work: str, trouble: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(work, -math.inf) < _LOG_SECONDS:
            self._left_out[work] = self._left_out.get(work, 0) + 1
            return
        self._logged[work] = now
        left_out = self._left_out.pop(work, 0)
        more = f" ({left_out} more about {work} were not logged)" if left_out else ""
        _log.error("tier %s: %s%s", self._tier.name, trouble, more)
