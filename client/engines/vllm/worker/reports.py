"""Results of a worker's jobs, kept until vLLM takes them.

Every load and save of a step must be reported exactly once, even after a failure. If a load is not
reported, its request waits for ever. If a save is not reported, its blocks are held for ever. If a
load is reported twice, the engine fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from ....offload import LoadJob
from ....session.fork_guard import ForkGuarded
from ..compat import KVConnectorTransferResults, KVConnectorWorkerMetadata
from ..step_metadata import StepMetadata

__all__ = ["SAVE_LOST_AFTER_S", "SAVE_WITHIN_S", "WorkerReport", "WorkerReports"]

_IDLE_WAIT_S = 0.001

SAVE_LOST_AFTER_S = 600.0
"""After this time the scheduler gives up an unreported save and releases its blocks (B5.6)."""

SAVE_WITHIN_S = 300.0
"""Workers begin no copy of a save later than this time after the scheduler sent the save.

Blocks that are not copied by then are reported as not stored. A running copy must end before the
server's grant of the slots expires.
"""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Save jobs that ended: stored, dropped or failed.

    `ended_saves[job_id]`: the workers that report the job, as one bit per worker.
    `not_stored[job_id]`: indices of the job's keys that at least one worker did not store; absent
    if all keys were stored.
    """

    ended_saves: dict[int, int] = field(default_factory=dict)
    not_stored: dict[int, set[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Adds another worker's report of the same step. Called on the engine's main thread."""
        merged = WorkerReport(dict(self.ended_saves), dict(self.not_stored))
        if isinstance(other, WorkerReport):
            for job_id, workers in other.ended_saves.items():
                merged.ended_saves[job_id] = merged.ended_saves.get(job_id, 0) | workers
            for job_id, missed in other.not_stored.items():
                merged.not_stored[job_id] = merged.not_stored.get(job_id, set()) | missed
        return merged


@dataclass
class _OpenLoad:
    """A load with jobs that have not ended. `has_last`: whether the last job was begun."""

    running: int = 0
    has_last: bool = False
    has_failed: bool = False


class WorkerReports(ForkGuarded):
    """Results that vLLM has not taken. Any thread may add; only the main thread takes.

    `worker`: number of this worker in its engine, from 0 on.
    """

    def __init__(self, worker: int = 0) -> None:
        self._worker_bit = 1 << worker
        self._changed = threading.Condition()
        self._open_loads: dict[str, _OpenLoad] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._ended_saves: dict[int, int] = {}
        self._not_stored: dict[int, set[int]] = {}

    def load_begun(self, job: LoadJob) -> None:
        """Records that a job of a load was begun. `load_ended` must follow for each job."""
        with self._changed:
            load = self._open_loads.setdefault(job.request_id, _OpenLoad())
            load.running += 1
            load.has_last |= job.is_last

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        """Records that a job of a load ended. After a failure the blocks have undefined content.

        The load is reported when all jobs up to the last one have ended, because vLLM may reuse the
        blocks then.
        """
        with self._changed:
            load = self._open_loads[request_id]
            load.running -= 1
            load.has_failed |= failed
            if load.running or not load.has_last:
                return
            del self._open_loads[request_id]
            self._loaded.add(request_id)
            if load.has_failed:
                self._failed.add(request_id)
            self._changed.notify_all()

    def save_ended(self, job_id: int, not_stored: Iterable[int] = ()) -> None:
        """Records that a save ended. `not_stored`: indices of keys that are perhaps not stored."""
        missed = set(not_stored)
        with self._changed:
            self._ended_saves[job_id] = self._worker_bit
            if missed:
                self._not_stored[job_id] = missed
            self._changed.notify_all()

    def refuse_loads(self, step: StepMetadata) -> None:
        for job in step.loads:
            self.load_begun(job)
            self.load_ended(job.request_id, failed=True)

    def refuse_saves(self, step: StepMetadata) -> None:
        for job in step.saves:
            self.save_ended(job.job_id, range(len(job.keys)))

    def take_results(self, *, idle: bool) -> KVConnectorTransferResults:
        """Returns the loads that ended since the last call.

        In an idle step this method waits 1 ms for a result. Without the wait, the engine's busy
        loop would take the processor and the GIL from the threads that produce the result.
        """
        if not (idle or self._loaded):
            # No lock is needed: a result that is added at this moment is taken in the next step.
            return KVConnectorTransferResults()
        with self._changed:
            if idle and not (self._loaded or self._ended_saves):
                self._changed.wait(_IDLE_WAIT_S)
            loaded, failed = self._loaded, self._failed
            self._loaded, self._failed = set(), set()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def take_report(self) -> WorkerReport | None:
        if not self._ended_saves:
            return None
        with self._changed:
            ended, self._ended_saves = self._ended_saves, {}
            not_stored, self._not_stored = self._not_stored, {}
        return WorkerReport(ended, not_stored)
