"""How soon, and how likely, blocks of a kind are used again: what the forecast policy learns.

Age is counted in uses since a block's last one, in bins of half an octave. Of every kind the model counts how many blocks came
through a bin without being used, and how many were used in it. From that it takes the chance of reuse within a bin,

    chance(kind, bin) = shape(bin) · product of the kind's factors,

one shape for all kinds and one factor per feature: few numbers, so that a thousand requests teach them. And from the
chances what a block is worth: the most hits per unit of space and time that keeping it, for as long as is best, will yield (the
Gittins index of the bandit that is a cache slot). It needs no tuning to the size of the cache; where reuse comes after
a think time, a block's worth rises with its age until that is over, and a cache that cannot hold everyone for so long holds some.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

__all__ = ["BINS", "BIN_ENDS", "Factor", "Kind", "ReuseModel", "bin_of"]

Factor = tuple[str, int]
"""A feature and its value."""

_FIRST_EDGE = 64
BINS = 32
_EDGES = [0] + [round(_FIRST_EDGE * 2 ** (step / 2)) for step in range(BINS)]
"""Where the bins begin; the last one ends here: at 3 million uses nobody waits any longer."""
BIN_ENDS = _EDGES[1:]
"""Per bin the age at which it ends."""

_PRIOR_CHANCE = 0.05
_PRIOR = [_PRIOR_CHANCE * _EDGES[1] / (_EDGES[2] - _EDGES[1])] + [_PRIOR_CHANCE] * (BINS - 1)
"""Chance of reuse per bin before anything was seen: a heavy tail, that is, the same in every half octave."""
PRIOR_BLOCKS = 500.0
"""How many blocks' worth of evidence that counts for; some twenty requests."""
PRIOR_HITS = 50.0
"""How many hits the prior of a factor counts for."""
FADE = 0.98
"""What evidence is worth after a round of learning, so that fifty rounds are remembered."""
_SWEEPS = 3
"""Rounds of fitting shape and factors to one another."""
_CERTAIN = 0.98
_REGULAR = 30.0
"""Kinds that are used so much more often than others (a prompt's first block) are no evidence on the shape."""


def bin_of(age: int) -> int:
    """Returns the bin that an age falls in."""
    return min(bisect_right(_EDGES, age), BINS) - 1


class Kind:
    """Blocks that are expected to behave alike."""

    __slots__ = ("factors", "hits", "misses", "worth")

    def __init__(self, factors: tuple[Factor, ...]) -> None:
        self.factors = factors
        self.hits = [0.0] * BINS
        """Per bin, how many blocks were used again in it."""
        self.misses = [0.0] * BINS
        """Per bin, how many came through it without."""
        self.worth = [0.0] * BINS
        """Per bin, the hits per use and block to expect."""


class ReuseModel:
    """Learns what blocks are worth, by kind and age."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Factor, ...], Kind] = {}
        self._factors: dict[Factor, float] = {}
        self._shape = _PRIOR.copy()

    def kind(self, *factors: Factor) -> Kind:
        """Returns the kind with these features."""
        kind = self._kinds.get(factors)
        if kind is None:
            kind = self._kinds[factors] = Kind(factors)
            for factor in factors:
                self._factors.setdefault(factor, _prior(factor))
            kind.worth = self._worth_of(kind)
        return kind

    def learn(self) -> Iterator[Kind | None]:
        """Works the evidence of late into what every kind is worth; yields the kind whose worth has just changed, if any.

        A round takes milliseconds, which no lookup should wait for: so it is taken in steps of a tenth of that.
        """
        seen = [kind for kind in self._kinds.values() if any(kind.hits) or any(kind.misses)]
        for _ in range(_SWEEPS):
            self._fit_shape(seen)
            self._fit_factors(seen)
            yield None
        for kind in list(self._kinds.values()):
            kind.worth = self._worth_of(kind)
            kind.hits = [FADE * count for count in kind.hits]
            kind.misses = [FADE * count for count in kind.misses]
            yield kind

    def _level(self, kind: Kind) -> float:
        level = 1.0
        for factor in kind.factors:
            level *= self._factors[factor]
        return level

    def _fit_shape(self, kinds: list[Kind]) -> None:
        hits, expected = [0.0] * BINS, [PRIOR_BLOCKS] * BINS
        for kind in kinds:
            level = self._level(kind)
            if level > _REGULAR:
                continue
            for number, (hit, miss) in enumerate(zip(kind.hits, kind.misses, strict=True)):
                hits[number] += hit
                expected[number] += level * (hit + miss)
        lean = 1.0
        for number, prior in enumerate(_PRIOR):
            # Where there is no evidence, a bin is taken to lean from the prior about as the one before does.
            self._shape[number] = (hits[number] + PRIOR_BLOCKS * prior * lean) / expected[number]
            lean = min(8.0, max(0.125, self._shape[number] / prior)) ** 0.9

    def _fit_factors(self, kinds: list[Kind]) -> None:
        hits = {kind: sum(kind.hits) for kind in kinds}
        exposed = {kind: sum(map(lambda a, b, c: (a + b) * c, kind.hits, kind.misses, self._shape)) for kind in kinds}
        having: dict[Factor, list[Kind]] = {}
        for kind in kinds:
            for factor in kind.factors:
                having.setdefault(factor, []).append(kind)
        for factor, those in having.items():
            old = self._factors[factor]
            observed = sum(hits[kind] for kind in those)
            expected = sum(exposed[kind] * self._level(kind) for kind in those) / old
            self._factors[factor] = (observed + PRIOR_HITS * _prior(factor)) / (expected + PRIOR_HITS)

    def _worth_of(self, kind: Kind) -> list[float]:
        """Returns the Gittins index per bin: from there on, the best ratio of hits to time spent that stopping can reach."""
        level = self._level(kind)
        worth = [0.0] * BINS
        ahead: list[tuple[float, float, float]] = []
        for number in range(BINS - 1, -1, -1):
            chance = min(level * self._shape[number], _CERTAIN)
            hits, left = chance, 1 - chance
            time = (1 - chance / 2) * (_EDGES[number + 1] - _EDGES[number])
            while ahead and ahead[-1][0] * time >= hits * ahead[-1][1]:
                more_hits, more_time, still_left = ahead.pop()
                hits += left * more_hits
                time += left * more_time
                left *= still_left
            ahead.append((hits, time, left))
            worth[number] = hits / time
        return worth


def _prior(factor: Factor) -> float:
    """Returns what a feature is taken for before anything was seen: use breeds use."""
    feature, value = factor
    return {"turn": 1 + value / 2, "shared": 1.5 * (1 + value), "end": 0.5}.get(feature, 1.0)
