"""Circuit breaker of a remote node, with probes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...protos.backoff import Backoff

__all__ = ["CircuitBreaker"]

FAILURES = 2
"""The breaker opens after this many failures in a row."""
PROBE_SECONDS = 1.0
"""Time from the failure that opens the breaker to the first probe. Each probe doubles it."""
MAX_PROBE_SECONDS = 16.0
"""Longest time between two probes of a node whose breaker is open."""
_IDLE_SECONDS = 60.0


class CircuitBreaker:
    """Circuit breaker of one node. Thread-safe.

    While the breaker is open, calls fail at once. From time to time one call is permitted as a
    probe. If the probe succeeds, the breaker closes. A request may wait for a probe until the
    call's deadline, so probes become rarer as long as they fail.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._probes = Backoff(PROBE_SECONDS, MAX_PROBE_SECONDS)
        self.reason = ""
        """Text of the last failure."""

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES

    @property
    def is_idle(self) -> bool:
        """Whether it may be replaced by a new one: it is closed, or was not asked for a minute."""
        return not self.is_open or self._clock() > self._probes.until + _IDLE_SECONDS

    def permits(self) -> bool:
        """Returns whether a call may be made. The caller must then report how it ended."""
        with self._lock:
            if not self.is_open:
                return True
            now = self._clock()
            if is_over := self._probes.is_over(now):
                self._probes.grow()
                self._probes.start(now)
            return is_over

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._probes.reset()

    def failed(self, reason: str) -> None:
        with self._lock:
            self._failures += 1
            self.reason = reason
            self._probes.start(self._clock())

    def undecided(self) -> None:
        """Called if a call was given up so early that it shows nothing: permits another probe."""
        with self._lock:
            if self.is_open and self._probes.delay > PROBE_SECONDS:
                self._probes.delay /= 2
                self._probes.until = self._clock()
