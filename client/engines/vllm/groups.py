"""vLLM's KV cache groups as kvtier sees them, and the refusal of those it cannot serve."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from ...offload import CacheGeometry, CacheGroup
from .compat import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
)

__all__ = ["REPRODUCIBLE_HASHES", "Unsupported", "resolve_geometry"]

REPRODUCIBLE_HASHES = ("sha256", "sha256_cbor")


class Unsupported(Exception):
    """The engine's set-up cannot be served; the connector says why once and answers misses."""


def resolve_geometry(vllm_config: Any, kv_cache_config: KVCacheConfig) -> CacheGeometry:
    """Read the groups of an engine. Raises Unsupported, with the reason, for what this connector does not serve (yet)."""
    _refuse_unsupported(vllm_config, kv_cache_config)
    step_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = tuple(_read_group(index, spec) for index, spec in enumerate(kv_cache_config.kv_cache_groups))
    if not groups:
        raise Unsupported("the model has no KV cache")
    speculative = vllm_config.speculative_config
    drop = speculative is not None and speculative.use_eagle_block_drop()
    return CacheGeometry(groups, step_tokens, hash_tokens, drop)


def _refuse_unsupported(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise Unsupported("prefix caching is off (--enable-prefix-caching turns it on)")
    if cache.prefix_caching_hash_algo not in REPRODUCIBLE_HASHES:
        raise Unsupported(
            f"prefix_caching_hash_algo={cache.prefix_caching_hash_algo!r} gives other block hashes in every process or may"
            f" collide; use one of {', '.join(REPRODUCIBLE_HASHES)}"
        )
    if parallel.pipeline_parallel_size > 1:
        raise Unsupported("pipeline parallelism is not supported yet")
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("context parallelism is not supported yet")
    if len(kv_cache_config.prefix_cacheable_group_ids) != len(kv_cache_config.kv_cache_groups):
        raise Unsupported("the model has KV cache groups that cannot be addressed by content")


def _read_group(index: int, group: Any) -> CacheGroup:
    spec = group.kv_cache_spec
    per_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    layer_specs = [per_layer.get(layer, spec) for layer in group.layer_names]
    retained = {_retained_tokens(layer_spec) for layer_spec in layer_specs}
    if len(retained) != 1:
        raise Unsupported(f"KV cache group {index} mixes attention windows")
    return CacheGroup(
        index=index,
        block_tokens=resolve_dcp_kv_block_size(spec, 1),
        retained_tokens=retained.pop(),
        layers=tuple(group.layer_names),
        page_bytes=tuple(layer_spec.unpadded_page_size_bytes for layer_spec in layer_specs),
    )


def _retained_tokens(spec: Any) -> int | None:
    # Exact types: subclasses add meaning that this adapter does not know (gaps inside a prefix, replayed windows, …).
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return None
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens)
    raise Unsupported(f"{type(spec).__name__} layers (state-space, chunked or cross attention) are not supported yet")
