"""Counts what lookups met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .history import MissReason
from .journal import Span

__all__ = ["Tally"]


class Tally:
    """Every key that was answered for counts once, when the answer is known: as a hit of a tier, or as a miss for a reason.

    A block on its way counts when it has arrived, or has not; one that a tier has been asked about counts when it is
    looked up again.
    """

    def __init__(self, tiers: int) -> None:
        self.keys = 0
        """Keys that were answered for."""
        self.hits = [0] * (tiers + 1)
        """Per tier; the CPU tier is the first."""
        self.misses = Counter[MissReason]()

    def count(self, spans: Iterable[Span]) -> None:
        """Counts the keys of a lookup."""
        for span in spans:
            if isinstance(span.verdict, MissReason):
                self.miss(span.verdict, span.count)
            elif span.verdict is not None:
                self.hit(span.verdict, span.count)

    def hit(self, tier: int, keys: int = 1) -> None:
        """Counts hits; with a negative number, takes back those that are on their way still."""
        self.hits[tier] += keys
        self.keys += keys

    def miss(self, reason: MissReason, keys: int = 1) -> None:
        """Counts misses."""
        self.misses[reason] += keys
        self.keys += keys
