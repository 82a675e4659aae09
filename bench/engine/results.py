"""Figures computed from the measurements of the engines."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from bench.measure import percentile

__all__ = [
    "TARGET",
    "Idle",
    "IdleFound",
    "Processes",
    "Runs",
    "Turns",
    "Verdict",
    "compare",
    "hook_microseconds",
    "interval",
    "verdict",
]

TIE = 1e-3
"""Difference of log-probabilities below which two tokens tie. Noise of float32 is 1e-5; one wrong
block changes log-probabilities by 1e-2."""
RESAMPLES = 2000
TARGET = 1.02
"""Maximum duration of steps with an idle connector, relative to steps without."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Figures of one configuration. The first turn stores; later turns may load."""

    first_p50_ms: float
    later_p50_ms: float
    later_p95_ms: float
    tokens_per_second: float
    seconds: float
    external_hits: int
    computed: int

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Turns:
        """Sums up the result of the engine's process."""
        rows = result["rows"]
        first = [row["first_token_seconds"] for row in rows if row["turn"] == 1]
        later = [row["first_token_seconds"] for row in rows if row["turn"] > 1]
        prompts = sum(row["prompt_tokens"] for row in rows)
        return cls(
            first_p50_ms=percentile(first, 0.5),
            later_p50_ms=percentile(later, 0.5),
            later_p95_ms=percentile(later, 0.95),
            tokens_per_second=sum(len(row["tokens"]) for row in rows) / result["seconds"],
            seconds=result["seconds"],
            external_hits=round(result["external_hits"]),
            computed=round(prompts - result["external_hits"] - result["local_hits"]),
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one configuration, each in its own engine; at least one."""

    runs: tuple[Turns, ...]

    @property
    def middle(self) -> Turns:
        """Median of each figure over the runs. The median of two runs is their mean."""
        medians = {
            field.name: statistics.median(getattr(run, field.name) for run in self.runs) for field in fields(Turns)
        }
        counts = {name: round(medians[name]) for name in ("external_hits", "computed")}
        return Turns(**{**medians, **counts})

    @property
    def later_p50s(self) -> tuple[float, float]:
        """Lowest and highest p50 of the runs: milliseconds to the first token of later turns."""
        found = [run.later_p50_ms for run in self.runs]
        return min(found), max(found)

    def faster(self, alone: Runs) -> tuple[float, float]:
        """Returns the lowest and the highest speed-up over the engine alone."""
        (least, most), (alone_least, alone_most) = self.later_p50s, alone.later_p50s
        return alone_least / most, alone_most / least


def compare(reference: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """Returns the wrong answers, and the number of answers that differ only after a tie.

    A tie is a token with an alternative of nearly equal probability.
    """
    wrong, ties = [], 0
    for right, row in zip(reference, rows, strict=True):
        differs = [a != b for a, b in zip(right["tokens"], row["tokens"], strict=True)]
        if not any(differs):
            continue
        position = differs.index(True)
        if right["margins"][position] < TIE:
            ties += 1
        else:
            wrong.append(f"conversation {right['conversation']}, turn {right['turn']}, token {position + 1}")
    return wrong, ties


class Verdict(Enum):
    """Whether idle steps meet the target. The value is the text for the report."""

    YES = "yes"
    NO = "no"
    OPEN = "not decided"


def verdict(low: float, high: float, target: float) -> Verdict:
    """Returns a verdict that is decided only if the whole interval is on one side of the target."""
    if high <= target:
        return Verdict.YES
    return Verdict.NO if low > target else Verdict.OPEN


@dataclass(frozen=True, slots=True)
class Idle:
    """Steps with a connector, compared with steps without.

    ``ratio``: the median over turns of the ratio within a turn; needs a quiet machine.
    ``undisturbed`` and ``added_us``: ratio and difference of the fastest tenth of the steps of each
    side, because other load affects these steps less.
    """

    without_ms: float
    with_ms: float
    ratio: float
    ratio_from: float
    ratio_to: float
    undisturbed: float
    added_us: float
    turns: int

    @classmethod
    def of(cls, turns: Sequence[Mapping[str, Sequence[float]]], side: str = "with") -> Idle:
        """Computes the result of a side ("with": kvtier's connector, or "empty").

        `ratio_from` and `ratio_to` are the 95 % confidence interval of the ratio.
        """
        sides = [(statistics.median(turn[side]), statistics.median(turn["without"])) for turn in turns]
        ratios = [connected / alone for connected, alone in sides]
        low, high = interval(ratios, statistics.median)
        return cls(
            without_ms=statistics.median(alone for _, alone in sides) * 1e3,
            with_ms=statistics.median(connected for connected, _ in sides) * 1e3,
            ratio=statistics.median(ratios),
            ratio_from=low,
            ratio_to=high,
            undisturbed=_fast(turns, side) / _fast(turns, "without"),
            added_us=(_fast(turns, side) - _fast(turns, "without")) * 1e6,
            turns=len(turns),
        )

    @property
    def verdict(self) -> Verdict:
        return verdict(self.ratio_from, self.ratio_to, TARGET)


def _fast(turns: Sequence[Mapping[str, Sequence[float]]], side: str) -> float:
    return percentile([seconds for turn in turns for seconds in turn[side]], 0.1) / 1e3


@dataclass(frozen=True, slots=True)
class IdleFound:
    """``hooks``: by batch size and hook, the calls per step and the median seconds of a call."""

    kvtier: Idle
    empty: Idle
    hooks: Mapping[str, Mapping[str, tuple[float, float]]]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> IdleFound:
        """Sums up the result of the engine's process."""
        return cls(Idle.of(result["turns"]), Idle.of(result["turns"], "empty"), result["hooks"])


@dataclass(frozen=True, slots=True)
class Processes:
    """Idle steps of whole engines: median milliseconds per process, in the order of runs."""

    without_ms: tuple[float, ...]
    with_ms: tuple[float, ...]

    @classmethod
    def of(cls, without: Sequence[Sequence[float]], connected: Sequence[Sequence[float]]) -> Processes:
        """Computes the medians. Each side has at least one process."""
        alone, others = ([statistics.median(steps) * 1e3 for steps in runs] for runs in (without, connected))
        return cls(tuple(alone), tuple(others))

    @property
    def ratio(self) -> float:
        """Ratio of the medians of both sides."""
        return statistics.median(self.with_ms) / statistics.median(self.without_ms)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest ratio over all pairs of processes of different sides."""
        return min(self.with_ms) / max(self.without_ms), max(self.with_ms) / min(self.without_ms)


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a statistic by bootstrap with a fixed seed."""
    source = random.Random(4)
    found = sorted(statistic(source.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[round(0.025 * RESAMPLES)], found[round(0.975 * RESAMPLES) - 1]


def hook_microseconds(hooks: Mapping[str, tuple[float, float]], half: str) -> float:
    """Returns the microseconds per step in the hooks of one half ("scheduler" or "worker")."""
    return sum(calls * seconds for name, (calls, seconds) in hooks.items() if name.startswith(half)) * 1e6
