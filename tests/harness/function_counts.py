"""Counts of Python functions: the cost of an action, the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["FunctionCounter", "functions_of"]


class FunctionCounter:
    """Profile function that counts the Python functions that its threads call.

    It counts on the thread that calls `of`, and on each thread that begins after a call of
    `threading.setprofile` with it.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.count += event == "call"

    def of(self, action: Callable[[], object]) -> int:
        self.count = 0
        sys.setprofile(self)
        try:
            action()
        finally:
            sys.setprofile(None)
        return self.count


def functions_of(action: Callable[[], object]) -> int:
    """Returns how many Python functions an action calls on this thread."""
    return FunctionCounter().of(action)
