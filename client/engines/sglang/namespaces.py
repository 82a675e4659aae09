"""Namespaces of an engine's pages: everything that changes the meaning of their bytes.

SGLang's keys are hashes of tokens, of a salt and of the id of a LoRA adapter. They do not depend on
model, ranks or formats. The id of an adapter of `--lora-paths` is a hash of its name and path, so
the namespace has the content of its files. An adapter that is loaded later gets a random id.

Ranks that have different bytes store one part each of the same block. In a model with latent
attention all ranks have the same KV, but each its own Mamba state; so there can be two namespaces:
one whose blocks have a part per rank, and one whose blocks have a single part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import Group, GroupKind, Namespace
from ..failures import Unsupported
from ..identity import ADAPTER_CONFIG, adapter_folder, fingerprint_of, identify_weights, with_weights_version
from .pools import KV, MAMBA, HostPool
from .sglang_api import is_split_by_heads, sglang_version
from .storage_config import StorageConfig

__all__ = ["Space", "build_spaces"]

_SETTINGS = (
    *("kv_cache_dtype", "quantization", "quantization_param_path", "modelopt_quant", "rl_quant_profile", "load_format"),
    *("json_model_override_args", "context_length", "attention_backend", "prefill_attention_backend", "model_impl"),
    *("mamba_ssm_dtype", "speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision"),
)
"""Arguments of the engine that can change the KV of tokens."""


@dataclass(frozen=True)
class Space:
    """A namespace, this process's rank in it, and its pools in the order of the groups."""

    namespace: Namespace
    rank: int | None
    pools: tuple[HostPool, ...]


def build_spaces(
    config: Any,
    arguments: Mapping[str, Mapping[str, Any]],
    settings: StorageConfig,
    pools: Sequence[HostPool],
    version: str,
) -> list[Space]:
    """Returns one or two namespaces.

    `config`: HiCacheStorageConfig. `arguments`: see `sglang_api.engine_settings`. `version`:
    version of the weights. Raises Unsupported if equal keys could have different bytes,
    OSError if the model's files cannot be read.
    """
    if config.attn_cp_size > 1 or config.dcp_size > 1:
        raise Unsupported("context parallelism is not supported yet")
    model, revision = str(arguments["model"]["model_path"]), str(arguments["model"]["revision"] or "")
    weights = identify_weights(model, revision)
    if not weights:
        raise Unsupported(f"cannot identify the weights of {model!r}; set --revision")
    shared = [pool for pool in pools if config.is_mla_model and pool.name != MAMBA]
    if any(is_split_by_heads(pool.pool) for pool in shared):
        # SGLang stores the pages of the first rank only.
        raise Unsupported("latent attention with a draft model of another kind is not supported")
    split = [pool for pool in pools if pool not in shared]
    attributes = _attributes(arguments) | {"weights": weights}
    if adapters := arguments["lora"]["lora_paths"]:
        attributes["lora"] = json.dumps(sorted(map(_identify_adapter, adapters)))
    if config.pp_size > 1:
        attributes["pipeline"] = f"{config.pp_rank} of {config.pp_size}"
    spaces = []
    for members, ranks, rank in ((split, config.tp_size, config.tp_rank), (shared, 1, None)):
        if not members:
            continue
        page_tokens = int(members[0].pool.page_size) if members[0].name == KV else _page_tokens(pools)
        namespace = Namespace(
            model=settings.model_name or str(config.model_name or model),
            dtype=str(members[0].pool.dtype).removeprefix("torch."),
            hash_scheme=f"sglang:sha256:{page_tokens}",
            layout=f"sglang:{members[0].pool.layout}",
            revision=revision,
            world_size=ranks,
            groups=tuple(Group(pool.part_bytes, page_tokens, pool.name, _kind(pool.name)) for pool in members),
            tenant=settings.tenant,
            attributes=attributes | {"tensor_parallel_size": str(ranks), "pools": _digest(members)},
        )
        namespace = with_weights_version(namespace, version)
        spaces.append(Space(namespace, rank if ranks > 1 else None, tuple(members)))
    return spaces


def _page_tokens(pools: Sequence[HostPool]) -> int:
    """Returns the tokens of a page. A page of another pool than `kv` can be one state."""
    return next((int(pool.pool.page_size) for pool in pools if pool.name == KV), 1)


def _kind(name: str) -> GroupKind:
    if name == MAMBA:
        return GroupKind.STATE
    return GroupKind.SLIDING_WINDOW if name.endswith("swa") else GroupKind.FULL_ATTENTION


def _identify_adapter(adapter: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns name, path and fingerprint of an adapter that SGLang loads when it starts."""
    name, path = str(adapter["lora_name"]), str(adapter["lora_path"])
    try:
        return name, path, fingerprint_of(adapter_folder(path), ADAPTER_CONFIG)
    except OSError as error:
        raise Unsupported(f"cannot identify the LoRA adapter {name!r}: {error}") from error


def _attributes(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    device = str(arguments["device"]["device"])
    if device == "cpu":
        device += f" {torch.backends.cpu.get_cpu_capability()}"
    elif torch.cuda.is_available():
        device += f" {torch.cuda.get_device_capability()}"
    known = {name: value for group in arguments.values() for name, value in group.items()}
    values = {name: str(known.get(name)) for name in _SETTINGS}
    return {
        # The attention back end defines the format inside a page. It may change between versions.
        "engine": f"sglang {sglang_version}",
        "device": device,
        "settings": json.dumps(values, sort_keys=True),
    }


def _digest(pools: Sequence[HostPool]) -> str:
    return hashlib.sha256(json.dumps([pool.describe() for pool in pools], sort_keys=True).encode()).hexdigest()
