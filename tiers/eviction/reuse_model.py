"""Reuse model of the `forecast` policy: the chance and the value of reuse, by kind and age.

The model is a discrete-time proportional hazards model. Age is the time since a block's last use,
in units of the mean time between two block uses, in bins of half an octave. Per kind and bin, the
model counts the blocks that were reused at that age (hits) and the blocks that grew older without
reuse (misses). The chance of reuse is

    hazard(kind, bin) = baseline(bin) · product of the factors of the kind's features,

with one baseline for all kinds and one factor per feature. A thousand requests suffice to learn
these few parameters. A kind with many observations uses its own hazard instead.

The value of a block is its Gittins index: the highest ratio of expected hits to expected time over
all stopping ages. The index does not depend on the size of the cache. If users think before the
next turn, the value of their blocks rises until the next turn. So a cache that is too small for the
blocks of all users evicts the youngest of these blocks and keeps the older ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

__all__ = ["BINS", "BIN_ENDS", "Factor", "Kind", "ReuseModel"]

Factor = tuple[str, int]

_FIRST_EDGE = 64
BINS = 32
_EDGES = [0] + [round(_FIRST_EDGE * 2 ** (step / 2)) for step in range(BINS)]
"""First age of each bin, and the end of the last bin (3 million uses)."""
BIN_ENDS = _EDGES[1:]

_PRIOR_HAZARD = 0.05
_PRIOR = [_PRIOR_HAZARD * _EDGES[1] / (_EDGES[2] - _EDGES[1])] + [_PRIOR_HAZARD] * (BINS - 1)
"""Prior baseline: a heavy tail, i.e. the same hazard in every half octave."""
PRIOR_BLOCKS = 500.0
"""Weight of the prior baseline, in blocks: about twenty requests."""
PRIOR_HITS = 50.0
"""Weight of the prior of a factor, in hits."""
OWN_BLOCKS = 300.0
"""A kind's own observations replace the model when they are many more than this many blocks."""
DECAY = 0.97
"""Each fit multiplies the weight of earlier observations by this factor, so observations count for
about fifty fits."""
_ITERATIONS = 3
"""How often one fit computes the baseline and the factors in turn."""
_MAX_HAZARD = 0.98
_MAX_BASELINE_RATIO = 30.0
"""Kinds with a higher hazard ratio, e.g. the first block of all prompts, do not contribute to the
baseline."""


class Kind:
    """Blocks with the same features. The model expects the same reuse for all of them."""

    __slots__ = ("factors", "hits", "misses", "values")

    def __init__(self, factors: tuple[Factor, ...]) -> None:
        self.factors = factors
        self.hits = [0.0] * BINS
        """Per bin, the number of blocks that were reused at that age."""
        self.misses = [0.0] * BINS
        """Per bin, the number of blocks that grew older without reuse."""
        self.values = [0.0] * BINS
        """Per bin, the Gittins index, in hits per use and block."""


class ReuseModel:
    def __init__(self) -> None:
        self._kinds: dict[tuple[Factor, ...], Kind] = {}
        self._factors: dict[Factor, float] = {}
        self._baseline = _PRIOR.copy()

    def kind(self, *factors: Factor) -> Kind:
        kind = self._kinds.get(factors)
        if kind is None:
            kind = self._kinds[factors] = Kind(factors)
            for factor in factors:
                self._factors.setdefault(factor, _prior(factor))
            kind.values = self._gittins_indices(kind)
        return kind

    def fit(self) -> Iterator[Kind | None]:
        """Fits the model to the observations. Yields each kind whose values have changed, or None.

        A whole fit takes milliseconds and would delay a lookup, so it runs in about ten steps.
        """
        seen = [kind for kind in self._kinds.values() if any(kind.hits) or any(kind.misses)]
        for _ in range(_ITERATIONS):
            self._fit_baseline(seen)
            self._fit_factors(seen)
            yield None
        for kind in list(self._kinds.values()):
            kind.values = self._gittins_indices(kind)
            kind.hits = [DECAY * count for count in kind.hits]
            kind.misses = [DECAY * count for count in kind.misses]
            yield kind

    def _hazard_ratio(self, kind: Kind) -> float:
        return math.prod(self._factors[factor] for factor in kind.factors)

    def _fit_baseline(self, kinds: list[Kind]) -> None:
        hits, expected = [0.0] * BINS, [PRIOR_BLOCKS] * BINS
        for kind in kinds:
            ratio = self._hazard_ratio(kind)
            if ratio > _MAX_BASELINE_RATIO:
                continue
            for number, (hit, miss) in enumerate(zip(kind.hits, kind.misses, strict=True)):
                hits[number] += hit
                expected[number] += ratio * (hit + miss)
        deviation = 1.0
        for number, prior in enumerate(_PRIOR):
            # Without observations, a bin deviates from the prior about as much as its predecessor.
            self._baseline[number] = (hits[number] + PRIOR_BLOCKS * prior * deviation) / expected[number]
            deviation = min(8.0, max(0.125, self._baseline[number] / prior)) ** 0.9

    def _fit_factors(self, kinds: list[Kind]) -> None:
        hits = {kind: sum(kind.hits) for kind in kinds}
        exposed = {
            kind: sum(map(lambda a, b, c: (a + b) * c, kind.hits, kind.misses, self._baseline)) for kind in kinds
        }
        kinds_with: dict[Factor, list[Kind]] = {}
        for kind in kinds:
            for factor in kind.factors:
                kinds_with.setdefault(factor, []).append(kind)
        for factor, those in kinds_with.items():
            old = self._factors[factor]
            observed = sum(hits[kind] for kind in those)
            expected = sum(exposed[kind] * self._hazard_ratio(kind) for kind in those) / old
            self._factors[factor] = (observed + PRIOR_HITS * _prior(factor)) / (expected + PRIOR_HITS)

    def _gittins_indices(self, kind: Kind) -> list[float]:
        """Returns per bin the best ratio of expected hits to time, over all stopping ages."""
        ratio = self._hazard_ratio(kind)
        values = [0.0] * BINS
        later: list[tuple[float, float, float]] = []
        """Stages after the current bin, nearest last: (hits, time, fraction of blocks left)."""
        for number in range(BINS - 1, -1, -1):
            seen = kind.hits[number] + kind.misses[number]
            hazard = (kind.hits[number] + OWN_BLOCKS * ratio * self._baseline[number]) / (seen + OWN_BLOCKS)
            hazard = min(hazard, _MAX_HAZARD)
            hits, left = hazard, 1 - hazard
            time = (1 - hazard / 2) * (_EDGES[number + 1] - _EDGES[number])
            while later and later[-1][0] * time >= hits * later[-1][1]:
                more_hits, more_time, still_left = later.pop()
                hits += left * more_hits
                time += left * more_time
                left *= still_left
            later.append((hits, time, left))
            values[number] = hits / time
        return values


def _prior(factor: Factor) -> float:
    """Returns the prior of a feature. It is higher for blocks that were used more often."""
    feature, value = factor
    return {"turn": 1 + value / 2, "end": 0.5}.get(feature, 1.0)
