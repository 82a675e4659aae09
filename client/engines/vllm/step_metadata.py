"""Metadata of a step: what the scheduler tells the workers, once per step of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ...offload import LoadJob, SaveJob
from .compat import KVConnectorMetadata
from .ranks import Parts

__all__ = ["IDLE_WITHOUT_JOBS", "NO_JOBS", "StepMetadata"]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's loads and saves (see StepPlan).

    `idle`: the step computes nothing, so a worker may wait a moment for its copies. `sent_at`: wall
    clock time at which the scheduler sent the step. A worker that was stopped for a while uses it
    to recognize old saves. `parts`: the parts of all workers, if a worker cannot compute them.
    `namespace`: pickled `Namespace` of the scheduler; empty if it is not known yet, or after a
    failure. A step with jobs has it, and the first step after a change.
    `is_lost`: the scheduler failed to plan the step, so jobs of this step may be missing.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    namespace_digest: str = ""
    idle: bool = False
    sent_at: float = math.inf
    parts: Parts | None = None
    namespace: bytes = b""
    is_lost: bool = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the shared objects by name, so that a worker gets its own of these."""
        if self is NO_JOBS:
            return "NO_JOBS"
        return "IDLE_WITHOUT_JOBS" if self is IDLE_WITHOUT_JOBS else super().__reduce_ex__(protocol)


NO_JOBS = StepMetadata()
"""Metadata of all steps that compute something and have no news for the workers."""
IDLE_WITHOUT_JOBS = StepMetadata(idle=True)
