"""Long-term trend of a noisy measure.

The slope is Theil-Sen's: the median of the slopes between all pairs of points (Sen 1968, J. Am.
Stat. Assoc. 63). A spike or a step at one end does not change it, but a leak does, even with large
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

__all__ = ["TOLERANCE", "Tolerance", "Trend", "slope_of", "trend_of"]

WARM_UP_SECONDS = 180.0
"""Time until pools, the learning eviction policies and the request log have their full size."""
SHORTEST_SECONDS = 60.0
"""Shortest time after the warm-up for a verdict."""
_MOST_POINTS = 240

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Tolerance:
    """Growth per minute that is not a leak.

    `once`: accepted growth in the whole time, because a pool may grow. In a short time this is more
    than `per_minute` allows.
    """

    per_minute: float
    once: float

    def most(self, seconds: float) -> float:
        """Returns the accepted growth per minute of a series of this length."""
        return max(self.per_minute, 60 * self.once / max(seconds, SHORTEST_SECONDS))


TOLERANCE = {
    "memory": Tolerance(2 << 20, 6 << 20),
    "shared": Tolerance(1 << 20, 3 << 20),
    "descriptors": Tolerance(0.5, 3),
    "threads": Tolerance(0.5, 3),
}
"""By measure; memory in bytes.

At the pace of two cores 2 MiB/min are 140 bytes per call, or 10 KiB per lost session. A malloc
whose arenas still grow uses half of it.
"""


@dataclass(frozen=True)
class Trend:
    """Verdict on one measure of one process.

    Attributes:
        seconds: judged time, after the warm-up.
        per_minute: the slope.
        flat: whether it is within the tolerance; None if the time was too short.
    """

    what: str
    seconds: float
    level: float
    per_minute: float
    flat: bool | None


def slope_of(points: Points) -> float:
    """The slope per unit of time; 0 for less than two points."""
    step = -(-len(points) // _MOST_POINTS)
    some = points[:: step or 1]
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in combinations(some, 2) if x1 > x0]
    return median(slopes) if slopes else 0.0


def trend_of(what: str, points: Points) -> Trend:
    """Judges a series of (seconds, value)."""
    judged = [point for point in points if point[0] >= WARM_UP_SECONDS]
    seconds = judged[-1][0] - judged[0][0] if judged else 0.0
    per_minute = 60 * slope_of(judged)
    flat = None if seconds < SHORTEST_SECONDS else per_minute <= TOLERANCE[what].most(seconds)
    level = median(figure for _, figure in judged or points) if points else 0.0
    return Trend(what, seconds, level, per_minute, flat)
