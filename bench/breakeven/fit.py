"""Regression lines through timings, and the break-even threshold with its confidence interval."""

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
"""Fraction of the resamples beyond either end of the interval."""


@dataclass(frozen=True, slots=True)
class RegressionLine:
    """Time of `fixed` seconds plus `per_token` seconds for each token."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """Threshold in tokens with its 90 % interval. 0: always transfer. None: never."""

    threshold: int | None
    low: int | None
    high: int | None


def fit(samples: Samples) -> RegressionLine:
    """Returns the line through the medians that minimizes the squares of the relative errors.

    The errors are relative because the noise of a timing grows with the timing. With absolute
    errors the longest prompts would determine the fixed costs.

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
    """Returns the maximum relative distance of the line from a median."""
    medians = {tokens: statistics.median(seconds) for tokens, seconds in samples.items()}
    return max(abs(line.at(tokens) - seconds) / max(seconds, 1e-9) for tokens, seconds in medians.items())


def propose(transfer: Samples, compute: Samples | float, block_tokens: int, *, seed: int = 0) -> Proposal:
    """Returns the minimum number of tokens whose transfer is faster than their computation.

    Args:
        transfer: timings of transfers.
        compute: timings of prompts, or the known seconds per token.
        block_tokens: the result is rounded up to a multiple of this.
        seed: seed of the resamples, so that equal timings give equal intervals.
    """
    draws = random.Random(seed)

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
    """Returns the minimum number of tokens that is worth a transfer, or infinity.

    A prompt has its fixed costs (request, one step of the engine) with and without a transfer,
    because the engine always computes a part of the prompt. So only the costs per token count.
    """
    line = fit(transfer)
    gain = (fit(compute).per_token if isinstance(compute, Mapping) else compute) - line.per_token
    return max(1, math.floor(line.fixed / gain) + 1) if gain > 0 else math.inf


def _whole_blocks(tokens: float, block_tokens: int) -> int | None:
    if math.isinf(tokens):
        return None
    return 0 if tokens <= 1 else math.ceil(tokens / block_tokens) * block_tokens
