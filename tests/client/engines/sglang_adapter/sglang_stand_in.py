"""The part of SGLang that the adapter imports, for an environment without SGLang.

Behaves as SGLang 0.5.23 in what the tests of this folder need. `make test-sglang` runs the same
tests with SGLang itself.
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

__all__ = ["MODULES", "install"]


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


class PoolName(enum.StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        raise NotImplementedError

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        raise NotImplementedError

    def on_host_pools_registered(self) -> None:
        raise NotImplementedError

    def batch_exists_v2(self, keys: Any, pool_transfers: Any = None, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> Any:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: Any, extra_info: Any = None) -> int:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError

    def get_stats(self) -> Any:
        raise NotImplementedError


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class MHATokenToKVPoolHost:
    """Keys and values in one buffer, whose dimensions depend on the layout."""

    storage_format_tag = None
    layout: str
    page_size: int
    size: int
    layer_num: int
    head_num: int
    head_dim: int
    dtype: torch.dtype
    kv_buffer: torch.Tensor

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token = self.head_num * self.head_dim * self.dtype.itemsize
        values = self.layer_num * self.size * token
        addresses = []
        for first in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                keys = [first * token + layer * self.size * token for layer in range(self.layer_num)]
            else:
                keys = [first * self.layer_num * token]
            addresses += [self.kv_buffer.data_ptr() + at + more for at in keys for more in (0, values)]
        layers = 1 if self.layout == "layer_first" else self.layer_num
        return addresses, [layers * self.page_size * token] * len(addresses)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:  # noqa: FBT001, FBT002 - as SGLang's
        end, page = index + self.page_size, index // self.page_size
        match self.layout:
            case "layer_first":
                data = self.kv_buffer[:, :, index:end]
            case "page_first":
                data = self.kv_buffer[:, index:end]
            case _:
                data = self.kv_buffer[:, page : page + 1]
        return data.flatten() if flat else data


class MLATokenToKVPoolHost:
    """Latent KV: one piece per page, in page-first layouts."""

    storage_format_tag = None
    layout: str
    page_size: int
    layer_num: int
    kv_cache_dim: int
    dtype: torch.dtype
    kv_buffer: torch.Tensor

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token = self.layer_num * self.kv_cache_dim * self.dtype.itemsize
        firsts = indices.tolist()[:: self.page_size]
        return [self.kv_buffer.data_ptr() + first * token for first in firsts], [token * self.page_size] * len(firsts)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:  # noqa: FBT001, FBT002 - as SGLang's
        data = self.kv_buffer[index // self.page_size]
        return data.flatten() if flat else data


class MambaPoolHost:
    """One state per page: temporal state, then convolution states."""

    storage_format_tag = None
    layout: str
    page_size: int
    num_mamba_layers: int
    dtype: torch.dtype
    temporal_dtype: torch.dtype
    conv_dtype: torch.dtype
    temporal_state_elem_size: int
    conv_state_elem_sizes: list[int]
    temporal_buffer: torch.Tensor
    conv_buffer: list[torch.Tensor]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if self.layout not in {"page_first", "page_first_direct"}:
            raise ValueError(f"Mamba storage zero-copy requires page_first layout, got {self.layout}")
        buffers = [self.temporal_buffer, *self.conv_buffer]
        sizes = [buffer[0].nbytes for buffer in buffers]
        addresses = [
            buffer.data_ptr() + index * size
            for index in indices.tolist()
            for buffer, size in zip(buffers, sizes, strict=True)
        ]
        return addresses, sizes * len(indices)


def _no_engine() -> Any:
    raise ValueError("Global server args is not set yet!")


MODULES: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.version": {"__version__": "0.5.23"},
    "sglang.srt": {},
    "sglang.srt.arg_groups": {},
    "sglang.srt.arg_groups.arg_utils": {"namespace_of": _no_engine},
    "sglang.srt.mem_cache": {},
    "sglang.srt.mem_cache.hicache_storage": {
        kind.__name__: kind
        for kind in (HiCacheStorage, HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult)
    },
    "sglang.srt.mem_cache.pool_host": {},
    "sglang.srt.mem_cache.pool_host.mamba": {"MambaPoolHost": MambaPoolHost},
    "sglang.srt.mem_cache.pool_host.mla": {"MLATokenToKVPoolHost": MLATokenToKVPoolHost},
    "sglang.srt.mem_cache.pool_host.mha": {"MHATokenToKVPoolHost": MHATokenToKVPoolHost},
    "sglang.srt.observability": {},
    "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
    "sglang.srt.runtime_context": {"get_parallel": _no_engine, "get_context": _no_engine},
}


def install() -> None:
    """Adds the modules to `sys.modules`."""
    for name, content in MODULES.items():
        module = sys.modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(content)
