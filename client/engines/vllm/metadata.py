"""What the scheduler's connector sends its workers each step, and what they send back.

vLLM pickles both between its own processes; they hold plain values only.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass, field

from .compat import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["BlockRead", "LoadJob", "SaveJob", "StepMetadata", "WorkerReport"]


@dataclass
class BlockRead:
    """Blocks of one lease to load: key ``indices[i]`` of the lease goes into engine block ``block_ids[i]`` of ``groups[i]``."""

    lease_id: int
    indices: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass
class LoadJob:
    """One request's load. Without ``reads`` it is one that cannot be done: workers report it as failed at once."""

    request_id: str
    reads: list[BlockRead] = field(default_factory=list)


@dataclass
class SaveJob:
    """Blocks of one request to store in one go; the scheduler keeps them from reuse until every worker reports ``job_id``."""

    job_id: int
    request_id: str  # as the server knows it
    keys: list[bytes] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's loads and saves. ``idle``: the step computes nothing, so that a worker may wait a moment for its copies."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    namespace_digest: str = ""
    idle: bool = False


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
