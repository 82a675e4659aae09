"""Gate that prevents copies while vLLM's sleep mode has freed the memory of the KV tensors.

Before a sleep vLLM aborts requests and waits for saves and loads to end. However, if the server
hangs for minutes, the scheduler gives up a save although its copy may still run. Without this gate,
the copy would then access freed memory, and the worker would crash.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["EngineAsleep", "SleepGate"]


class EngineAsleep(Exception):
    """The KV tensors have no memory now."""


class SleepGate:
    """Gate for copies. Thread-safe; only the worker's main thread opens and closes the gate."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._copying = 0

    @property
    def is_open(self) -> bool:
        return self._open

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Context of one copy. Raises EngineAsleep while the gate is closed."""
        with self._changed:
            if not self._open:
                raise EngineAsleep("the engine is in sleep mode")
            self._copying += 1
        try:
            yield
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Refuses new copies. Returns whether running copies have ended within `timeout_s`."""
        with self._changed:
            self._open = False
            return self._changed.wait_for(lambda: not self._copying, timeout_s)

    def open(self) -> None:
        with self._changed:
            self._open = True
