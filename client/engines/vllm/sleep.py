"""Keeping copies off the KV tensors while their memory is given back (vLLM's sleep mode, on GPUs).

A sleep aborts what runs and lets saves and loads end first: the engine keeps stepping while the scheduler's half says that some are
pending. What may be left is a copy that the scheduler has taken for lost, at a server that hung for minutes. It would fault.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Asleep", "SleepGate"]


class Asleep(Exception):
    """The KV tensors have no memory now."""


class SleepGate:
    """Copies go through it. Any thread; closed and opened by the worker's main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = True
        self._copying = 0

    @property
    def is_open(self) -> bool:
        """Whether copies may begin."""
        return self._open

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around one copy; raises Asleep if it may not begin."""
        with self._changed:
            if not self._open:
                raise Asleep("the engine sleeps")
            self._copying += 1
        try:
            yield
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let no copy begin, and wait for those that run; False if some still do after ``timeout_s``."""
        with self._changed:
            self._open = False
            return self._changed.wait_for(lambda: not self._copying, timeout_s)

    def open(self) -> None:
        """Let copies begin again."""
        with self._changed:
            self._open = True
