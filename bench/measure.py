"""Helpers of the benchmarks: timing, interleaved rounds, rates and percentiles."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

__all__ = ["GB", "interleave", "percentile", "rate", "timed"]

GB = 1e9
"""Decimal gigabyte, as usual for rates."""


def timed(action: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def interleave(rounds: int, actions: Mapping[str, Callable[[int], float]]) -> dict[str, list[float]]:
    """Runs each action once per round, so that other load on the machine affects all actions.

    An action gets the number of the round, and returns the seconds to record.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds):
        for name, action in actions.items():
            seconds[name].append(action(number))
    return seconds


def rate(nbytes: int, seconds: Sequence[float]) -> float:
    """Returns the rate of the median round in GB/s."""
    return nbytes / statistics.median(seconds) / GB


def percentile(seconds: Sequence[float], share: float) -> float:
    """Returns the `share` quantile in milliseconds: the nearest observed value at or above it."""
    return sorted(seconds)[math.ceil(len(seconds) * share) - 1] * 1e3
