"""What the connector counts for vLLM's log and its ``/metrics``.

Scheduler and workers each have a Tally, which vLLM empties once per step; it adds those of all ranks and of the step's scheduler
together, and gives the sum to its log (``ConnectorStats.reduce``) and to Prometheus (``metrics``). A step in which nothing happened
costs one look at an empty dict.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import threading

from .compat import KVConnectorStats

__all__ = ["ConnectorStats", "Tally"]

Counts = dict[str, int | list[float]]
"""Numbers that were counted, and seconds that were observed, by the names of ``metrics.METRICS``."""


class ConnectorStats(KVConnectorStats):
    """The counts of an interval. vLLM sends them between its processes as plain data."""

    data: Counts

    def reset(self) -> None:
        """Starts from nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Returns the sum with another rank's, or another step's."""
        total = ConnectorStats(dict(self.data))
        for name, value in other.data.items():
            total.data[name] = _sum(total.data.get(name), value)
        return total

    def reduce(self) -> dict[str, int | float]:
        """Returns what is to be logged: numbers as they are, of seconds the mean and the greatest."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if not isinstance(value, list):
                line[name.replace(":", "_")] = value
            elif value:
                line[f"{name}_mean"] = round(sum(value) / len(value), 4)
                line[f"{name}_max"] = round(max(value), 4)
        return line

    def is_empty(self) -> bool:
        """Whether there is nothing to log."""
        return not self.data


class Tally:
    """What was counted and not yet taken. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to a counter: of one outcome, where it has some (``lookups:hit``)."""
        if amount:
            self._add(name, amount)

    def observe(self, name: str, seconds: float) -> None:
        """Note how long something took."""
        self._add(name, [seconds])

    def take(self) -> ConnectorStats | None:
        """Returns what was counted since the last call, or None."""
        if not self._counts:
            return None
        with self._lock:
            counts, self._counts = self._counts, {}
        return ConnectorStats(counts)

    def _add(self, name: str, value: int | list[float]) -> None:
        with self._lock:
            self._counts[name] = _sum(self._counts.get(name), value)


def _sum(left: int | list[float] | None, right: int | list[float]) -> int | list[float]:
    if isinstance(right, list):
        return [*left, *right] if isinstance(left, list) else list(right)
    return left + right if isinstance(left, int) else right
