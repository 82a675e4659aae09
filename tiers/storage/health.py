"""Health of a tier: `SecondaryTier.last_error` has the current error of each operation."""

from __future__ import annotations

import logging
import math
import threading
import time

from ..secondary_tier import SecondaryTier

__all__ = ["TierHealth"]

_log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0
"""Minimum time between two log lines about one operation. Each job may report a new text."""


class TierHealth:
    """Error state of a tier: sets `last_error` of the tier. Thread-safe."""

    def __init__(self, tier: SecondaryTier) -> None:
        self._tier = tier
        self._errors: dict[str, str] = {}
        self._logged: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}
        self._lock = threading.Lock()

    def report(self, operation: str, error: str | None) -> None:
        """Records the result of an operation (None: success). Logs new errors at a limited rate."""
        with self._lock:
            if error == self._errors.get(operation):
                return
            if error is None:
                del self._errors[operation]
            else:
                self._errors[operation] = error
                self._log(operation, error)
            self._tier.last_error = "; ".join(self._errors.values()) or None

    def _log(self, operation: str, error: str) -> None:
        now = time.monotonic()
        if now - self._logged.get(operation, -math.inf) < _LOG_SECONDS:
            self._suppressed[operation] = self._suppressed.get(operation, 0) + 1
            return
        self._logged[operation] = now
        suppressed = self._suppressed.pop(operation, 0)
        more = f" ({suppressed} more about {operation} were not logged)" if suppressed else ""
        _log.error("tier %s: %s%s", self._tier.name, error, more)
