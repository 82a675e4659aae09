"""Translates vLLM's KV cache groups to kvtier's, and refuses groups that kvtier cannot serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...offload import CacheGeometry, CacheGroup
from ..failures import Unsupported
from .compat import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
)

__all__ = [
    "REPRODUCIBLE_HASHES",
    "divide_pages",
    "is_known_to_scheduler",
    "layer_specs",
    "require_reproducible_hashes",
    "resolve_geometry",
]

REPRODUCIBLE_HASHES = ("sha256", "sha256_cbor")


def resolve_geometry(vllm_config: Any, kv_cache_config: KVCacheConfig) -> CacheGeometry:
    """Returns the engine's groups, with the layers of this process only. Raises Unsupported."""
    _refuse_unsupported(vllm_config, kv_cache_config)
    step_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = tuple(_read_group(index, spec) for index, spec in enumerate(kv_cache_config.kv_cache_groups))
    if not groups:
        raise Unsupported("the model has no KV cache")
    if not any(group.layers for group in groups):
        raise Unsupported("a pipeline stage has no layers with a KV cache")
    speculative = vllm_config.speculative_config
    if speculative is not None and any(group.is_state for group in groups):
        raise Unsupported("state-space layers with speculative decoding are not supported yet")
    drop = speculative is not None and speculative.use_eagle_block_drop()
    return CacheGeometry(groups, step_tokens, hash_tokens, drop)


def divide_pages(geometry: CacheGeometry, pieces: int) -> CacheGeometry:
    """Returns the geometry of one part, if each worker holds `pieces` parts of a block."""
    groups = tuple(
        replace(group, page_bytes=tuple(nbytes // pieces for nbytes in group.page_bytes)) for group in geometry.groups
    )
    return replace(geometry, groups=groups)


def layer_specs(kv_cache_config: KVCacheConfig) -> Iterator[Any]:
    """Yields the spec of each layer of this process."""
    for group in kv_cache_config.kv_cache_groups:
        yield from _layer_specs(group)


def is_known_to_scheduler(vllm_config: Any, kv_cache_config: KVCacheConfig) -> bool:
    """Whether the scheduler's configuration describes the layers of every worker.

    vLLM describes only the first pipeline stage to the scheduler, and describes each group by the
    group's first layer.
    """
    return vllm_config.parallel_config.pipeline_parallel_size == 1 and all(
        len({(_page_bytes(spec), _format(spec)) for spec in _layer_specs(group)}) == 1
        for group in kv_cache_config.kv_cache_groups
    )


def require_reproducible_hashes(cache_config: Any) -> None:
    """Raises Unsupported if block hashes differ between processes, or may collide."""
    algorithm = cache_config.prefix_caching_hash_algo
    if algorithm not in REPRODUCIBLE_HASHES:
        raise Unsupported(
            f"prefix_caching_hash_algo={algorithm!r} gives different block hashes in every process, or may collide; use one of"
            f" {', '.join(REPRODUCIBLE_HASHES)}"
        )


def _refuse_unsupported(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise Unsupported("prefix caching is off (--enable-prefix-caching turns it on)")
    require_reproducible_hashes(cache)
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise Unsupported("context parallelism is not supported yet")
    if len(kv_cache_config.prefix_cacheable_group_ids) != len(kv_cache_config.kv_cache_groups):
        raise Unsupported("the model has KV cache groups that cannot be addressed by content")


def _read_group(index: int, group: Any) -> CacheGroup:
    specs = _layer_specs(group)
    # If a pipeline stage has no layer of the group, the spec of the group has the properties.
    kinds = {(_is_state(spec), _retained_tokens(spec)) for spec in specs or [group.kv_cache_spec]}
    if len(kinds) != 1:
        raise Unsupported(f"KV cache group {index} mixes attention windows")
    is_state, retained_tokens = kinds.pop()
    return CacheGroup(
        index=index,
        block_tokens=resolve_dcp_kv_block_size(group.kv_cache_spec, 1),
        retained_tokens=retained_tokens,
        layers=tuple(group.layer_names),
        page_bytes=tuple(map(_page_bytes, specs)),
        formats=tuple(map(_format, specs)),
        is_state=is_state,
    )


def _layer_specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    per_layer = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    return [per_layer.get(layer, spec) for layer in group.layer_names]


def _is_state(spec: Any) -> bool:
    if type(spec) is not MambaSpec:
        return False
    if spec.mamba_cache_mode == "none":
        raise Unsupported("states of state-space layers can be reused only with --mamba-cache-mode align (or all)")
    return True


def _page_bytes(spec: Any) -> int:
    size = spec.state_content_size_bytes if isinstance(spec, MambaSpec) else spec.unpadded_page_size_bytes
    return int(size)


def _format(spec: Any) -> str:
    """Returns the types and shapes of a layer's states, or the head slots of an attention layer.

    An attention layer with one slot per KV head has the format "".
    """
    if not isinstance(spec, MambaSpec):
        slots = getattr(spec, "num_head_slots", None)
        return "" if slots is None else f"{slots} head slots of {spec.state_content_size_bytes} bytes"
    states = [f"{dtype}{list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    return f"{spec.mamba_type} {spec.mamba_cache_mode} {' '.join(states)}"


def _retained_tokens(spec: Any) -> int | None:
    # Exact types only: a subclass may need other blocks (gaps in a prefix, replayed windows, …).
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec, MambaSpec):
        return None
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens)
    raise Unsupported(f"{type(spec).__name__} layers (chunked or cross attention, …) are not supported yet")
