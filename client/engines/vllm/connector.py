"""KVTierConnector: vLLM's connector interface, mapped onto the scheduler's and the worker's half.

The rule of this file: nothing raises into the engine once it runs, and a set-up that cannot be served is one clear warning and
misses from then on. A hook that fails is logged and answered with its fallback; what the engine then waits for (a load in the
scheduler's hooks, a load or a save in the workers') is reported as failed.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from ... import Client, InvalidRequest, KVTierError, Namespace
from ...keeper import Pin
from ...offload import CacheGeometry, LoadJob
from .background import LimitedLog, logger
from .compat import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from .config import ConnectorConfig
from .groups import Unsupported, is_known_to_scheduler, resolve_geometry
from .metadata import StepMetadata
from .namespace import build_namespace, namespace_digest
from .ranks import Parts, merge_stages, parts_of, resolve_ranks
from .reports import WorkerReports
from .scheduler import SchedulerSide
from .stats import SaveStats
from .worker import WorkerSide

__all__ = ["KVTierConnector"]

_START_SECONDS = 2.0

P = ParamSpec("P")
R = TypeVar("R")

Match: TypeAlias = tuple[int | None, bool]
Finish: TypeAlias = tuple[bool, dict[str, Any] | None]


def _nothing() -> None:
    return None


def _no_match() -> Match:
    return 0, False


def _free_now() -> Finish:
    return False, None


def _no() -> bool:
    return False


def _no_sources() -> dict[CacheHitSource, int]:
    return {}


def _no_stats() -> KVConnectorStats | None:
    return None


def _no_parts() -> KVConnectorHandshakeMetadata | None:
    return None


def _have_told(metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> bool:
    return any(isinstance(told, Parts) for told in metadata.values())


def _no_report() -> KVConnectorWorkerMetadata | None:
    return None


def _contained(
    fallback: Callable[[], R],
) -> Callable[[Callable[Concatenate[KVTierConnector, P], R]], Callable[Concatenate[KVTierConnector, P], R]]:
    """What a hook raises is logged, and the engine gets ``fallback()``: an exception inside a connector ends vLLM."""

    def decorate(hook: Callable[Concatenate[KVTierConnector, P], R]) -> Callable[Concatenate[KVTierConnector, P], R]:
        @functools.wraps(hook)
        def contained(self: KVTierConnector, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                text = f"{hook.__name__} failed: {error!r}"
                self.log.warn(hook.__name__, text, exc_info=True)  # noqa: G010 - a LimitedLog, not a Logger
                return fallback()

        return contained

    return decorate


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads KV blocks from kvtier and saves them there.

    Configure with ``kv_connector="KVTierConnector"``, ``kv_connector_module_path="kvtier.client.engines.vllm"`` and
    ``kv_load_failure_policy="recompute"``; see ConnectorConfig for ``kv_connector_extra_config``.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Called once in the scheduler's process and once in each worker, while the engine starts.

        Raises ValueError for settings that are wrong, a typo in the endpoint included; for nothing else.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self.log = LimitedLog()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._reports = WorkerReports()
        # Requests for whose loads the engine waits, and of which no worker knows yet.
        self._unsent_loads: set[str] = set()
        self._geometry: CacheGeometry | None = None
        self._block_pool: Any = None
        self._kv_caches: dict[str, Any] = {}
        # What all workers hold, where they had to tell each other (see ranks.py).
        self._told: Parts | None = None
        warn = logger.warning if role == KVConnectorRole.SCHEDULER else logger.debug
        self._config = ConnectorConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {}, warn)
        try:
            self._set_up()
        except Unsupported as reason:
            if role == KVConnectorRole.SCHEDULER:
                logger.warning("kvtier: the connector is disabled, every request is a miss: %s", reason)
        except InvalidRequest as error:
            raise ValueError(f"kvtier: {error}") from error
        except Exception as error:  # noqa: BLE001 - a cache that cannot start must not keep the engine from starting
            logger.warning("kvtier: the connector is disabled, its set-up failed: %r", error, exc_info=True)

    def _set_up(self) -> None:
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        assert kv_cache_config is not None
        self._geometry = geometry = resolve_geometry(vllm_config, kv_cache_config)
        parts = parts_of(geometry, kv_cache_config)
        if self.role == KVConnectorRole.SCHEDULER:
            policy = vllm_config.kv_transfer_config.kv_load_failure_policy
            if policy != "recompute":
                logger.warning(
                    "kvtier: kv_load_failure_policy is %r: a load that fails will fail its request; set it to 'recompute'",
                    policy,
                )
            if vllm_config.parallel_config.pipeline_parallel_size == 1:
                self._scheduler = self._make_scheduler_side(geometry, parts)
        elif is_known_to_scheduler(vllm_config, kv_cache_config):
            self._worker = self._make_worker_side(geometry, parts)

    def _make_scheduler_side(self, geometry: CacheGeometry, parts: Parts) -> SchedulerSide:
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        namespace = self._namespace(geometry, parts)
        digest, config = namespace_digest(namespace), self._scheduler_config()
        client = self._connect(namespace, None)
        try:
            # Requests may come right away, and the start of an engine takes half a minute anyway.
            client.wait_until_connected(_START_SECONDS)
        except KVTierError as error:
            logger.warning("kvtier: no server yet, the engine starts without: %s", error)
        logger.info(
            "kvtier: namespace %s, %d KV cache group(s), transport %s", digest, len(geometry.groups), client.transport
        )
        return SchedulerSide(
            client,
            geometry,
            digest,
            config,
            resolve_ranks(self._vllm_config, parts).workers,
            may_load=transfer.is_kv_consumer,
            may_save=transfer.is_kv_producer,
            log=self.log,
            batched_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens if config.lazy_offload else 0,
        )

    def _scheduler_config(self) -> ConnectorConfig:
        """The settings, but for lazy mode where adapters are served: a free block does not say whose it was."""
        config = self._config
        if config.lazy_offload and getattr(self._vllm_config, "lora_config", None) is not None:
            logger.warning("kvtier: lazy_offload does not go with LoRA adapters; blocks are stored when they are full")
            return replace(config, lazy_offload=False)
        return config

    def _make_worker_side(self, geometry: CacheGeometry, parts: Parts) -> WorkerSide:
        assert self._kv_cache_config is not None
        rank, ranks = self._vllm_config.parallel_config.rank, resolve_ranks(self._vllm_config, parts)
        namespace = self._namespace(geometry, parts)
        return WorkerSide(
            lambda pin: self._connect(namespace, ranks.part(rank), pin),
            geometry.groups,
            namespace_digest(namespace),
            self._kv_cache_config.num_blocks,
            self._reports,
            self.log,
            stores=ranks.stores(rank),
        )

    def _namespace(self, geometry: CacheGeometry, parts: Parts) -> Namespace:
        assert self._kv_cache_config is not None
        return build_namespace(self._vllm_config, self._kv_cache_config, geometry, self._config.tenant, parts)

    def _connect(self, namespace: Namespace, rank: int | None, pin: Pin | None = None) -> Client:
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        return Client(
            self._config.endpoint,
            namespace=namespace,
            name="vllm",
            engine_id=str(transfer.engine_id),
            rank=rank,
            transport=self._config.transport,
            pin=pin,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, a save that is dropped is a later miss."""
        return False

    # ---- worker; all on the worker's main thread

    @_contained(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Called once, when the KV tensors have been allocated."""
        self._kv_caches = kv_caches
        if self._worker is not None:
            self._register(self._worker)

    def _register(self, worker: WorkerSide) -> None:
        try:
            worker.register(self._kv_caches)
        except Unsupported as reason:
            logger.warning("kvtier: this worker loads and saves nothing: %s", reason)

    @_contained(_no_parts)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Called once, when the KV tensors are registered: what this worker holds, if the scheduler does not know.

        None otherwise: of several connectors in one engine only one may say something.
        """
        geometry, kv_cache_config = self._geometry, self._kv_cache_config
        if geometry is None or kv_cache_config is None or is_known_to_scheduler(self._vllm_config, kv_cache_config):
            return None
        return parts_of(geometry, kv_cache_config)

    @_contained(_nothing)
    def _join(self, parts: Parts) -> None:
        """The first step says what all workers hold."""
        self._told = parts
        if self._worker is None and self._geometry is not None:
            worker = self._make_worker_side(self._geometry, parts)
            self._register(worker)
            worker.await_server()
            self._worker = worker

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called each step before blocks are overwritten. Nothing to do: blocks being saved carry a reference (B4.12)."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called each step, after the forward was submitted (loads here are always asynchronous)."""
        step = self._connector_metadata
        if isinstance(step, StepMetadata) and step.parts is not None and self._told is None:
            self._join(step.parts)
        if isinstance(step, StepMetadata) and not self._start_loads(step):
            self._reports.refuse_loads(step)

    @_contained(_no)
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
        if isinstance(step, StepMetadata) and not self._start_saves(step):
            self._reports.refuse_saves(step)

    @_contained(_no)
    def _start_saves(self, step: StepMetadata) -> bool:
        if self._worker is None:
            return False
        self._worker.start_saves(step)
        return True

    @_contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called each step last: loads that ended. Failed ones go to ``failed_recving``, which all group layouts support."""
        step = self._connector_metadata
        return self._reports.take_results(idle=isinstance(step, StepMetadata) and step.idle)

    @_contained(_no_report)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Called each step after get_transfer_results: saves that ended, for the scheduler."""
        return self._reports.take_report()

    # ---- scheduler; all on the scheduler's thread

    @_contained(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called once, when the scheduler has built its cache manager."""
        self._block_pool = gpu_block_pool
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @_contained(_nothing)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Called once, before any request, with what get_handshake_metadata of all workers said."""
        geometry = self._geometry
        if geometry is None or (self._scheduler is not None and not _have_told(metadata)):
            return
        self._close_scheduler()
        self._scheduler = None
        parallel = self._vllm_config.parallel_config
        try:
            self._told = merge_stages(metadata, parallel.pipeline_parallel_size, parallel.tensor_parallel_size)
            self._scheduler = self._make_scheduler_side(geometry, self._told)
        except Unsupported as reason:
            logger.warning("kvtier: the connector is disabled, every request is a miss: %s", reason)
            return
        self._scheduler.bind_pool(self._block_pool)

    @_contained(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Called when a request arrives, before it is ever scheduled."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @_contained(_no_match)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Match:
        """Called each time a waiting request is considered; see SchedulerSide.matched_tokens."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @_contained(_nothing)
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

    @_contained(_no_sources)
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
        jobs = {job.request_id: job for job in step.loads}
        step.loads = [jobs.get(request_id) or LoadJob(request_id) for request_id in sorted(self._unsent_loads)]
        self._unsent_loads.clear()
        return step

    @_contained(StepMetadata)
    def _build_step(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build_step(scheduler_output) if self._scheduler is not None else StepMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        """Called with what all workers reported, after each step that reported something."""
        self._take_saves(connector_output)
        self._take_loads(connector_output)

    @_contained(_nothing)
    def _take_saves(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.saves_reported(connector_output.kv_connector_worker_meta)

    @_contained(_nothing)
    def _take_loads(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_reported(
                connector_output.finished_recving or (), connector_output.failed_recving or ()
            )

    @_contained(_no_stats)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Called each step, after update_connector_output; workers have nothing to count."""
        not_stored = self._scheduler.take_not_stored() if self._scheduler is not None else 0
        return SaveStats.of(not_stored) if not_stored else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Called by vLLM's logger with what get_kv_connector_stats returned."""
        return SaveStats(data or {})

    @_contained(_free_now)
    def request_finished(self, request: Any, block_ids: list[int]) -> Finish:
        """Called once at a request's end by engines without groups; blocks may be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_contained(_free_now)
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Finish:
        """Called once at a request's end, before its blocks are freed. They may be: those to be saved carry a reference."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request, block_ids)
        return False, None

    @_contained(_no)
    def has_pending_push_work(self) -> bool:
        """Asked between steps: must the engine keep stepping, though no request is left."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    @_contained(_no)
    def has_pending_block_frees(self) -> bool:
        """Asked when a running request finds no block: may it wait for saves instead of preempting another."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    @_contained(_no)
    def reset_cache(self) -> bool:
        """Called for ``reset_prefix_cache(reset_connector=True)``, between steps."""
        return self._scheduler.reset() if self._scheduler is not None else True

    def shutdown(self) -> None:
        """Called when the process ends, by scheduler and workers alike."""
        self._close_scheduler()
        self._close_worker()

    @_contained(_nothing)
    def _close_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    @_contained(_nothing)
    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
