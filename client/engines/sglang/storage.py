"""KVTierStorage: one per rank of an engine; SGLang's HiCache calls it.

No exception reaches the engine, except for invalid settings at the start. If the engine is not
supported, the storage logs one warning, and every page is a miss.
"""

from __future__ import annotations

import functools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ... import KVTierError, Timeouts
from ..failures import RateLimitedWarnings, Unsupported, never_raises
from ..identity import InBackground, namespace_digest
from .compat import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
    StorageMetrics,
    agree,
    engine_settings,
    logger,
)
from .config import StorageConfig
from .deadlines import CALL_SECONDS, Deadline, DeadlineClient, ends_in_time
from .found_pages import Window, restorable_prefixes
from .layout import KV, HostPool
from .links import PoolLink
from .namespace import Space, prepare_spaces
from .stats import TransferStats

__all__ = ["KVTierStorage"]

_START_SECONDS = 2.0


class KVTierStorage(HiCacheStorage):
    """Loads and stores pages of HiCache's host pools.

    `StorageConfig` lists `--hicache-storage-backend-extra-config`.
    """

    call_seconds = CALL_SECONDS

    _clears: ClassVar[int] = 0
    """Clears in this process. SGLang can attach another storage later, and the weights that the
    engine then has are probably not those of the model's files."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Called on all ranks when SGLang attaches the back end. Raises ValueError for settings."""
        self.log = RateLimitedWarnings(logger)
        self.deadline = Deadline()
        self._config = storage_config
        self._settings = StorageConfig.parse(storage_config.extra_config or {}, logger.warning)
        self._stats = TransferStats(enabled=storage_config.enable_storage_metrics)
        self._pools: dict[str, Any] = {}
        self._clients: list[DeadlineClient] = []
        self._links: dict[str, PoolLink] = {}
        self._changing = threading.Lock()
        self._generation = 0
        """Number of connections and ends. A connection that is late is closed."""
        self._connecting: InBackground[bool] | None = None
        self._open = False
        self._settings.check_connection()
        # All ranks must clear into the same namespace. Other engines must not use this namespace.
        self._name = agree(uuid.uuid4().hex, storage_config.tp_size)

    # ---- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Called first, with the pool of the KV."""
        self.mem_pool_host = mem_pool_host
        self._pools[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Called with each pool, also of the KV. Draft models add pools while the engine runs."""
        self._pools[str(host_pool_name)] = host_pool
        if self._open:
            self._connect()

    def on_host_pools_registered(self) -> None:
        """Called when the pools at the start are known."""
        self._open = True
        self._connect()

    def _connect(self) -> None:
        """Connects in the namespaces of the current pools and version. Ends earlier sessions.

        SGLang does not wait for this, because it reads the files of the model. Until the storage is
        connected, every page is a miss.
        """
        self.close()
        try:
            work = functools.partial(self._open_links, self._prepare(), self._generation)
            self._connecting = InBackground(work, self._disable)
        except Exception as error:  # noqa: BLE001 - the engine must start without a cache
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        if isinstance(error, Unsupported | OSError):
            logger.warning("kvtier: the storage is disabled, every page is a miss: %s", error)
        else:
            logger.warning("kvtier: the storage is disabled, its set-up failed: %r", error, exc_info=error)

    def _prepare(self) -> Callable[[], list[Space]]:
        pools = [HostPool.probe(name, pool) for name, pool in self._pools.items()]
        version = self._settings.weights_version
        if self._clears:
            version = f"{version}/{self._name}/{self._clears}"
        return prepare_spaces(self._config, engine_settings(), self._settings, pools, version)

    def _open_links(self, spaces_of: Callable[[], list[Space]], generation: int) -> bool:
        """Runs in the background. Returns False if a later connection has replaced this one."""
        clients: list[DeadlineClient] = []
        links: dict[str, PoolLink] = {}
        for space in spaces_of():
            clients.append(client := self._client_of(space))
            try:
                client.wait_until_connected(_START_SECONDS)
            except KVTierError as error:
                logger.warning("kvtier: no server is connected yet; until then every page is a miss: %s", error)
            for group, pool in enumerate(space.pools):
                links[pool.name] = PoolLink(pool, group, client, self._settings, self._stats, self.log)
            logger.info(
                "kvtier: namespace %s, pages of %s bytes",
                namespace_digest(space.namespace),
                {pool.name: pool.part_bytes for pool in space.pools},
            )
        with self._changing:
            is_current = generation == self._generation
            if is_current:
                self._clients, self._links = clients, links
        for client in () if is_current else clients:
            client.close()
        return is_current

    def _client_of(self, space: Space) -> DeadlineClient:
        return DeadlineClient(
            self._settings.endpoint,
            self.deadline,
            namespace=space.namespace,
            name="sglang",
            rank=space.rank,
            transport=self._settings.transport,
            timeouts=Timeouts(transfer=self.call_seconds),
            credentials=self._settings.credentials,
        )

    # ---- pages of the KV

    @never_raises(lambda: 0)
    @ends_in_time
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Called per request, on a thread for lookups. Ranks then agree on the smallest number."""
        link = self._links.get(KV)
        return link.find(keys) if link is not None and keys else 0

    @ends_in_time
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Called after `batch_exists`, on a thread for loads, with some or all of these pages."""
        return self._load(KV, keys, host_indices)

    @ends_in_time
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Called on a thread for stores. If one page is not stored, SGLang stores none after it."""
        return self._store(KV, keys, host_indices)

    def _load(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        loaded = self._load_leading(pool, keys, indices)
        return [number < loaded for number in range(len(keys))]

    @never_raises(lambda: 0)
    def _load_leading(self, pool: str, keys: Sequence[str], indices: Any) -> int:
        link = self._links.get(pool)
        return link.load(keys, indices) if link is not None and keys else 0

    def _store(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        return self._store_each(pool, keys, indices) or [False] * len(keys)

    @never_raises(list)
    def _store_each(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        link = self._links.get(pool)
        return link.store(keys, indices) if link is not None and keys else []

    # ---- pages of all pools of a hybrid model

    @never_raises(PoolTransferResult.empty)
    @ends_in_time
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """As `batch_exists`, for a prefix of which all pools have what they need.

        A pool with BLOCK_GROUPS limits no prefix in SGLang. It is not looked up, so SGLang computes
        it.
        """
        limit = self.batch_exists(keys)
        found, windows = {KV: limit}, {}
        for transfer in pool_transfers or ():
            link = self._links.get(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                pages = link.find(keys[:limit]) if link is not None and limit else 0
                found[transfer.name], limit = pages, min(limit, pages)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                if link is None:
                    return PoolTransferResult.empty()
                ask = functools.partial(_ask, link, keys)
                windows[transfer.name] = Window(max(1, len(transfer.keys or ())), ask)
        restorable = restorable_prefixes(limit, list(windows.values()))
        for name, window in windows.items():
            found[name] = next((length for length in range(limit, 0, -1) if window.restores(length)), 0)
        hits = {name: pages for name, pages in found.items() if pages}
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    @ends_in_time
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Called after `batch_exists_v2`, and after the KV has been loaded."""
        return {each.name: self._load(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    @ends_in_time
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Called before the same pages of the KV are stored."""
        return {each.name: self._store(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    # ---- the engine's other calls

    @never_raises()
    def clear(self) -> None:
        """Called on all ranks for `/clear_hicache_storage_backend`, while the engine is idle.

        The engine then uses a namespace of its own, so it finds nothing that was stored before, in
        any tier. Other engines may use the earlier namespace, so its blocks stay. Blocks of an
        earlier namespace of this engine are removed. A storage that SGLang attaches later to this
        engine also has a namespace of its own.
        """
        if self._clears:
            for client in self._clients:
                try:
                    client.reset(retire=True)
                except KVTierError as error:
                    logger.warning("kvtier: blocks of the cleared namespace are left to eviction: %s", error)
        KVTierStorage._clears += 1
        self._connect()

    def get_stats(self) -> StorageMetrics | None:
        """Called in each step of the scheduler, if the engine has metrics."""
        return self._stats.take()

    def close(self) -> None:
        """Called when SGLang detaches the back end, or ends."""
        with self._changing:
            self._generation += 1
            clients, self._clients, self._links = self._clients, [], {}
        for client in clients:
            client.close()

    # ---- methods that SGLang calls only without `interface_v1`

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False


def _ask(link: PoolLink, keys: Sequence[str], first: int, end: int) -> list[bool]:
    return link.find_each(keys[first:end])
