"""Identity of a model's weights, and of a namespace, equal in every process of every engine."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

from .. import Namespace
from .file_digests import content_files, fingerprint_of

__all__ = [
    "ADAPTER_CONFIG",
    "adapter_folder",
    "identify_weights",
    "namespace_digest",
    "with_weights_version",
]

ADAPTER_CONFIG = "adapter_config.json"

_COMMIT = re.compile("[0-9a-f]{40}")
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
        return fingerprint_of(Path(model))
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
    if all(file.suffix not in _WEIGHT_SUFFIXES for file in content_files(folder)):
        raise FileNotFoundError(f"no weights in {folder}")
    return folder
