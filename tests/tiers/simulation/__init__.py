"""Lives of a whole server from a seed, in simulated time: whatever clients, tiers, memory and clocks do, the invariants hold.

`life` lives one life. `world` is the world, `invariants` and `guarantees` what must hold in it after every step, `inspect` the one
place that looks into the core; `runner` lives lives by the thousand (`make simulate`), `mutants` shows that planted bugs are
found (`make simulate-mutants`).
"""

from __future__ import annotations

from .life import STEPS, Failure, Life, run
from .model import EXTENT, ModelTier

__all__ = ["EXTENT", "STEPS", "Failure", "Life", "ModelTier", "run"]
