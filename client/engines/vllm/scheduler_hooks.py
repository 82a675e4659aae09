"""vLLM's hooks in the scheduler's process, mapped onto the scheduler's half. All of them run on the scheduler's thread."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from ...offload import LoadJob
from .background import LimitedLog
from .compat import CacheHitSource, KVCacheEvent, KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from .containment import contained, no, nothing
from .ranks import Parts
from .scheduler.scheduler import SchedulerSide
from .worker.metadata import StepMetadata

__all__ = ["SchedulerHooks"]

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

    @contained(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called once, when the scheduler has built its cache manager."""
        self._block_pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @contained(nothing)
    def on_new_request(self, request: Any) -> None:
        """Called when a request arrives, before it is ever scheduled."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @contained(_no_match)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Match:
        """Called each time a waiting request is considered; see SchedulerSide.matched_tokens."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @contained(nothing)
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

    @contained(_no_sources)
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

    @contained(StepMetadata)
    def _build_step(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build_step(scheduler_output) if self._scheduler is not None else StepMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """Called with what all workers reported, after each step; most of them have nothing to report."""
        if connector_output.kv_connector_worker_meta is not None:
            self._take_saves(connector_output)
        if connector_output.finished_recving or connector_output.failed_recving:
            self._take_loads(connector_output)

    @contained(nothing)
    def _take_saves(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.saves_reported(connector_output.kv_connector_worker_meta)

    @contained(nothing)
    def _take_loads(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_reported(
                connector_output.finished_recving or (), connector_output.failed_recving or ()
            )

    @contained(_no_events)
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Called each step, after update_connector_output; see events.py."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @contained(_free_now)
    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        """Called once at a request's end by engines without groups; blocks may be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    @contained(_free_now)
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Finish:
        """Called once at a request's end, before its blocks are freed. They may be: those to be saved carry a reference."""
        params = self._scheduler.request_finished(request, block_ids) if self._scheduler is not None else None
        return False, params

    @contained(no)
    def has_pending_push_work(self) -> bool:
        """Asked between steps: must the engine keep stepping, though no request is left."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    @contained(no)
    def has_pending_block_frees(self) -> bool:
        """Asked when a running request finds no block: may it wait for saves instead of preempting another."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    @contained(no)
    def reset_cache(self) -> bool:
        """Called for ``reset_prefix_cache(reset_connector=True)``, which a sleep does too, between steps."""
        return self._scheduler.reset() if self._scheduler is not None else True
