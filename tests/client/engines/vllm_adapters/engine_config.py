"""The attributes of vLLM's configuration that the connector uses, and KV caches of small models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

__all__ = ["TOKENS", "engine_config", "full", "kv_cache", "state", "window"]

TOKENS = 4
"""Tokens of a block, unless a test needs another number."""

_PARTS: dict[str, dict[str, Any]] = {
    "kv_transfer": {
        "kv_load_failure_policy": "recompute",
        "is_kv_consumer": True,
        "is_kv_producer": True,
        "engine_id": "engine",
    },
    "parallel": {
        "world_size": 1,
        "rank": 0,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_rank": 0,
    },
    "cache": {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        "block_size": TOKENS,
        "prefix_match_unit": None,
        "cache_dtype": "auto",
    },
    "model": {
        "dtype": torch.float32,
        "revision": None,
        "quantization": None,
        "hf_overrides": {},
        "max_model_len": 64,
    },
    "attention": {"backend": None},
    "load": {"load_format": "auto"},
    "device": {"device_type": "cpu"},
    "scheduler": {"max_num_batched_tokens": 64},
}


def engine_config(folder: str, extra: dict[str, Any], **changes: Any) -> Any:
    """Returns the configuration of an engine with one worker.

    `folder`: the model. `extra`: `kv_connector_extra_config`. `changes`: other values by
    part, such as `cache={"cache_dtype": "fp8"}`, or the whole `speculative` part.
    """
    own = {"model": {"model": folder}, "kv_transfer": {"kv_connector_extra_config": extra}}
    parts: dict[str, Any] = {
        f"{name}_config": SimpleNamespace(**(values | own.get(name, {}) | changes.pop(name, {})))
        for name, values in _PARTS.items()
    }
    return SimpleNamespace(**parts, speculative_config=changes.pop("speculative", None), **changes)


def full(tokens: int = TOKENS, head_size: int = 8) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=head_size, dtype=torch.float32)


def window(tokens: int, retained: int = 0) -> SlidingWindowSpec:
    """`retained`: further tokens before the window that the engine keeps."""
    return SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=tokens,
        extra_retained_tokens=retained,
    )


def state(mode: str = "align", width: int = 3, padded: int | None = None) -> MambaSpec:
    return MambaSpec(
        block_size=TOKENS,
        shapes=((2, width), (4,)),
        dtypes=(torch.float16, torch.float32),
        page_size_padded=padded,
        mamba_cache_mode=mode,
    )


def kv_cache(*specs: Any, layout: str | None = None, layer: str = "layer") -> KVCacheConfig:
    """Returns the KV cache of a model with one layer per group; by default full attention."""
    groups = [KVCacheGroupSpec([f"{layer}.{number}"], spec) for number, spec in enumerate(specs or (full(),))]
    return KVCacheConfig(8, [], groups, kv_cache_layout=layout)
