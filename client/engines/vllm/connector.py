"""KVTierConnector: vLLM creates one in the scheduler's process and one in each worker.

Once the engine runs, no exception reaches the engine. If the configuration is not supported, the
connector logs one warning, and every request is a miss. If a hook fails, the exception is logged
and the hook returns a fallback value. The loads and saves of that step are reported as failed.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ....cuda.host.pinning import Pin
from ....protos.endpoint import client_endpoint
from ... import Client, EngineAddress, InvalidRequest, KVTierError, Namespace
from ...events import EventStream, HeldChange
from ...handoff import EngineIdentity
from ...offload import CacheGeometry
from ..failures import Unsupported, never_raises
from ..identity import WEIGHTS, InBackground, namespace_digest, with_weights_version
from .background import RateLimitedLog, logger
from .compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    watch_engine_core,
)
from .config import ConnectorConfig
from .groups import divide_pages, is_known_to_scheduler, resolve_geometry
from .hooks import SchedulerHooks, WorkerHooks
from .namespace import identify_model, prepare_namespace
from .peers import Peers, ServerLink, address_of
from .ranks import Parts, merge_stages, parts_of, pieces_of, resolve_ranks, worker_number
from .scheduler.scheduler import SchedulerSide
from .stats import ConnectorStats, KVTierPromMetrics, TransferCounters
from .worker.device_route import cuda_route
from .worker.reports import WorkerReports
from .worker.worker import WorkerSide

__all__ = ["KVTierConnector"]

_START_SECONDS = 2.0


class KVTierConnector(SchedulerHooks, WorkerHooks):
    """Loads KV blocks from kvtier and saves them there.

    Set `kv_connector="KVTierConnector"`, `kv_connector_module_path="kvtier.client.engines.vllm"`
    and `kv_load_failure_policy="recompute"`. `ConnectorConfig` lists `kv_connector_extra_config`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Called while the engine starts. Raises only ValueError, for invalid settings."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.log = RateLimitedLog()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._reports = WorkerReports(worker_number(vllm_config))
        self._counters = TransferCounters()
        self._unsent_loads: set[str] = set()
        self._open_loads: set[str] = set()
        self._geometry: CacheGeometry | None = None
        self._block_pool: Any = None
        self._kv_caches: dict[str, Any] = {}
        self._own_parts: Parts | None = None
        self._all_parts: Parts | None = None
        # Identity of the model's files on this worker's host.
        self._model: InBackground[str] | None = None
        self._namespace: Namespace | None = None
        self._digest = ""
        warn = logger.warning if role == KVConnectorRole.SCHEDULER else logger.debug
        self._config = ConnectorConfig.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {}, warn)
        self._config.check_connection()
        try:
            self._set_up()
        except Unsupported as reason:
            if role == KVConnectorRole.SCHEDULER:
                logger.warning("kvtier: the connector is disabled, every request is a miss: %s", reason)
        except InvalidRequest as error:
            raise ValueError(f"kvtier: {error}") from error
        except Exception as error:  # noqa: BLE001 - the engine must start without a cache
            logger.warning("kvtier: the connector is disabled, its set-up failed: %r", error, exc_info=True)

    def _set_up(self) -> None:
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        assert kv_cache_config is not None
        geometry = resolve_geometry(vllm_config, kv_cache_config)
        pieces = pieces_of(self._config.kv_parts, vllm_config, kv_cache_config)
        self._geometry = geometry = divide_pages(geometry, pieces)
        self._own_parts = parts = parts_of(geometry, kv_cache_config, pieces)
        if self.role == KVConnectorRole.SCHEDULER:
            policy = vllm_config.kv_transfer_config.kv_load_failure_policy
            if policy != "recompute":
                logger.warning(
                    "kvtier: kv_load_failure_policy is %r, so a failed load fails its request; set the policy to 'recompute'",
                    policy,
                )
            if vllm_config.parallel_config.pipeline_parallel_size == 1:
                self._scheduler = self._make_scheduler_side(geometry, parts)
        elif is_known_to_scheduler(vllm_config, kv_cache_config):
            self._worker = self._make_worker_side(geometry, parts)

    def _make_scheduler_side(self, geometry: CacheGeometry, parts: Parts) -> SchedulerSide:
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        config = self._config
        # The engine does not wait for digests of files, so this is called in the background.
        namespace_of = functools.cache(
            prepare_namespace(self._vllm_config, self._kv_cache_config, geometry, parts, config.tenant)
        )
        if config.peers and client_endpoint(config.advertise or config.endpoint).is_loopback:
            logger.warning(
                "kvtier: `peers` are on other hosts, but engines there cannot reach this engine's server at %s: set `advertise`",
                self._address[0],
            )
        watch_engine_core(self)
        return SchedulerSide(
            None,
            geometry,
            "",
            config,
            resolve_ranks(self._vllm_config, parts).workers,
            may_load=transfer.is_kv_consumer,
            may_save=transfer.is_kv_producer,
            log=self.log,
            counters=self._counters,
            publish_events=_publishes_events(self._vllm_config),
            open_stream=self._open_stream if config.watch_events else None,
            identity=EngineIdentity(
                str(transfer.engine_id), *self._address, self._vllm_config.parallel_config.tensor_parallel_size
            ),
            connect=functools.partial(self._link, namespace_of),
            batched_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens if config.lazy_offload else 0,
        )

    def _make_worker_side(self, geometry: CacheGeometry, parts: Parts) -> WorkerSide:
        assert self._kv_cache_config is not None
        rank, ranks = self._vllm_config.parallel_config.rank, resolve_ranks(self._vllm_config, parts)
        self._model = InBackground(
            identify_model(self._vllm_config),
            lambda error: self._warn("identity", f"this worker loads and saves nothing: {error}"),
        )
        return WorkerSide(
            lambda piece, pin: self._connect(self._worker_namespace, ranks.part(rank, piece), pin),
            geometry.groups,
            "",
            self._kv_cache_config.num_blocks,
            self._reports,
            self.log,
            self._counters,
            stores=ranks.stores(rank),
            describes=ranks.part(rank) == 0,
            peers_of=lambda piece, own, pin: self._peers(own, self._worker_namespace, ranks.part(rank, piece), pin),
            route_of=cuda_route if self._config.transport in {"auto", "cuda_ipc"} else None,
            pieces=parts.pieces,
            has_model=self._has_model,
        )

    def _link(self, namespace_of: Callable[[], Namespace], version: str) -> ServerLink:
        """Returns the scheduler's clients for weights of this version. Runs in the background.

        Raises Unsupported or OSError if the namespace cannot be known.
        """
        try:
            namespace = with_weights_version(namespace_of(), version)
        except (Unsupported, OSError):
            raise
        except Exception as error:
            raise Unsupported(f"the identity of the model is unknown: {error!r}") from error
        client = self._connect(namespace, None)
        try:
            client.wait_until_connected(_START_SECONDS)
        except KVTierError as error:
            logger.warning("kvtier: no server is connected yet; until then every request is a miss: %s", error)
        logger.info(
            "kvtier: namespace %s, %d KV cache group(s), transport %s",
            namespace_digest(namespace),
            len(namespace.groups),
            client.transport,
        )
        return ServerLink(version, namespace, client, self._peers(client, namespace, None))

    def _has_model(self, seconds: float) -> bool:
        """Whether this worker's host has the files of the namespace. Waits for the digest."""
        model = self._model.wait(seconds) if self._model is not None else None
        has_model = model is not None and model == self._worker_namespace.attributes[WEIGHTS]
        if model is not None and not has_model:
            self._warn("identity", "the model's files on this worker's host are not those of the scheduler's host")
        return has_model

    def _warn(self, kind: str, text: str) -> None:
        self.log.warn(kind, text)  # noqa: G010 - not a logging.Logger

    @property
    def _worker_namespace(self) -> Namespace:
        assert self._namespace is not None
        return self._namespace

    @property
    def _address(self) -> tuple[str, int]:
        return address_of(self._config.endpoint, self._config.advertise)

    def _peers(self, own: Client, namespace: Namespace, rank: int | None, pin: Pin | None = None) -> Peers:
        addresses = (self._address, address_of(self._config.endpoint))
        return Peers(own, addresses, self._config.peers, lambda endpoint: self._connect(namespace, rank, pin, endpoint))

    def _connect(
        self, namespace: Namespace, rank: int | None, pin: Pin | None = None, endpoint: str | None = None
    ) -> Client:
        transfer = self._vllm_config.kv_transfer_config
        assert transfer is not None
        return Client(
            endpoint or self._config.endpoint,
            namespace=namespace,
            name="vllm",
            engine_id=str(transfer.engine_id),
            rank=rank,
            transport=self._config.transport if endpoint is None else "tcp",
            pin=pin,
            credentials=self._config.credentials,
            published=self._published if rank is None and endpoint is None else None,
        )

    @property
    def _published(self) -> EngineAddress | None:
        address = self._config.engine_address
        if not address:
            return None
        served = getattr(self._vllm_config.model_config, "served_model_name", None) or ""
        return EngineAddress(address, served if isinstance(served, str) else served[0])

    def _open_stream(self, client: Client, on_changes: Callable[[Sequence[HeldChange]], object]) -> EventStream:
        return EventStream(
            client,
            on_changes,
            functools.partial(self.log.warn, "events"),
            endpoint=self._config.endpoint,
            credentials=self._config.credentials,
            with_contents=self._config.publish_token_ids,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: if a cache drops a save, the only consequence is a later miss."""
        return False

    # ---- handshake: tells the scheduler the parts of all workers (see ranks.py)

    @never_raises()
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Called once, when the KV tensors are registered.

        Returns this worker's parts if the scheduler cannot compute them. In all other cases returns
        None, because only one connector of an engine may return metadata.
        """
        geometry, kv_cache_config = self._geometry, self._kv_cache_config
        if geometry is None or kv_cache_config is None or is_known_to_scheduler(self._vllm_config, kv_cache_config):
            return None
        return self._own_parts

    @never_raises()
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Called once before any request, with the handshake metadata of all workers."""
        geometry = self._geometry
        if geometry is None or (
            self._scheduler is not None and not any(isinstance(told, Parts) for told in metadata.values())
        ):
            return
        self._close_scheduler()
        self._scheduler = None
        parallel = self._vllm_config.parallel_config
        try:
            self._all_parts = merge_stages(metadata, parallel.pipeline_parallel_size, parallel.tensor_parallel_size)
            self._scheduler = self._make_scheduler_side(geometry, self._all_parts)
        except Unsupported as reason:
            logger.warning("kvtier: the connector is disabled, every request is a miss: %s", reason)
            return
        self._scheduler.bind_pool(self._block_pool)

    @never_raises()
    def _adopt_parts(self, parts: Parts) -> None:
        if self._all_parts is not None:
            return
        self._all_parts = parts
        if self._worker is None and self._geometry is not None:
            worker = self._make_worker_side(self._geometry, parts)
            self._register(worker)
            self._worker = worker

    # ---- weights and adapters that change (see watch_engine_core)

    @never_raises()
    def weights_named(self) -> None:
        """Called when vLLM was given a new name of the weights, before a reset of connectors."""
        if self._scheduler is not None:
            self._scheduler.weights_named()

    @contextlib.contextmanager
    def loading_adapter(self, adapter: Any) -> Iterator[None]:
        """Context in which workers load a LoRA adapter. If it raises, the adapter is not served."""
        self._adapter_loads(adapter)
        yield
        self._adapter_loaded(adapter)

    @never_raises()
    def _adapter_loads(self, adapter: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.adapter_loads(adapter)

    @never_raises()
    def _adapter_loaded(self, adapter: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.adapters.loaded(adapter)

    @never_raises()
    def _adopt_namespace(self, pickled: bytes, digest: str) -> None:
        parts = self._all_parts or self._own_parts
        if digest == self._digest or self._worker is None or parts is None:
            return
        namespace: Namespace = pickle.loads(pickled)  # noqa: S301 - vLLM pickled the step
        if namespace.attributes["layers"] != parts.digest:
            self._warn("layers", "this worker has other layers than the scheduler expects, so it transfers nothing")
            return
        self._namespace = namespace
        self._worker.reconnect(digest)
        self._digest = digest  # if the line above raises, the next step with jobs tries again

    # ---- statistics and shutdown

    @never_raises()
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Called each step, after get_transfer_results or update_connector_output."""
        return self._counters.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Called by vLLM's logger with the data of get_kv_connector_stats."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Called while the API server's process starts. That process has no connector."""
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._close_scheduler()
        self._close_worker()

    @never_raises()
    def _close_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    @never_raises()
    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _publishes_events(vllm_config: Any) -> bool:
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)
