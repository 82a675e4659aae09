"""Hooks that vLLM calls in the scheduler's process and in workers. No hook raises.

Scheduler hooks run on the scheduler's thread, worker hooks on the worker's main thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from ...offload import LoadJob
from ..failures import Unsupported, never_raises
from .background import RateLimitedLog, logger
from .compat import (
    CacheHitSource,
    KVCacheEvent,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from .ranks import Parts
from .scheduler.scheduler import SchedulerSide
from .step_metadata import IDLE_WITHOUT_JOBS, NO_JOBS, StepMetadata
from .worker.reports import WorkerReports
from .worker.worker import WorkerSide

__all__ = ["SchedulerHooks", "WorkerHooks"]

Match: TypeAlias = tuple[int | None, bool]
Finish: TypeAlias = tuple[bool, dict[str, Any] | None]


class SchedulerHooks(KVConnectorBase_V1, SupportsHMA):
    """KVTierConnector in the scheduler's process. If it is disabled, `_scheduler` is None.

    `_unsent_loads`: ids of the requests for which the engine waits for a load of which no job was
    sent to the workers yet. `_open_loads`: ids of those for which the last job was not sent yet.
    """

    log: RateLimitedLog
    _scheduler: SchedulerSide | None
    _unsent_loads: set[str]
    _open_loads: set[str]
    _block_pool: Any
    _all_parts: Parts | None

    @never_raises()
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called once, when the scheduler has built its cache manager."""
        self._block_pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @never_raises()
    def on_new_request(self, request: Any) -> None:
        """Called when a request arrives, before it is scheduled."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Match:
        """Called each time vLLM tries to schedule a waiting request; see SchedulerSide."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @never_raises()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called when vLLM has allocated blocks; again, with 0 tokens, when the load has ended."""
        if num_external_tokens > 0:
            # Recorded first, because the engine waits for the load even if the code below fails.
            self._unsent_loads.add(request.request_id)
        if self._scheduler is not None:
            self._scheduler.blocks_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Called after update_state_after_alloc, for vLLM's metrics."""
        if not num_external_tokens:
            return {}
        known = self._hit_sources(request, num_external_tokens)
        return known or {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}

    @never_raises(dict)
    def _hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        known = self._scheduler.hit_sources(request, num_external_tokens) if self._scheduler is not None else None
        return known or {}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Called once per step, after the other scheduler hooks, also in empty steps.

        Sends the first job of each load that the engine waits for, and later jobs of loads that
        have several. If an exception lost a job, sends an empty job, which workers report as
        failed. If `_build_step` failed in the step before, it may return the jobs of that step now.
        These jobs are not sent, because the workers already got empty jobs for them and reported
        the loads as failed.
        """
        step = self._build_step(scheduler_output)
        if step.loads or self._unsent_loads or (step.is_lost and self._open_loads):
            step = replace(step, loads=self._jobs_to_send(step))
        if self._all_parts is not None and step is not NO_JOBS and step is not IDLE_WITHOUT_JOBS:
            step.parts = self._all_parts
        return step

    def _jobs_to_send(self, step: StepMetadata) -> list[LoadJob]:
        planned: dict[str, list[LoadJob]] = {}
        for job in step.loads:
            planned.setdefault(job.request_id, []).append(job)
        jobs: list[LoadJob] = []
        for request_id in sorted(self._unsent_loads | self._open_loads):
            is_expected = request_id in self._unsent_loads or step.is_lost
            jobs += planned.get(request_id, [LoadJob(request_id)] if is_expected else [])
        self._unsent_loads.clear()
        self._open_loads |= {job.request_id for job in jobs}
        self._open_loads -= {job.request_id for job in jobs if job.is_last}
        return jobs

    @never_raises(lambda: StepMetadata(is_lost=True))
    def _build_step(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return NO_JOBS
        return self._scheduler.build_step(scheduler_output, is_awaited=bool(self._unsent_loads))

    def update_connector_output(self, connector_output: Any) -> None:
        """Called after each step with the reports of all workers."""
        if connector_output.kv_connector_worker_meta is not None:
            self._take_saves(connector_output)
        if connector_output.finished_recving or connector_output.failed_recving:
            self._take_loads(connector_output)

    @never_raises()
    def _take_saves(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.saves_reported(connector_output.kv_connector_worker_meta)

    @never_raises()
    def _take_loads(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_reported(
                connector_output.finished_recving or (), connector_output.failed_recving or ()
            )

    @never_raises(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Called each step, after update_connector_output."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @never_raises(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        """Called if another connector of a MultiConnector has no HMA. There is then one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @never_raises(lambda: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Finish:
        """Called once at a request's end, before its blocks are freed.

        Returns False, so that vLLM frees the blocks at once. Saves hold their own references.
        """
        params = self._scheduler.request_finished(request, block_ids) if self._scheduler is not None else None
        return False, params

    @never_raises(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Called between steps. True: the engine must keep stepping, even without requests."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    @never_raises(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Called when no block is free for a running request; see SchedulerSide."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    @never_raises(lambda: False)
    def reset_cache(self) -> bool:
        """Called between steps for `reset_prefix_cache(reset_connector=True)` or a sleep.

        Returns False while a transfer is in flight; the caller then repeats the call.
        """
        return self._scheduler.reset() if self._scheduler is not None else True


class WorkerHooks(KVConnectorBase_V1):
    """KVTierConnector in a worker. `_worker` is None if the connector is disabled."""

    log: RateLimitedLog
    _worker: WorkerSide | None
    _reports: WorkerReports
    _kv_caches: dict[str, Any]

    @never_raises()
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Called when the KV tensors have been allocated, and again if they are replaced."""
        self._kv_caches = kv_caches
        if self._worker is not None:
            self._register(self._worker)

    def _register(self, worker: WorkerSide) -> None:
        try:
            worker.register(self._kv_caches)
        except Unsupported as reason:
            logger.warning("kvtier: this worker loads and saves nothing: %s", reason)

    @never_raises()
    def unregister_kv_caches(self) -> None:
        """Called before a sleep frees the KV tensors' memory (vLLM 0.33 and newer)."""
        if self._worker is not None:
            self._worker.suspend()

    @never_raises()
    def restore_kv_caches(self) -> None:
        """Called when the KV tensors have memory again, at the same addresses (vLLM >= 0.33)."""
        if self._worker is not None:
            self._worker.resume()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before blocks are overwritten. Nothing to do: saves hold references to blocks."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called each step once the forward pass is submitted, because loads are asynchronous."""
        step = self._connector_metadata
        if isinstance(step, StepMetadata) and step.parts is not None:
            self._adopt_parts(step.parts)
        if isinstance(step, StepMetadata) and step.namespace:
            self._adopt_namespace(step.namespace, step.namespace_digest)
        if self._worker is not None:
            self._worker.serving = True
        if isinstance(step, StepMetadata) and step.loads and not self._start_loads(step):
            self._reports.refuse_loads(step)

    @abstractmethod
    def _adopt_parts(self, parts: Parts) -> None:
        """Sets up the worker with the parts of all workers. Only the first call has an effect."""

    @abstractmethod
    def _adopt_namespace(self, pickled: bytes, digest: str) -> None:
        """Connects the worker in the scheduler's namespace, if it is another one than before."""

    @never_raises(lambda: False)
    def _start_loads(self, step: StepMetadata) -> bool:
        if self._worker is None:
            return False
        self._worker.start_loads(step)
        return True

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Called from each attention layer. Nothing to do, because loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Called from each attention layer. Nothing to do: blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Called each step after the forward pass. Queues the step's saves behind that pass."""
        step = self._connector_metadata
        if isinstance(step, StepMetadata) and step.saves and not self._start_saves(step):
            self._reports.refuse_saves(step)

    @never_raises(lambda: False)
    def _start_saves(self, step: StepMetadata) -> bool:
        if self._worker is None:
            return False
        self._worker.start_saves(step)
        return True

    @never_raises(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called at the end of each step. Returns the loads that ended, and the failed ones."""
        step = self._connector_metadata
        return self._reports.take_results(idle=isinstance(step, StepMetadata) and step.idle)

    @never_raises()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Called each step after get_transfer_results. Returns the saves that ended."""
        return self._reports.take_report()
