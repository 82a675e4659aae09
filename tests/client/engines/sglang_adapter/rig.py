"""Host pools with known bytes, and storages over them as an engine attaches them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvtier.client.engines.sglang import KVTierStorage, storage
from kvtier.client.engines.sglang import config as adapter_config
from kvtier.client.engines.sglang.config import StorageConfig
from kvtier.client.engines.sglang.layout import HostPool
from kvtier.client.engines.sglang.namespace import Space, prepare_spaces
from kvtier.client.timeouts import Timeouts

__all__ = [
    "HEADS",
    "LAYOUTS",
    "PAGE",
    "attach",
    "await_links",
    "engine_arguments",
    "hashes",
    "kv_pool",
    "latent_pool",
    "mamba_pool",
    "page_of",
    "rows",
    "spaces_of",
    "storage_config",
]

PAGE = 4
LAYERS, HEADS, DIM = 3, 2, 8
LAYOUTS = ("page_first_direct", "page_first", "layer_first")


def hashes(seed: str, count: int) -> list[str]:
    """Returns the chained hashes of a prompt's pages, as SGLang makes them."""
    found, digest = [], seed
    for _ in range(count):
        digest = hashlib.sha256(digest.encode()).hexdigest()
        found.append(digest)
    return found


def rows(*pages: int, page: int = PAGE) -> torch.Tensor:
    """Returns the rows of the tokens of these pages."""
    return torch.cat([torch.arange(number * page, (number + 1) * page) for number in pages])


def kv_pool(layout: str = "page_first_direct", pages: int = 8, *, seed: int | None = None, heads: int = HEADS) -> Any:
    """Returns a host pool with random bytes, or with zeros."""
    dims = {
        "page_first_direct": (2, pages, LAYERS, PAGE, heads, DIM),
        "page_first": (2, pages * PAGE, LAYERS, heads, DIM),
        "layer_first": (2, LAYERS, pages * PAGE, heads, DIM),
    }[layout]
    pool = object.__new__(MHATokenToKVPoolHost)
    pool.layout, pool.page_size, pool.size, pool.page_num = layout, PAGE, pages * PAGE, pages
    pool.layer_num, pool.head_num, pool.head_dim, pool.dtype = LAYERS, heads, DIM, torch.float16
    pool.kv_buffer = _bytes(dims, torch.float16, seed)
    return pool


def latent_pool(pages: int = 8, *, seed: int | None = None) -> Any:
    """Returns a host pool of latent KV, which all ranks have alike."""
    pool = object.__new__(MLATokenToKVPoolHost)
    pool.layout, pool.page_size, pool.size, pool.page_num = "page_first_direct", PAGE, pages * PAGE, pages
    pool.layer_num, pool.kv_cache_dim, pool.dtype = LAYERS, DIM, torch.float16
    pool.kv_buffer = _bytes((pages, LAYERS, PAGE, 1, DIM), torch.float16, seed)
    return pool


def mamba_pool(states: int = 8, *, seed: int | None = None, layout: str = "page_first_direct") -> Any:
    """Returns a host pool of Mamba states, of which one page holds one."""
    pool = object.__new__(MambaPoolHost)
    pool.layout, pool.page_size, pool.num_mamba_layers = layout, 1, LAYERS
    pool.dtype = pool.conv_dtype = torch.float16
    pool.temporal_dtype = torch.float32
    pool.temporal_state_elem_size, pool.conv_state_elem_sizes, pool.conv_state_shapes = 16, [6], [(2, 3)]
    pool.slot_state_device_tensors = []
    pool.temporal_buffer = _bytes((states, LAYERS, 1, 4, 4), torch.float32, seed)
    pool.conv_buffer = [_bytes((states, LAYERS, 1, 2, 3), torch.float16, seed)]
    return pool


def page_of(pool: Any, page: int) -> bytes:
    """Returns the bytes of a page as SGLang itself copies it to a file."""
    if isinstance(pool, MambaPoolHost):
        return b"".join(buffer[page].numpy().tobytes() for buffer in (pool.temporal_buffer, *pool.conv_buffer))
    flat: bytes = pool.get_data_page(page * PAGE, flat=True).contiguous().view(torch.uint8).numpy().tobytes()
    return flat


def storage_config(extra: Mapping[str, Any], **config: Any) -> HiCacheStorageConfig:
    """Returns what SGLang passes to the storage of an engine with one rank, changed by `config`."""
    usual = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "tiny",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**usual, **config})


def engine_arguments(changed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the arguments of an engine by SGLang's groups."""
    given: dict[str, dict[str, Any]] = {
        "model": {"model_path": "tiny", "revision": "a" * 40},
        "device": {"device": "cpu"},
        "lora": {"enable_lora": None, "lora_paths": None},
        "parallel": {"enable_kv_cache_sharding": False},
    }
    for group, values in changed.items():
        given.setdefault(group, {}).update(values)
    return given


def spaces_of(
    *pools: tuple[str, Any],
    settings: StorageConfig | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    version: str = "",
    **config: Any,
) -> list[Space]:
    """Returns the namespaces of an engine with these pools, without a server."""
    probed = [HostPool.probe(name, pool) for name, pool in pools]
    given = engine_arguments(arguments or {})
    return prepare_spaces(storage_config({}, **config), given, settings or StorageConfig(), probed, version)()


@contextlib.contextmanager
def attach(
    endpoint: str,
    *pools: Any,
    extra: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    **config: Any,
) -> Iterator[KVTierStorage]:
    """A storage to which SGLang has registered these pools: the first is that of the KV.

    `arguments`: arguments of the engine by SGLang's groups.
    """
    settings = storage_config(extra_config(**{"endpoint": endpoint, **(extra or {})}), **config)
    given = engine_arguments(arguments or {})
    long = Timeouts(connect=60, call=60, transfer=60)
    with (
        mock.patch.object(KVTierStorage, "call_seconds", 120.0),
        mock.patch.object(adapter_config, "MAX_WAIT_SECONDS", 60.0),
        mock.patch.object(storage, "engine_settings", return_value=given),
        mock.patch.object(storage, "agree", lambda text, ranks: text if ranks == 1 else "agreed"),
        mock.patch.object(storage, "Timeouts", return_value=long),
        contextlib.closing(KVTierStorage(settings, {})) as attached,
    ):
        attached.register_mem_pool_host(pools[0])
        for name, pool in zip((PoolName.KV, PoolName.MAMBA), pools, strict=False):
            attached.register_mem_host_pool_v2(pool, name)
        attached.on_host_pools_registered()
        await_links(attached)
        yield attached


def await_links(storage: KVTierStorage) -> None:
    """Waits until the storage has read the model's files and is connected."""
    if storage._connecting is not None:
        storage._connecting.wait(120)


def extra_config(**more: Any) -> dict[str, Any]:
    """Returns the settings after SGLang has taken out its own."""
    mine = {"lookup_timeout_s": 30, "load_timeout_s": 60}
    names = {"backend_name": "kvtier", "module_path": "kvtier.client.engines.sglang", "class_name": "KVTierStorage"}
    return {**names, "interface_v1": 1, **mine, **more}


def _bytes(dims: tuple[int, ...], dtype: torch.dtype, seed: int | None) -> torch.Tensor:
    if seed is None:
        return torch.zeros(dims, dtype=dtype)
    return torch.randn(dims, generator=torch.Generator().manual_seed(seed)).to(dtype)
