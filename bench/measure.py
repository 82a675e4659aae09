"""Clocks and statistics."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

__all__ = ["GB", "interleave", "percentile", "rate", "timed"]

GB = 1e9
"""Rates are in decimal gigabytes per second, like those of memory and networks."""


def timed(action: Callable[..., object], *arguments: object) -> float:
    """Returns how many seconds an action takes."""
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def interleave(rounds: int, actions: Mapping[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Runs each action once per round, so that what else happens on the machine befalls all of them alike.

    An action takes the round's number and returns the seconds that count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds):
        for name, action in actions.items():
            seconds[name].append(action(number))
    return seconds


def rate(nbytes: int, seconds: Sequence[float]) -> float:
    """Returns GB/s of the median round."""
    return nbytes / statistics.median(seconds) / GB


def percentile(seconds: Sequence[float], share: float) -> float:
    """Returns the smallest value that is not exceeded by `share` of all values, in milliseconds."""
    return sorted(seconds)[math.ceil(len(seconds) * share) - 1] * 1e3
