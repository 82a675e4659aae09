"""When an engine's blocks may be touched: after the compute that the engine had submitted when it asked.

The one that copies looks until it is so, on the thread that carries the copy out, and gives its stream nothing before: a stream
that waits for the event of a process that was killed waits for ever, and everything behind it can neither be drained nor closed.
An engine for which neither way works (no common /dev/shm, no mapped region) waits itself, and then asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from .device_errors import CopyCancelled
from .driver import Driver, EventId

__all__ = ["After", "EventAfter", "ValueAfter", "wait_until"]

_PAUSE_SECONDS = 100e-6
"""Between two looks. A step of an engine takes tens of milliseconds; a look costs a microsecond or two."""


class After(Protocol):
    """What a copy comes after."""

    def reached(self) -> bool:
        """Whether it has happened; does not wait, and does not change back."""
        ...


class EventAfter:
    """An event of the engine's, opened here. The engine records it again only when what waits for it has been answered."""

    def __init__(self, driver: Driver, event: EventId) -> None:
        self._driver = driver
        self._event = event

    def reached(self) -> bool:
        """See After."""
        return self._driver.reached(self._event)


class ValueAfter:
    """A counter in memory that both processes map, which the engine's stream writes (`Driver.write_value`), each value higher.

    It needs neither a driver's handle nor /dev/shm, and looking at it is no call of the driver. ``word`` is 8 bytes of the region.
    """

    def __init__(self, word: memoryview, value: int) -> None:
        self._word = word.cast("Q")
        self._value = value

    def reached(self) -> bool:
        """See After."""
        return bool(self._word[0] >= self._value)


def wait_until(after: After, cancelled: Callable[[], bool]) -> None:
    """Returns when ``after`` is reached. Raises CopyCancelled when ``cancelled`` says so first: its engine may never get there."""
    while not after.reached():
        if cancelled():
            raise CopyCancelled("the engine ended before its compute did")
        time.sleep(_PAUSE_SECONDS)
