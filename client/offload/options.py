"""How an engine offloads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Mode", "OffloadOptions"]


class Mode(Enum):
    """EAGER stores a block as soon as it is full (B4.6); LAZY when the engine is about to evict it (B4.7)."""

    EAGER = "eager"
    LAZY = "lazy"


@dataclass(frozen=True)
class OffloadOptions:
    """Settings of the core; all times in seconds.

    ``lookup_timeout_s``: how long a request may wait to learn what is stored; afterwards it is computed.
    ``hit_lifetime_s``: a hit that waited longer for room in the engine is looked up again: its lease may be about to end.
    ``max_held_fraction``: the share of the engine's blocks that saves in flight may hold back from reuse.
    ``save_lost_after_s``: a save that is not reported by then never will be. Workers must have stopped by then to read its blocks,
    or to publish what they read (B5.6).
    ``batched_tokens``: the most that one step computes (lazy mode looks that far ahead).
    """

    mode: Mode = Mode.EAGER
    lookup_timeout_s: float = 1.0
    hit_lifetime_s: float = 10.0
    max_held_fraction: float = 0.5
    save_lost_after_s: float = 600.0
    batched_tokens: int = 0
