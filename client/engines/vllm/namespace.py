"""Namespace of an engine: every property that changes the meaning of a block's bytes.

The scheduler and each worker compute the namespace from the configuration and must get the same
result. The scheduler sends the digest of its namespace to the workers. If a worker's digest
differs, the worker warns and transfers nothing, so a difference never causes wrong tokens.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ... import Group, GroupKind, Namespace
from ...offload import CacheGeometry
from ...offload import CacheGroupKind as OffloadKind
from ..failures import Unsupported
from ..identity import identify_weights
from .compat import KVCacheConfig, vllm_version
from .ranks import Parts, resolve_ranks

__all__ = ["build_namespace", "model_attributes"]

_KINDS = {
    OffloadKind.FULL: GroupKind.FULL_ATTENTION,
    OffloadKind.WINDOW: GroupKind.SLIDING_WINDOW,
    OffloadKind.STATE: GroupKind.STATE,
}
_MODEL_SETTINGS = (
    "quantization_config",
    "hf_config_path",
    "model_weights",
    "model_class_overrides",
    "mm_processor_kwargs",
)


def build_namespace(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    geometry: CacheGeometry,
    parts: Parts,
    tenant: str = "",
) -> Namespace:
    """Returns the namespace of this engine and tenant. Reads a local model's files.

    `parts`: the parts of all ranks. All data parallel engines have the same namespace, because
    their blocks are interchangeable.

    Raises Unsupported if the model's weights cannot be identified, OSError for unreadable files.
    """
    model, ranks = vllm_config.model_config, resolve_ranks(vllm_config, parts)
    groups = tuple(
        Group(name=g.name, kind=_KINDS[g.kind], block_tokens=g.block_tokens, part_bytes=part_bytes)
        for g, part_bytes in zip(geometry.groups, parts.part_bytes, strict=True)
    )
    return Namespace(
        model=str(model.model),
        dtype=str(model.dtype).removeprefix("torch."),
        hash_scheme=f"vllm:{vllm_config.cache_config.prefix_caching_hash_algo}:{geometry.hash_tokens}",
        layout=f"vllm:{kv_cache_config.kv_cache_layout}",
        revision=str(model.revision or ""),
        world_size=ranks.parts,
        groups=groups,
        tenant=tenant,
        attributes=model_attributes(vllm_config)
        # Not the number of ranks: a rank can hold several parts, and ranks with the same bytes
        # share one part.
        | {"tensor_parallel_size": str(ranks.shards), "layers": parts.digest},
    )


def model_attributes(vllm_config: Any) -> dict[str, str]:
    """Returns attributes for the model, weights and page format. Raises as build_namespace does."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return {
        # The attention back end defines the format inside a page. It may change between versions.
        "engine": f"vllm {vllm_version}",
        "device": _device_name(vllm_config),
        "attention_backend": str(getattr(vllm_config.attention_config, "backend", None)),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "load_format": str(vllm_config.load_config.load_format),
        "hf_overrides": _stable_text(model.hf_overrides),
        "settings": _stable_text({name: getattr(model, name, None) for name in _MODEL_SETTINGS}),
        # Some models rotate or scale differently for longer contexts (long RoPE).
        "max_model_len": str(model.max_model_len),
        "draft_model": str(speculative.model) if speculative is not None else "",
        "weights": _weights_of(model),
    }


def _weights_of(model: Any) -> str:
    """Identifies the weights. For a model hub the commit is preferred, because a branch changes."""
    commit = getattr(model.revision, "resolved", None)
    if commit is None and not getattr(model, "hf_config_path", None):
        commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    weights = identify_weights(str(model.model), str(model.revision or ""), commit)
    if not weights:
        raise Unsupported(f"cannot identify the weights of {model.model!r}; set --revision or use a local folder")
    return weights


def _stable_text(value: object) -> str:
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return json.dumps(value, sort_keys=True, default=str)


def _device_name(vllm_config: Any) -> str:
    """Returns device type and instruction set or compute capability, without a CUDA context."""
    device = str(vllm_config.device_config.device_type)
    if device == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    from vllm.platforms import current_platform

    return f"{device} {current_platform.get_device_capability()}"
