"""Namespaces of an engine's pages: everything that changes the meaning of their bytes.

SGLang's keys are hashes of tokens, of a salt and of the id of a LoRA adapter. They do not depend on
model, ranks or formats. The id of an adapter of `--lora-paths` is a hash of its name and path, so
the namespace has the content of its files. An adapter that is loaded later gets a random id.

Ranks that have different bytes store one part each of the same block. In a model with latent
attention all ranks have the same KV, but each its own Mamba state; so there can be two namespaces:
one whose blocks have a part per rank, and one whose blocks have a single part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import Group, GroupKind, Namespace
from ..failures import Unsupported
from ..identity import SCHEME, WEIGHTS, identify_adapter, identify_weights, with_weights_version
from ..settings import NeutralSettings, digest_of_settings, plain_settings
from .compat import is_split_by_heads, sglang_version
from .config import StorageConfig
from .layout import KV, MAMBA, HostPool

__all__ = ["NEUTRAL", "Space", "prepare_spaces"]

NEUTRAL = NeutralSettings(
    {
        "processes, memory, graphs and addresses": (
            *("device.*", "disagg.*", "exec.graph.*", "exec.offload.*", "exec.overlap.*", "memory.*", "parallel.*"),
        ),
        "when tokens are computed, and how requests and answers look": ("schedule.*", "serving.*"),
        "metrics, logs and traces": ("observability.*", "spec_trace_dir"),
        "part of the namespace in another form": ("lora_paths", "model_path", "revision"),
        "how weights are read, and where they are written to": (
            *("checkpoint_engine_wait_weights_before_ready", "delete_ckpt_after_loading", "download_dir"),
            *("engine_info_bootstrap_port", "modelopt_checkpoint_save_path", "modelopt_export_path"),
            *("remote_instance_weight_loader_send_weights_group_ports", "startup_weight_load_mode"),
            *("weight_cache_socket", "weight_cache_timeout", "weight_loader_disable_mmap"),
            *("weight_loader_drop_cache_after_load", "weight_loader_prefetch_checkpoints"),
            *("weight_loader_prefetch_num_threads", "model_checksum"),
        ),
        "how many adapters and images the engine handles at a time": (
            *("enable_lora", "enable_lora_overlap_loading", "lora_drain_wait_threshold", "lora_eviction_policy"),
            *("max_loaded_loras", "max_loras_per_batch", "allowed_media_domains", "enable_broadcast_mm_inputs_process"),
            *("enable_mm_global_cache", "limit_mm_data_per_request", "media_url_max_file_size_mb"),
            *("mm_feature_transport", "mm_global_cache_backend", "mm_io_worker_num", "mm_preprocess_cache_size_mb"),
            "mm_processor_worker_num",
        ),
        "sampling and output": (
            *("disable_outlines_disk_cache", "grammar_backend", "sampling_backend", "sampling_mask_max_tokens"),
            *("enable_custom_logit_processor", "enable_return_hidden_states", "enable_watermark"),
            *("watermark_config", "watermark_context_window", "watermark_default_enabled", "watermark_enforce_all"),
            *("watermark_key", "watermark_key_b", "watermark_max_probability", "watermark_mixing_probability"),
        ),
        "names of this host's devices, and numbers of its cores": (
            *("kt_cpuinfer", "kt_threadpool_count", "mooncake_ib_device"),
        ),
        "arguments that SGLang changes while it runs": (
            *("speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_num_steps"),
        ),
    },
    counted=(
        *("enable_hisparse", "enable_torch_compile", "forward_hooks", "hisparse_config", "weight_version"),
        *("kv_cache_dtype", "dtype", "attention_backend", "page_size"),
    ),
)
"""SGLang's arguments that do not change the KV of tokens: groups of arguments, except for those in
`counted`, and single ones of other groups. All others count, also those of later versions."""


@dataclass(frozen=True)
class Space:
    """A namespace, this process's rank in it, and its pools in the order of the groups."""

    namespace: Namespace
    rank: int | None
    pools: tuple[HostPool, ...]


def prepare_spaces(
    config: Any,
    arguments: Mapping[str, Mapping[str, Any]],
    settings: StorageConfig,
    pools: Sequence[HostPool],
    version: str,
) -> Callable[[], list[Space]]:
    """Returns a function that returns one or two namespaces.

    `config`: HiCacheStorageConfig. `arguments`: see `compat.engine_settings`. `version`:
    version of the weights. Raises Unsupported if equal keys could have different bytes. The
    function also reads the model's files, and raises OSError.
    """
    if config.attn_cp_size > 1 or config.dcp_size > 1:
        raise Unsupported("context parallelism is not supported yet")
    if arguments["parallel"]["enable_kv_cache_sharding"]:
        # A rank has a stripe of each page, and SGLang stores the pages of some ranks only.
        raise Unsupported("KV cache sharding is not supported")
    model, revision = str(arguments["model"]["model_path"]), str(arguments["model"]["revision"] or "")
    shared = [pool for pool in pools if config.is_mla_model and pool.name != MAMBA]
    if any(is_split_by_heads(pool.pool) for pool in shared):
        # SGLang stores the pages of the first rank only.
        raise Unsupported("latent attention with a draft model of another kind is not supported")
    split = [pool for pool in pools if pool not in shared]
    attributes = {"engine": f"sglang {sglang_version}", "device": _device_name(arguments), **SCHEME}
    if config.pp_size > 1:
        attributes["pipeline"] = f"{config.pp_rank} of {config.pp_size}"
    spaces = []
    for members, ranks, rank in ((split, config.tp_size, config.tp_rank), (shared, 1, None)):
        if not members:
            continue
        page_tokens = _page_tokens(pools)
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
            | {"tensor_parallel_size": str(ranks), "pools": digest_of_settings([pool.describe() for pool in members])},
        )
        namespace = with_weights_version(namespace, version)
        spaces.append(Space(namespace, rank if ranks > 1 else None, tuple(members)))
    plain, folder = plain_settings(arguments, NEUTRAL), arguments["model"].get("download_dir")
    adapters = arguments["lora"]["lora_paths"] if arguments["lora"]["enable_lora"] else ()

    def read_files() -> list[Space]:
        weights = identify_weights(model, revision, folder=folder)
        read = {WEIGHTS: weights, "settings": digest_of_settings(plain, {model: weights})}
        if adapters:
            read["lora"] = json.dumps(sorted(map(_identify_adapter, adapters)))
        return [
            replace(space, namespace=replace(space.namespace, attributes={**space.namespace.attributes, **read}))
            for space in spaces
        ]

    return read_files


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
        return name, path, identify_adapter(path)
    except OSError as error:
        raise Unsupported(f"cannot identify the LoRA adapter {name!r}: {error}") from error


def _device_name(arguments: Mapping[str, Mapping[str, Any]]) -> str:
    device = str(arguments["device"]["device"])
    if device == "cpu":
        device += f" {torch.backends.cpu.get_cpu_capability()}"
    elif torch.cuda.is_available():
        device += f" {torch.cuda.get_device_capability()}"
    return device
