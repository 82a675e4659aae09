"""vLLM's hooks in a worker's process, mapped onto the worker's half. All of them run on the worker's main thread."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from .background import LimitedLog, logger
from .compat import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from .containment import contained, no, nothing
from .groups import Unsupported
from .ranks import Parts
from .worker.metadata import StepMetadata
from .worker.reports import WorkerReports
from .worker.worker import WorkerSide

__all__ = ["WorkerHooks"]


def _no_report() -> KVConnectorWorkerMetadata | None:
    return None


class WorkerHooks(KVConnectorBase_V1):
    """What KVTierConnector answers in a worker. ``_worker`` is None where the connector is disabled."""

    log: LimitedLog
    _worker: WorkerSide | None
    _reports: WorkerReports
    _kv_caches: dict[str, Any]

    @contained(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Called when the KV tensors have been allocated; again if they are others."""
        self._kv_caches = kv_caches
        if self._worker is not None:
            self._register(self._worker)

    def _register(self, worker: WorkerSide) -> None:
        try:
            worker.register(self._kv_caches)
        except Unsupported as reason:
            logger.warning("kvtier: this worker loads and saves nothing: %s", reason)

    @contained(nothing)
    def unregister_kv_caches(self) -> None:
        """Called before the KV tensors' memory is given back for a sleep (vLLM 0.33 and newer)."""
        if self._worker is not None:
            self._worker.suspend()

    @contained(nothing)
    def restore_kv_caches(self) -> None:
        """Called when the KV tensors have memory again, at the addresses that they had (vLLM 0.33 and newer)."""
        if self._worker is not None:
            self._worker.resume()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called each step before blocks are overwritten. Nothing to do: blocks being saved carry a reference (B4.12)."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called each step, after the forward was submitted (loads here are always asynchronous)."""
        step = self._connector_metadata
        if isinstance(step, StepMetadata) and step.parts is not None:
            self._join(step.parts)
        if self._worker is not None:
            self._worker.serving = True
        if isinstance(step, StepMetadata) and step.loads and not self._start_loads(step):
            self._reports.refuse_loads(step)

    @abstractmethod
    def _join(self, parts: Parts) -> None:
        """The first steps say what all workers hold, where they had to tell each other (KVTierConnector)."""

    @contained(no)
    def _start_loads(self, step: StepMetadata) -> bool:
        if self._worker is None:
            return False
        self._worker.start_loads(step)
        return True

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called from each attention layer; loads end between steps, so there is nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Called from each attention layer; whole blocks are saved after the step instead."""

    def wait_for_save(self) -> None:
        """Called each step after its forward: queues the step's saves behind it."""
        step = self._connector_metadata
        if isinstance(step, StepMetadata) and step.saves and not self._start_saves(step):
            self._reports.refuse_saves(step)

    @contained(no)
    def _start_saves(self, step: StepMetadata) -> bool:
        if self._worker is None:
            return False
        self._worker.start_saves(step)
        return True

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called each step last: loads that ended. Failed ones go to ``failed_recving``, which all group layouts support."""
        step = self._connector_metadata
        return self._reports.take_results(idle=isinstance(step, StepMetadata) and step.idle)

    @contained(_no_report)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Called each step after get_transfer_results: saves that ended, for the scheduler."""
        return self._reports.take_report()
