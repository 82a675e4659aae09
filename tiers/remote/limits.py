"""Limits of the calls to a remote store: circuit breaker, bytes in flight, names to avoid."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from ...protos.backoff import Backoff

__all__ = ["AvoidedNames", "ByteBudget", "CircuitBreaker"]

FAILURES = 2
"""The breaker opens after this many failures in a row."""
PROBE_SECONDS = 1.0
"""Time from the failure that opens the breaker to the first probe. Each probe doubles it."""
MAX_PROBE_SECONDS = 16.0
"""Longest time between two probes of a node whose breaker is open."""
_IDLE_SECONDS = 60.0

MAX_AVOIDED = 1 << 14


class AvoidedNames:
    """Names whose values cannot be loaded for now. Thread-safe.

    A name is avoided for `seconds`, or until `with_keys` gets other keys. If there are too many
    names, the oldest ones are forgotten.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[bytes, float] = {}
        self._keys: object = None

    def with_keys(self, keys: object) -> Self:
        """Forgets all names if these are other keys of encrypted values than before."""
        if keys != self._keys:
            with self._lock:
                self._until.clear()
                self._keys = keys
        return self

    def add(self, names: Iterable[bytes]) -> None:
        until = self._clock() + self._seconds
        with self._lock:
            for name in names:
                self._until.pop(name, None)  # the order is that of the times
                self._until[name] = until
            for name in list(itertools.islice(self._until, max(0, len(self._until) - MAX_AVOIDED))):
                del self._until[name]

    def __contains__(self, name: bytes) -> bool:
        return self._until.get(name, 0.0) > self._clock()


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


class ByteBudget:
    """Limit for the bytes of all transfers that run at the same time. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._freed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Waits until the bytes fit into the budget, and holds them until the `with` block ends.

        More bytes than the whole budget are permitted when nothing else is in flight. The wait is
        short, because every transfer has a deadline.
        """
        with self._freed:
            self._freed.wait_for(lambda: not self._used_bytes or self._used_bytes + nbytes <= self._limit_bytes)
            self._used_bytes += nbytes
        try:
            yield
        finally:
            with self._freed:
                self._used_bytes -= nbytes
                self._freed.notify_all()
