"""Limits of the calls to a remote store: bytes in flight, names to avoid."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self

__all__ = ["AvoidedNames", "ByteBudget"]

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
