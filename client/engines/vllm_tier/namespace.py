"""Namespace of a tier: everything that changes the meaning of a row of vLLM's primary tier.

A row is one chunk (`blocks_per_chunk` blocks of one KV cache group) of all workers. A row consists
of one part per worker and padding to whole memory pages. A part consists of the pages of each
tensor, one tensor after the other. The bytes for tensors of other groups are unused and contain old
data. KVTierConnector has one part per rank and no padding, so its namespace has another `layout`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

from ... import Group, Namespace
from ..failures import Unsupported
from ..identity import SCHEME
from ..vllm.compat import vllm_version
from ..vllm.groups import require_reproducible_hashes
from ..vllm.namespace import describe_engine

__all__ = ["prepare_tier_namespace"]

_LAYOUT = "vllm-tiering"
_PROCESS_FIELDS = frozenset({"engine_id", "extra_config", "enable_kv_cache_events"})
_REPLICA_FIELDS = frozenset({"rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"})


def prepare_tier_namespace(
    config: Any, engine_config: Any, row_bytes: int, *, tenant: str = "", identity: str = ""
) -> Callable[[], Namespace]:
    """Returns a function that returns the namespace of rows of `row_bytes` bytes.

    `config` is vLLM's OffloadingConfig, `engine_config` its VllmConfig or None. If it is None,
    `identity` replaces it: the operator then guarantees reproducible block hashes and no LoRA
    adapters. Raises Unsupported if equal keys could have different bytes. The function also reads
    files and raises OSError.
    """
    if config.parallel.dcp_size > 1 or config.parallel.pcp_size > 1:
        # Each rank has some of the tokens. The configuration does not say which.
        raise Unsupported("context parallelism is not supported yet")
    attributes = {
        "engine": f"vllm {vllm_version}",
        "row": _row_digest(config, row_bytes),
        "identity": identity,
    } | SCHEME
    attributes_of: Callable[[], dict[str, str]] = dict
    algorithm = revision = ""
    if engine_config is not None:
        require_reproducible_hashes(engine_config.cache_config)
        if engine_config.lora_config is not None:
            # A block hash covers the adapter's name, not its weights. A tier sees no adapters.
            raise Unsupported("LoRA adapters are enabled, but different adapters with one name would share blocks")
        attributes_of = describe_engine(engine_config)
        algorithm = engine_config.cache_config.prefix_caching_hash_algo
        revision = str(engine_config.model_config.revision or "")
    elif not identity:
        raise Unsupported(
            f"vLLM {vllm_version} does not show a tier the weights and settings of its engine; set 'identity' in the tier's"
            " table, to a different text for each model, revision, quantization and set of overrides"
            " (it also asserts that prefix_caching_hash_algo is reproducible and that there are no LoRA adapters)"
        )
    namespace = Namespace(
        model=str(config.model.name),
        dtype=str(config.model.dtype),
        hash_scheme=f"vllm:{algorithm}:{config.cache.tokens_per_hash}",
        layout=f"{_LAYOUT}:{config.kv_cache_layout}",
        revision=revision,
        groups=_groups(config, row_bytes),
        tenant=tenant,
    )
    return lambda: dataclasses.replace(namespace, attributes=attributes | attributes_of())


def _groups(config: Any, row_bytes: int) -> tuple[Group, ...]:
    """Returns one group per group number in keys. vLLM may leave out some numbers."""
    tokens = {group.group_id: group.tokens_per_block for group in config.groups}
    return tuple(
        Group(row_bytes, tokens.get(number, 1) * config.cache.blocks_per_chunk, f"group {number}")
        for number in range(max(tokens) + 1)
    )


def _row_digest(config: Any, row_bytes: int) -> str:
    """Returns a digest of all of vLLM's settings of a row, including those of later versions."""
    plain = {name: text for name, text in dataclasses.asdict(config).items() if name not in _PROCESS_FIELDS}
    plain["parallel"] = {name: text for name, text in plain["parallel"].items() if name not in _REPLICA_FIELDS}
    return hashlib.sha256(json.dumps([plain, row_bytes], sort_keys=True, default=str).encode()).hexdigest()
