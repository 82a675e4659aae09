"""Namespace of an engine: every property that changes the meaning of a block's bytes.

The scheduler and each worker compute the namespace from the configuration and must get the same
result. The scheduler sends the digest of its namespace to the workers. If a worker's digest
differs, the worker warns and transfers nothing, so a difference never causes wrong tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ... import Group, GroupKind, Namespace
from ...offload import CacheGeometry
from ...offload import CacheGroupKind as OffloadKind
from .compat import KVCacheConfig, vllm_version
from .groups import Unsupported
from .ranks import Parts, resolve_ranks

__all__ = [
    "build_namespace",
    "fingerprint_of",
    "model_attributes",
    "namespace_digest",
    "weight_files",
    "with_weights_version",
]

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
_COMMIT = re.compile("[0-9a-f]{40}")
_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 8
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def build_namespace(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    geometry: CacheGeometry,
    parts: Parts,
    tenant: str = "",
) -> Namespace:
    """Returns the namespace of this engine and tenant. Reads samples of a local model's files.

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
        # Not the number of ranks, because a rank can hold several parts, or share its part with
        # ranks that have the same bytes.
        | {"tensor_parallel_size": str(ranks.shards), "layers": parts.digest},
    )


def with_weights_version(namespace: Namespace, version: str) -> Namespace:
    """Returns the namespace of the engine when its weights have this version."""
    if not version:  # so that the version is optional: stored blocks keep their namespace
        return namespace
    return replace(namespace, attributes={**namespace.attributes, "weights_version": version})


def namespace_digest(namespace: Namespace) -> str:
    """Returns a short digest that is equal in every process for equal namespaces."""
    plain = {
        name: getattr(namespace, name)
        for name in ("model", "dtype", "hash_scheme", "layout", "revision", "world_size", "tenant")
    }
    plain["groups"] = [[g.name, g.kind.name, g.block_tokens, g.part_bytes] for g in namespace.groups]
    plain["attributes"] = dict(namespace.attributes)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


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
    if Path(model.model).is_dir():
        return fingerprint_of(Path(model.model), "config.json")
    revision = str(model.revision or "")
    commit = revision if _COMMIT.fullmatch(revision) else getattr(model.revision, "resolved", None)
    if commit is None and not getattr(model, "hf_config_path", None):
        commit = getattr(model.hf_config, "_commit_hash", None)
    if commit is None:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(str(model.model), "config.json", revision=revision or None)
        commit = Path(config).parent.name if isinstance(config, str) else None
    if commit is not None:
        return f"commit {commit}"
    if revision:
        return f"revision {revision}"
    raise Unsupported(f"cannot identify the weights of {model.model!r}; set --revision or use a local folder")


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


def weight_files(directory: Path, config: str) -> list[Path]:
    """Returns the file `config`, if it exists, and the files with weights. Raises OSError."""
    files = (path for path in directory.iterdir() if path.name == config or path.suffix in _WEIGHT_SUFFIXES)
    return sorted(path for path in files if path.is_file())


def fingerprint_of(directory: Path, config: str) -> str:
    """Returns a hash of samples of the files of a model or LoRA adapter. Raises OSError.

    The hash covers the file `config`, and the name, the size and eight samples of 4 KiB of each
    weight file. A fine-tune changes nearly all samples. Copies of one model have the same hash.
    """
    digest = hashlib.sha256()
    for path in weight_files(directory, config):
        if path.name == config:
            digest.update(path.read_bytes())
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
