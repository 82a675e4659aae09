"""What follows from timings: lines through them, the threshold, and how sure that is. Pure."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Proposal", "RegressionLine", "Samples", "fit", "propose", "worst_miss"]

Samples = Mapping[int, Sequence[float]]
"""Seconds of each round, by number of tokens."""

_RESAMPLES = 1000
_TAIL = 0.05
"""What of the resamples lies beyond either end of the interval."""


@dataclass(frozen=True, slots=True)
class RegressionLine:
    """`fixed` seconds, and `per_token` seconds for each token."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        """Returns seconds."""
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """A threshold in tokens, and between which it lies in nine of ten resamples; 0 is always worth it, None never."""

    threshold: int | None
    low: int | None
    high: int | None


def fit(samples: Samples) -> RegressionLine:
    """Returns the line through the medians with the least squares of relative errors.

    Relative, because what disturbs a timing grows with it: otherwise the longest prompts would decide what the shortest cost.

    Raises:
        ValueError: there are fewer than two lengths.
    """
    if len(samples) < 2:
        raise ValueError("a line needs timings of two lengths")
    medians = {tokens: statistics.median(seconds) for tokens, seconds in samples.items()}
    weights = {tokens: max(seconds, 1e-9) ** -2 for tokens, seconds in medians.items()}
    total = sum(weights.values())
    center = sum(weights[tokens] * tokens for tokens in medians) / total
    middle = sum(weights[tokens] * seconds for tokens, seconds in medians.items()) / total
    spread = sum(weights[tokens] * (tokens - center) ** 2 for tokens in medians)
    shared = sum(weights[tokens] * (tokens - center) * (seconds - middle) for tokens, seconds in medians.items())
    slope = shared / spread
    return RegressionLine(middle - slope * center, slope)


def worst_miss(line: RegressionLine, samples: Samples) -> float:
    """Returns how far the line is from a median at most, as a part of that median."""
    medians = {tokens: statistics.median(seconds) for tokens, seconds in samples.items()}
    return max(abs(line.at(tokens) - seconds) / max(seconds, 1e-9) for tokens, seconds in medians.items())


def propose(transfer: Samples, compute: Samples | float, block_tokens: int, *, seed: int = 0) -> Proposal:
    """Returns the fewest tokens whose transfer takes less time than what computing them adds, rounded up to whole blocks.

    Args:
        transfer: timings of transfers.
        compute: timings of prompts; or seconds per token, where they are known.
        block_tokens: what to round up to.
        seed: of the resamples: the same timings give the same interval.
    """
    draws = random.Random(seed)  # noqa: S311 - nothing secret

    def redrawn(samples: Samples) -> Samples:
        return {tokens: draws.choices(seconds, k=len(seconds)) for tokens, seconds in samples.items()}

    resampled = sorted(
        _least(redrawn(transfer), redrawn(compute) if isinstance(compute, Mapping) else compute)
        for _ in range(_RESAMPLES)
    )
    tail = int(_RESAMPLES * _TAIL)
    chosen = (_least(transfer, compute), resampled[tail], resampled[-1 - tail])
    return Proposal(*(_whole_blocks(tokens, block_tokens) for tokens in chosen))


def _least(transfer: Samples, compute: Samples | float) -> float:
    """Returns the smallest number of tokens that is worth a transfer; infinity if none is.

    What a prompt costs before its first token (the request, a step of the engine) is paid in either case: an engine that pulls
    most of a prompt still computes the rest. So only what each token adds counts for computing.
    """
    line = fit(transfer)
    gain = (fit(compute).per_token if isinstance(compute, Mapping) else compute) - line.per_token
    return max(1, math.floor(line.fixed / gain) + 1) if gain > 0 else math.inf


def _whole_blocks(tokens: float, block_tokens: int) -> int | None:
    if math.isinf(tokens):
        return None
    return 0 if tokens <= 1 else math.ceil(tokens / block_tokens) * block_tokens
