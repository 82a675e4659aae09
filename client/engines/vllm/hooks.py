"""vLLM's hooks in the scheduler's process, mapped onto the scheduler's half. All of them run on the scheduler's thread."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from ...offload import LoadJob
from .background import LimitedLog, logger
from .compat import (
    CacheHitSource,
    KVCacheEvent,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from .groups import Unsupported
from .ranks import Parts
from .scheduler.scheduler import SchedulerSide
from .worker.reports import StepMetadata, WorkerReports
from .worker.worker import WorkerSide

__all__ = ["SchedulerHooks", "WorkerHooks", "never_raises", "no", "nothing"]


class HasLog(Protocol):
    """What has hooks."""

    log: LimitedLog


P = ParamSpec("P")


R = TypeVar("R")


S = TypeVar("S", bound=HasLog)


def nothing() -> None:
    """The fallback of a hook whose answer nobody reads."""


def no() -> bool:
    """The fallback of a question."""
    return False


def never_raises(
    fallback: Callable[[], R],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """What a hook raises is logged, and the engine gets ``fallback()``: an exception inside a connector ends vLLM."""

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def hook_that_answers(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                text = f"{hook.__name__} failed: {error!r}"
                self.log.warn(hook.__name__, text, exc_info=True)  # noqa: G010 - a LimitedLog, not a Logger
                return fallback()

        return hook_that_answers

    return decorate


Match: TypeAlias = tuple[int | None, bool]


Finish: TypeAlias = tuple[bool, dict[str, Any] | None]


def _no_match() -> Match:
    return 0, False


def _free_now() -> Finish:
    return False, None


def _no_sources() -> dict[CacheHitSource, int]:
    return {}


def _no_events() -> Iterable[KVCacheEvent]:
    return ()


class SchedulerHooks(KVConnectorBase_V1, SupportsHMA):
    """What KVTierConnector answers in the scheduler's process. ``_scheduler`` is None where the connector is disabled.

    ``_unsent_loads``: requests for whose loads the engine waits, and of which no worker knows yet.
    """

    log: LimitedLog
    _scheduler: SchedulerSide | None
    _unsent_loads: set[str]
    _block_pool: Any
    _told: Parts | None

    @never_raises(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called once, when the scheduler has built its cache manager."""
        self._block_pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @never_raises(nothing)
    def on_new_request(self, request: Any) -> None:
        """Called when a request arrives, before it is ever scheduled."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @never_raises(_no_match)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Match:
        """Called each time a waiting request is considered; see SchedulerSide.matched_tokens."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @never_raises(nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called when blocks were allocated; again, with 0 tokens, when the request runs after its load."""
        if num_external_tokens > 0:
            # First of all: whatever goes wrong below, the engine waits for this load from now on.
            self._unsent_loads.add(request.request_id)
        if self._scheduler is not None:
            self._scheduler.blocks_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Called after update_state_after_alloc, for vLLM's metrics."""
        if not num_external_tokens:
            return {}
        known = self._hit_sources(request, num_external_tokens)
        return known or {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens}

    @never_raises(_no_sources)
    def _hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        known = self._scheduler.hit_sources(request, num_external_tokens) if self._scheduler is not None else None
        return known or {}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Called once per step, last; empty steps included.

        Workers are given exactly the loads that the engine waits for: one that the scheduler's half lost is to fail, one left over
        from a step that failed would be reported twice.
        """
        step = self._build_step(scheduler_output)
        step.parts = self._told
        if step.loads or self._unsent_loads:
            jobs = {job.request_id: job for job in step.loads}
            step.loads = [jobs.get(request_id) or LoadJob(request_id) for request_id in sorted(self._unsent_loads)]
            self._unsent_loads.clear()
        return step

    @never_raises(StepMetadata)
    def _build_step(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build_step(scheduler_output) if self._scheduler is not None else StepMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """Called with what all workers reported, after each step; most of them have nothing to report."""
        if connector_output.kv_connector_worker_meta is not None:
            self._take_saves(connector_output)
        if connector_output.finished_recving or connector_output.failed_recving:
            self._take_loads(connector_output)

    @never_raises(nothing)
    def _take_saves(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.saves_reported(connector_output.kv_connector_worker_meta)

    @never_raises(nothing)
    def _take_loads(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_reported(
                connector_output.finished_recving or (), connector_output.failed_recving or ()
            )

    @never_raises(_no_events)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Called each step, after update_connector_output; see events.py."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @never_raises(_free_now)
    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        """Called once at a request's end by engines without groups; blocks may be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    @never_raises(_free_now)
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Finish:
        """Called once at a request's end, before its blocks are freed. They may be: those to be saved carry a reference."""
        params = self._scheduler.request_finished(request, block_ids) if self._scheduler is not None else None
        return False, params

    @never_raises(no)
    def has_pending_push_work(self) -> bool:
        """Asked between steps: must the engine keep stepping, though no request is left."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    @never_raises(no)
    def has_pending_block_frees(self) -> bool:
        """Asked when a running request finds no block: may it wait for saves instead of preempting another."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    @never_raises(no)
    def reset_cache(self) -> bool:
        """Called for ``reset_prefix_cache(reset_connector=True)``, which a sleep does too, between steps."""
        return self._scheduler.reset() if self._scheduler is not None else True


def _no_report() -> KVConnectorWorkerMetadata | None:
    return None


class WorkerHooks(KVConnectorBase_V1):
    """What KVTierConnector answers in a worker. ``_worker`` is None where the connector is disabled."""

    log: LimitedLog
    _worker: WorkerSide | None
    _reports: WorkerReports
    _kv_caches: dict[str, Any]

    @never_raises(nothing)
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

    @never_raises(nothing)
    def unregister_kv_caches(self) -> None:
        """Called before the KV tensors' memory is given back for a sleep (vLLM 0.33 and newer)."""
        if self._worker is not None:
            self._worker.suspend()

    @never_raises(nothing)
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

    @never_raises(no)
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

    @never_raises(no)
    def _start_saves(self, step: StepMetadata) -> bool:
        if self._worker is None:
            return False
        self._worker.start_saves(step)
        return True

    @never_raises(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called each step last: loads that ended. Failed ones go to ``failed_recving``, which all group layouts support."""
        step = self._connector_metadata
        return self._reports.take_results(idle=isinstance(step, StepMetadata) and step.idle)

    @never_raises(_no_report)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Called each step after get_transfer_results: saves that ended, for the scheduler."""
        return self._reports.take_report()
