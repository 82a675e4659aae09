"""Simulation of the core: random runs from a seed in simulated time, checked against invariants.

`life` simulates one run of `world`. `invariants` and `guarantees` are checked after every step, and
`restarts` at some of them. Only `inspect`, `books` and `damage` read private state of the core.
`runner` simulates thousands of runs (`make simulate`). `mutants` shows that planted bugs are found
(`make simulate MUTANTS=1`).
"""

from __future__ import annotations

from .life import STEPS, Failure, RunResult, run
from .model import EXTENT, ModelTier

__all__ = ["EXTENT", "STEPS", "Failure", "ModelTier", "RunResult", "run"]
