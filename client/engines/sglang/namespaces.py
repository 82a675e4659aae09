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
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch

from ... import Group, GroupKind, Namespace
from ..failures import Unsupported
from ..file_digests import digest_of_file, fingerprint_of
from ..identity import adapter_folder, identify_weights, with_weights_version
from .pools import KV, MAMBA, HostPool
from .sglang_api import is_split_by_heads, sglang_version
from .storage_config import StorageConfig

__all__ = ["Space", "build_spaces"]

_NEUTRAL_GROUPS = frozenset(
    {
        *("device", "disagg", "exec.graph", "exec.offload", "exec.overlap", "memory", "observability", "parallel"),
        *("schedule", "serving"),
    }
)
"""SGLang's groups of arguments that do not change the KV of tokens, except for _RELEVANT."""

_RELEVANT = frozenset({"enable_hisparse", "enable_torch_compile", "forward_hooks", "hisparse_config", "weight_version"})

_NEUTRAL = frozenset(
    {
        # Part of the namespace in another form.
        *("lora_paths", "model_path", "revision"),
        # How weights are read, and where they are written to.
        *("checkpoint_engine_wait_weights_before_ready", "delete_ckpt_after_loading", "download_dir", "model_checksum"),
        *("engine_info_bootstrap_port", "modelopt_checkpoint_save_path", "modelopt_export_path"),
        *("remote_instance_weight_loader_send_weights_group_ports", "startup_weight_load_mode", "weight_cache_socket"),
        *("weight_cache_timeout", "weight_loader_disable_mmap", "weight_loader_drop_cache_after_load"),
        *("weight_loader_prefetch_checkpoints", "weight_loader_prefetch_num_threads"),
        # How many adapters and images the engine handles at a time.
        *("enable_lora", "enable_lora_overlap_loading", "lora_drain_wait_threshold", "lora_eviction_policy"),
        *("max_loaded_loras", "max_loras_per_batch", "allowed_media_domains", "enable_broadcast_mm_inputs_process"),
        *("enable_mm_global_cache", "limit_mm_data_per_request", "media_url_max_file_size_mb", "mm_feature_transport"),
        *("mm_global_cache_backend", "mm_io_worker_num", "mm_preprocess_cache_size_mb", "mm_processor_worker_num"),
        # Sampling, output and traces.
        *("disable_outlines_disk_cache", "grammar_backend", "sampling_backend", "sampling_mask_max_tokens"),
        *("enable_custom_logit_processor", "enable_return_hidden_states", "enable_watermark", "spec_trace_dir"),
        *("watermark_config", "watermark_context_window", "watermark_default_enabled", "watermark_enforce_all"),
        *("watermark_key", "watermark_key_b", "watermark_max_probability", "watermark_mixing_probability"),
        # Names of this host's devices, and numbers of its cores.
        *("kt_cpuinfer", "kt_threadpool_count", "mooncake_ib_device"),
        # SGLang changes these while it runs.
        *("speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_num_steps"),
    }
)
"""Arguments in other groups that certainly do not change the KV of tokens. All others count, also
those of later versions of SGLang."""


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
    if arguments["parallel"]["enable_kv_cache_sharding"]:
        # A rank has a stripe of each page, and SGLang stores the pages of some ranks only.
        raise Unsupported("KV cache sharding is not supported")
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
    if arguments["lora"]["enable_lora"] and (adapters := arguments["lora"]["lora_paths"]):
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
            attributes=attributes
            | {"tensor_parallel_size": str(ranks), "pools": _digest([pool.describe() for pool in members])},
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
        return name, path, fingerprint_of(adapter_folder(path))
    except OSError as error:
        raise Unsupported(f"cannot identify the LoRA adapter {name!r}: {error}") from error


def _attributes(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    device = str(arguments["device"]["device"])
    if device == "cpu":
        device += f" {torch.backends.cpu.get_cpu_capability()}"
    elif torch.cuda.is_available():
        device += f" {torch.cuda.get_device_capability()}"
    return {
        # The attention back end defines the format inside a page. It may change between versions.
        "engine": f"sglang {sglang_version}",
        "device": device,
        "settings": _digest(_relevant(arguments)),
    }


def _relevant(arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the arguments that can change the KV of tokens. Raises OSError."""
    return {
        name: _with_content(name, value)
        for group, values in arguments.items()
        for name, value in values.items()
        if name in _RELEVANT or not (group in _NEUTRAL_GROUPS or name in _NEUTRAL)
    }


def _with_content(name: str, value: Any) -> Any:
    """Adds the content of a file or folder that an argument names, as it may change in place.

    A word such as "auto" is no path, even if the current directory has a file with this name.
    """
    if not isinstance(value, str) or not (os.sep in value or "." in value or name.endswith("_path")):
        return value
    if os.path.isdir(value):  # noqa: PTH112 - any text, also too long for a path
        return value, fingerprint_of(Path(value))
    if os.path.isfile(value):  # noqa: PTH113 - as above
        return value, digest_of_file(Path(value))
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Returns JSON that is equal in each process. Raises Unsupported for unknown types."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, PurePath | Enum | torch.dtype | torch.device):
        return str(value)
    raise Unsupported(f"an argument of the engine has a value of an unknown type: {type(value).__qualname__}")
