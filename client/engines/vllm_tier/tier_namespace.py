"""The namespace of a tier: what a row of vLLM's primary tier means.

A row is one chunk (``blocks_per_chunk`` blocks of one KV cache group) of all workers: each worker's part behind the last one's, in
it the pages of one tensor after those of another, at the end padding to whole memory pages. In a row of one group the bytes of
tensors that only other groups have are left over from earlier chunks; nobody reads them. So rows are no blocks of
KVTierConnector, which has a part per rank and no padding: the layout in the namespace keeps the two apart.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from ... import Group, Namespace
from ..vllm.compat import vllm_version
from ..vllm.groups import REPRODUCIBLE_HASHES, Unsupported
from ..vllm.namespace import model_attributes

__all__ = ["build_tier_namespace"]

_LAYOUT = "vllm-tiering"
_OF_THE_PROCESS = frozenset({"engine_id", "extra_config", "enable_kv_cache_events"})
_OF_THE_REPLICA = frozenset({"rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"})


def build_tier_namespace(
    config: Any, engine_config: Any, row_bytes: int, *, tenant: str = "", identity: str = ""
) -> Namespace:
    """Returns the namespace of rows of ``row_bytes`` bytes under an OffloadingConfig.

    ``engine_config`` is the engine's VllmConfig, or None where it is not known: then ``identity`` stands for it, and vouches for
    reproducible block hashes and the absence of LoRA adapters as well.
    Raises Unsupported where rows of equal keys could differ in their bytes, and OSError for a model that cannot be read.
    """
    if config.parallel.dcp_size > 1 or config.parallel.pcp_size > 1:
        # Which tokens a rank has of a block also depends on how they are interleaved, which is not in this configuration.
        raise Unsupported("context parallelism is not supported yet")
    attributes = {"engine": f"vllm {vllm_version}", "row": _row_digest(config, row_bytes), "identity": identity}
    algorithm = revision = ""
    if engine_config is not None:
        _refuse_unsupported(engine_config)
        # The configuration above has the cache's element type only.
        attributes |= model_attributes(engine_config) | {"dtype": str(engine_config.model_config.dtype)}
        algorithm = engine_config.cache_config.prefix_caching_hash_algo
        revision = str(engine_config.model_config.revision or "")
    elif not identity:
        raise Unsupported(
            f"vLLM {vllm_version} does not show a tier which weights and settings its engine has; say it with a key 'identity'"
            " in the tier's table, another one for each model, revision, quantization and set of overrides"
            " (it vouches for a reproducible prefix_caching_hash_algo and for no LoRA adapters, too)"
        )
    return Namespace(
        model=str(config.model.name),
        dtype=str(config.model.dtype),
        hash_scheme=f"vllm:{algorithm}:{config.cache.tokens_per_hash}",
        layout=f"{_LAYOUT}:{config.kv_cache_layout}",
        revision=revision,
        groups=_groups(config, row_bytes),
        tenant=tenant,
        attributes=attributes,
    )


def _refuse_unsupported(engine_config: Any) -> None:
    algorithm = engine_config.cache_config.prefix_caching_hash_algo
    if algorithm not in REPRODUCIBLE_HASHES:
        raise Unsupported(
            f"prefix_caching_hash_algo={algorithm!r} gives other block hashes in every process or may collide; use one of"
            f" {', '.join(REPRODUCIBLE_HASHES)}"
        )
    if engine_config.lora_config is not None:
        # A tier is not told which requests have an adapter, and an adapter's name, all that is in the hashes, not its weights.
        raise Unsupported(
            "LoRA adapters are enabled, and their blocks cannot be told from those of others of their name"
        )


def _groups(config: Any, row_bytes: int) -> tuple[Group, ...]:
    """One group per number that a key may end in; vLLM may leave some out."""
    tokens = {group.group_id: group.tokens_per_block for group in config.groups}
    return tuple(
        Group(row_bytes, tokens.get(number, 1) * config.cache.blocks_per_chunk, f"group {number}")
        for number in range(max(tokens) + 1)
    )


def _row_digest(config: Any, row_bytes: int) -> str:
    """A digest of all that vLLM knows of a row; what is new in a later version counts, rather than to be forgotten."""
    plain = {name: text for name, text in dataclasses.asdict(config).items() if name not in _OF_THE_PROCESS}
    plain["parallel"] = {name: text for name, text in plain["parallel"].items() if name not in _OF_THE_REPLICA}
    return hashlib.sha256(json.dumps([plain, row_bytes], sort_keys=True, default=str).encode()).hexdigest()
