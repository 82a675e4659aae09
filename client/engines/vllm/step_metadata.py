"""Metadata of a step: what the scheduler tells the workers, once per step of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...offload import LoadJob, SaveJob
from .compat import KVConnectorMetadata
from .ranks import Parts

__all__ = ["StepMetadata"]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's loads and saves (see StepPlan).

    `idle`: the step computes nothing, so a worker may wait a moment for its copies. `sent_at`: wall
    clock time at which the scheduler sent the step. A worker that was stopped for a while uses it
    to recognize old saves. `parts`: the parts of all workers, if a worker cannot compute them.
    `namespace`: pickled `Namespace` of the scheduler, because pickling and unpickling it in each
    step takes 10 to 20 µs; empty if it is not known yet, or after a failure.
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
