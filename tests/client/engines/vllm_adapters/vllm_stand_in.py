"""The part of vLLM that the adapters import, for an environment without vLLM.

Behaves as vLLM 0.32 in what the tests of this folder need. `make test-engines` runs the same tests
with vLLM itself, and compares this module with it (`tests/engines/test_vllm_compat.py`).
"""

from __future__ import annotations

import enum
import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import prometheus_client
from kv_cache_stand_in import (
    BlockPool,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

__all__ = ["MODULES", "install"]


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - as vLLM's
    pass


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - as vLLM's
    pass


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata: ...


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class KVConnectorBase_V1:  # noqa: N801 - vLLM's name
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: Any = None

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return self.data


class KVConnectorPromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        self._counter_cls = metric_types[prometheus_client.Counter]
        self._histogram_cls = metric_types[prometheus_client.Histogram]


class CacheHitSource(enum.StrEnum):
    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


# ---- hashes and KV tensors


def generate_block_hash_extra_keys(request: Any, start: int, end: int, first: int) -> tuple[Any, int]:
    """Returns what the tokens do not say: inputs of other kinds at these tokens, and the salt."""
    keys = [
        ("mm", feature.identifier, feature.mm_position.offset - start)
        for feature in request.mm_features
        if feature.mm_position.offset < end and feature.mm_position.offset + feature.mm_position.length > start
    ]
    if start == 0 and request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys) or None, first


def resolve_block_hashes(hashes: list[bytes], hash_tokens: int, block_tokens: int) -> list[bytes]:
    """Returns the hash at the end of each block. A hash covers all tokens before its end."""
    each = block_tokens // hash_tokens
    return hashes if each == 1 else hashes[each - 1 :: each]


def get_block_hash(key: bytes) -> bytes:
    return key[:-4]


def get_group_id(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


def maybe_convert_block_hash(block_hash: bytes) -> int:
    """Returns the low 64 bits of a hash, as KV events have it by default."""
    return int.from_bytes(block_hash, "big") & ((1 << 64) - 1)


def make_offload_key(block_hash: bytes, group: int) -> bytes:
    return block_hash + group.to_bytes(4, "big")


def group_kernel_blocks(cache: Any, num_blocks: int) -> Any:
    return cache if cache.shape[0] == num_blocks else cache.unflatten(0, (num_blocks, -1))


def resolve_dcp_kv_block_size(spec: Any, dcp_world_size: int) -> int:
    assert dcp_world_size == 1
    return int(spec.block_size)


def resolve_kv_cache_block_sizes(kv_cache_config: KVCacheConfig, _: Any) -> tuple[int, int]:
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    return math.lcm(*sizes), math.gcd(*sizes)


# ---- vLLM's own tiering


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class OffloadPolicy(enum.Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


class ScheduleEndContext(NamedTuple):
    new_req_ids: Any
    preempted_req_ids: Any


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict, init=False)

    def set_offload_key_position(self, key: bytes, end_token: int) -> None:
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None


class SecondaryTierManager(ABC):
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        self.tier_type = tier_type
        self.locality: Locality | None = None

    @abstractmethod
    def lookup(self, key: Any, req_context: Any) -> LookupResult: ...


@dataclass(frozen=True)
class OffloadingGroupConfig:
    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int


@dataclass(frozen=True)
class OffloadingModelConfig:
    name: str
    dtype: str


@dataclass(frozen=True)
class OffloadingCacheConfig:
    tokens_per_hash: int
    blocks_per_chunk: int


@dataclass(frozen=True)
class OffloadingParallelConfig:
    rank: int
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    data_parallel_index: int
    data_parallel_size: int
    data_parallel_rank_local: int | None
    is_parallelism_agnostic: bool


@dataclass(frozen=True)
class OffloadingConfig:
    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    enable_kv_cache_events: bool
    extra_config: Mapping[str, Any]
    engine_id: str
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None


# ---- modules


def _named(*values: Any, **more: Any) -> dict[str, Any]:
    return {value.__name__: value for value in values} | more


def _types(*names: str) -> dict[str, type]:
    """Returns types that the tests only name."""
    return {name: type(name, (), {}) for name in names}


_KV_TRANSFER = "vllm.distributed.kv_transfer.kv_connector.v1"
_BASE = (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
_SPECS = (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

MODULES: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.config": _types("VllmConfig"),
    "vllm.distributed.kv_events": _named(AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, MEDIUM_CPU="CPU"),
    f"{_KV_TRANSFER}.base": _named(*_BASE),
    f"{_KV_TRANSFER}.metrics": _named(KVConnectorPromMetrics, KVConnectorStats),
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    "vllm.v1.core.block_pool": _named(BlockPool),
    "vllm.v1.core.kv_cache_utils": _named(
        generate_block_hash_extra_keys,
        get_block_hash,
        get_group_id,
        maybe_convert_block_hash,
        resolve_block_hashes,
        resolve_dcp_kv_block_size,
        resolve_kv_cache_block_sizes,
        BlockHash=bytes,
    ),
    "vllm.v1.core.sched.output": _types("KVConnectorBlockState"),
    "vllm.v1.kv_cache_interface": _named(*_SPECS),
    "vllm.v1.kv_offload.base": _named(
        Locality,
        LookupResult,
        OffloadPolicy,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        make_offload_key,
    ),
    "vllm.v1.kv_offload.config": _named(
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    ),
    "vllm.v1.kv_offload.tiering.base": _named(JobResult, SecondaryTierManager, TransferJob),
    "vllm.v1.metrics.cache_hit_source": _named(CacheHitSource),
}
"""The names of each module."""


def install() -> None:
    """Makes these modules importable in this process."""
    for name, values in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(values)
        sys.modules[name] = module
