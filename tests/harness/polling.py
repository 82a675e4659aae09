"""The one way in which tests wait for a condition that has no event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

__all__ = ["async_wait_until", "polls", "stays", "wait_until"]

T = TypeVar("T")


def polls(seconds: float = 60.0, interval: float = 0.01) -> Iterator[None]:
    """Yields at once and after each interval, until the time is over."""
    deadline = time.monotonic() + seconds
    yield
    while time.monotonic() < deadline:
        time.sleep(interval)
        yield


def wait_until(
    what: Callable[[], T | None],
    seconds: float = 60.0,
    *,
    otherwise: object = "condition not met",
    interval: float = 0.01,
) -> T:
    """Waits until `what()` is true; returns its value, or fails with `otherwise` or its result."""
    for _ in polls(seconds, interval):
        if found := what():
            return found
    raise AssertionError(f"{otherwise() if callable(otherwise) else otherwise} (within {seconds} s)")


def stays(what: Callable[[], object], seconds: float) -> None:
    """Fails unless `what()` is true all the time: shows that something does not happen."""
    for _ in polls(seconds):
        assert what()


async def async_wait_until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 60.0) -> None:
    """Waits until a condition is true, while the event loop runs."""
    async with asyncio.timeout(seconds):
        while True:
            met = condition()
            if met if isinstance(met, bool) else await met:
                return
            await asyncio.sleep(0.01)
