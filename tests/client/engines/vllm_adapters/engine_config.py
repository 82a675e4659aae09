"""The attributes of vLLM's configuration that the connector uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["engine_config"]

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
        "block_size": 4,
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
