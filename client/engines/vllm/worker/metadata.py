"""What the scheduler's connector sends its workers each step, and what they send back.

vLLM pickles both between its own processes; they hold plain values only.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ....offload import LoadJob, SaveJob
from ..compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from ..ranks import Parts

__all__ = ["SAVE_LOST_AFTER_S", "SAVE_WITHIN_S", "StepMetadata", "WorkerReport"]


SAVE_LOST_AFTER_S = 600.0
"""A save that no worker has reported by then, since it was sent, never will be: its blocks are let go (B5.6)."""

SAVE_WITHIN_S = 300.0
"""Workers begin no copy of a save later than this after it was sent; for what they have begun by then, their grant ends."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's loads and saves (see StepPlan).

    ``idle``: the step computes nothing, so that a worker may wait a moment for its copies. ``sent_at``: the time of the day, by
    which a worker that was stopped knows that its saves are old. ``parts``: what all workers hold, where they cannot know it.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    namespace_digest: str = ""
    idle: bool = False
    sent_at: float = math.inf
    parts: Parts | None = None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Save jobs that ended (stored, dropped or failed alike), each with the number of workers that say so.

    ``not_stored[job_id]`` are positions in the job's keys that some worker did not store; a job that was stored whole is not in it.
    """

    ended_saves: dict[int, int] = field(default_factory=dict)
    not_stored: dict[int, set[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Add another worker's report of the same step; called by vLLM's KVOutputAggregator on the engine's main thread."""
        merged = WorkerReport(dict(self.ended_saves), dict(self.not_stored))
        if isinstance(other, WorkerReport):
            for job_id, count in other.ended_saves.items():
                merged.ended_saves[job_id] = merged.ended_saves.get(job_id, 0) + count
            for job_id, missed in other.not_stored.items():
                merged.not_stored[job_id] = merged.not_stored.get(job_id, set()) | missed
        return merged
