"""Watches what processes take: their own memory, descriptors, threads.

Own memory is `RssAnon` of /proc/PID/status. That leaves out the shared region (a memfd: `RssShmem`) and the map of LMDB (a
file: `RssFile`), whose pages are the kernel's to take back; whatever Python, gRPC and malloc leak is in it. `RssShmem`
is watched too: a client that kept the region of a server that is gone would show there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["MEASURES", "Series", "Watch", "look_at"]

MEASURES = ("memory", "shared", "descriptors", "threads")


@dataclass
class Series:
    """Figures of one process over its life: (seconds since it was first looked at, figure)."""

    name: str
    measures: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {what: [] for what in MEASURES})
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it was watched."""
        points = self.measures["memory"]
        return points[-1][0] if points else 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        """Adds the figures of this moment."""
        now = time.monotonic() - self.began
        for what, figure in figures.items():
            self.measures[what].append((now, figure))


def look_at(pid: int) -> dict[str, float] | None:
    """Returns the figures of a process, in bytes where they are memory; None if it is gone."""
    try:
        rows = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        status = {row[0].rstrip(":"): int(row[1]) for row in rows if row[0] in ("RssAnon:", "RssShmem:", "Threads:")}
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if "RssAnon" not in status:  # a process that has ended and was not waited for
        return None
    memory, shared = status["RssAnon"] << 10, status["RssShmem"] << 10
    return {"memory": memory, "shared": shared, "descriptors": descriptors, "threads": status["Threads"]}


class Watch:
    """The series of all processes that are watched, by the name of what they are."""

    def __init__(self) -> None:
        self._series: dict[int, Series] = {}

    def sample(self, pid: int, name: str) -> None:
        """Looks at a process once."""
        figures = look_at(pid)
        if figures is not None:
            self._series.setdefault(pid, Series(name)).add(figures)

    def in_order(self, name: str) -> list[Series]:
        """Returns the series of this name, the first first."""
        return [series for series in self._series.values() if series.name == name]

    def of(self, name: str) -> list[Series]:
        """Returns the series of this name, the longest first."""
        return sorted(self.in_order(name), key=lambda series: series.seconds, reverse=True)
