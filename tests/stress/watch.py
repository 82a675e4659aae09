"""Watches the memory, descriptors and threads of processes.

Own memory is `RssAnon` of /proc/PID/status. It excludes the shared region (a memfd: `RssShmem`) and
LMDB's map (a file: `RssFile`), whose pages the kernel can reclaim. It includes all leaks of Python,
gRPC and malloc. `RssShmem` is watched too: it would show a client that keeps the region of an ended
server.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["MEASURES", "Series", "Watch", "measures_of"]

MEASURES = ("memory", "shared", "descriptors", "threads")


@dataclass
class Series:
    """Values of one process: (seconds since the first sample, value)."""

    name: str
    measures: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {what: [] for what in MEASURES})
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time between the first and the last sample."""
        points = self.measures["memory"]
        return points[-1][0] if points else 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        now = time.monotonic() - self.began
        for what, figure in figures.items():
            self.measures[what].append((now, figure))


def measures_of(pid: int) -> dict[str, float] | None:
    """The measures of a process, memory in bytes; None if it has ended."""
    try:
        rows = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        status = {row[0].rstrip(":"): int(row[1]) for row in rows if row[0] in ("RssAnon:", "RssShmem:", "Threads:")}
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if "RssAnon" not in status:  # a zombie process
        return None
    memory, shared = status["RssAnon"] << 10, status["RssShmem"] << 10
    return {"memory": memory, "shared": shared, "descriptors": descriptors, "threads": status["Threads"]}


class Watch:
    """The series of all watched processes, by name."""

    def __init__(self) -> None:
        self._series: dict[int, Series] = {}

    def sample(self, pid: int, name: str) -> None:
        figures = measures_of(pid)
        if figures is not None:
            self._series.setdefault(pid, Series(name)).add(figures)

    def in_order(self, name: str) -> list[Series]:
        """The series of this name, oldest first."""
        return [series for series in self._series.values() if series.name == name]

    def of(self, name: str) -> list[Series]:
        """The series of this name, longest first."""
        return sorted(self.in_order(name), key=lambda series: series.seconds, reverse=True)
