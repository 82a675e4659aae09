"""Identity of a model's weights, and of a namespace, equal in every process of every engine."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

from .. import Namespace

__all__ = [
    "ADAPTER_CONFIG",
    "adapter_folder",
    "fingerprint_of",
    "identify_weights",
    "namespace_digest",
    "weight_files",
    "with_weights_version",
]

ADAPTER_CONFIG = "adapter_config.json"

_COMMIT = re.compile("[0-9a-f]{40}")
_SAMPLE_BYTES = 4096
_SAMPLES_PER_FILE = 8
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def with_weights_version(namespace: Namespace, version: str) -> Namespace:
    """Returns the namespace of the engine when its weights have this version."""
    if not version:  # so that the version is optional: stored blocks keep their namespace
        return namespace
    return replace(namespace, attributes={**namespace.attributes, "weights_version": version})


def namespace_digest(namespace: Namespace) -> str:
    """Returns a digest that is equal in every process for equal namespaces."""
    plain = {
        name: getattr(namespace, name)
        for name in ("model", "dtype", "hash_scheme", "layout", "revision", "world_size", "tenant")
    }
    plain["groups"] = [[g.name, g.kind.name, g.block_tokens, g.part_bytes] for g in namespace.groups]
    plain["attributes"] = dict(namespace.attributes)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def identify_weights(model: str, revision: str, commit: str | None = None) -> str:
    """Returns the identity of a model's weights, or "" if it is unknown. Raises OSError.

    Of a local folder this is the fingerprint, of a model on a hub the commit: `revision`, `commit`,
    or the one in the local cache. Without a commit it is the revision, which may be a branch.
    """
    if Path(model).is_dir():
        return fingerprint_of(Path(model), "config.json")
    commit = revision if _COMMIT.fullmatch(revision) else commit
    if commit is None:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model, "config.json", revision=revision or None)
        commit = Path(config).parent.name if isinstance(config, str) else None
    if commit is not None:
        return f"commit {commit}"
    return f"revision {revision}" if revision else ""


def adapter_folder(path: str) -> Path:
    """Returns the local folder of a LoRA adapter, also of one that was loaded from a model hub.

    Raises OSError if the folder does not exist or has no weights.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            config = try_to_load_from_cache(path, ADAPTER_CONFIG)
        except ValueError:  # neither a folder nor a name in a hub
            config = None
        if not isinstance(config, str):
            raise FileNotFoundError(f"no folder {path!r}")
        folder = Path(config).parent
    if all(file.name == ADAPTER_CONFIG for file in weight_files(folder, ADAPTER_CONFIG)):
        raise FileNotFoundError(f"no weights in {folder}")
    return folder


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
