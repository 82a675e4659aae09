"""Identity of a model's weights, and of a namespace, equal in every process of every engine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from .. import Namespace
from ..session.fork_guard import ForkGuarded
from .failures import Unsupported
from .file_digests import content_files, digest_of_file, fingerprint_of, process_started_at

__all__ = [
    "ADAPTER_CONFIG",
    "SCHEME",
    "WEIGHTS",
    "InBackground",
    "adapter_folder",
    "identify_adapter",
    "identify_weights",
    "namespace_digest",
    "with_weights_version",
]

ADAPTER_CONFIG = "adapter_config.json"

SCHEME = {"identity_scheme": "2"}
"""Attribute of all namespaces of adapters. It changes if other bytes or settings count."""
WEIGHTS = "weights"
"""Attribute of a namespace: identity of the model's files."""

T = TypeVar("T")

_COMMIT = re.compile("[0-9a-f]{40}")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


class InBackground(ForkGuarded, Generic[T]):
    """Value that a daemon thread computes, because an engine does not wait for a digest.

    `failed`: called on this thread with the exception, if `compute` raises one.
    """

    def __init__(self, compute: Callable[[], T], failed: Callable[[Exception], object]) -> None:
        self._compute, self._failed = compute, failed
        self._done = threading.Event()
        self._value: T | None = None
        threading.Thread(target=self._run, name="kvtier-identity", daemon=True).start()

    @property
    def value(self) -> T | None:
        """The value; None if it is not known yet, or `compute` has failed."""
        return self._value

    @property
    def has_failed(self) -> bool:
        """Whether `compute` has failed, or only the parent of this process has its thread."""
        return self._value is None and (self._is_forked or self._done.is_set())

    def wait(self, seconds: float) -> T | None:
        if not self._is_forked:
            self._done.wait(seconds)
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._compute()
        except Exception as error:  # noqa: BLE001 - the engine must run without a cache
            self._failed(error)
        finally:
            del self._compute  # it can refer to much memory
            self._done.set()


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


def identify_weights(model: str, revision: str, commit: str | None = None, *, folder: str | None = None) -> str:
    """Returns the identity of a model's files. Raises Unsupported if it is unknown, and OSError.

    `model`: a folder, a single file, or a name on a hub. Of a model on a hub this covers the files
    in the local cache (`folder`, or the default one). If the cache has none, it is the commit.
    Files that have changed since the process began are an OSError, because the engine may have
    loaded the earlier ones. The cache of a hub is an exception: the engine itself fills it.
    """
    path = Path(model)
    if path.is_dir():
        return fingerprint_of(path, unchanged_since=process_started_at())
    if path.is_file():
        return digest_of_file(path, unchanged_since=process_started_at())
    if _COMMIT.fullmatch(revision):
        commit = revision
    snapshot = _snapshot(model, commit or revision or None, folder)
    if snapshot is not None:
        return fingerprint_of(snapshot)
    if commit is not None:
        return f"commit {commit}"
    raise Unsupported(
        f"cannot identify the weights of {model!r}; use a local folder, or set --revision to a commit of the hub"
    )


def _snapshot(model: str, revision: str | None, folder: str | None) -> Path | None:
    """Returns the folder of a model in the local cache of a hub, or None."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(model, "config.json", cache_dir=folder, revision=revision)
    except ValueError:  # not a name on a hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def identify_adapter(path: str) -> str:
    """Returns the fingerprint of a LoRA adapter that the engine loads when it starts.

    Raises OSError, also if its files have changed since the process began.
    """
    return fingerprint_of(adapter_folder(path), unchanged_since=process_started_at())


def adapter_folder(path: str) -> Path:
    """Returns the local folder of a LoRA adapter, also of one that was loaded from a model hub.

    Raises OSError if the folder does not exist or has no weights.
    """
    folder = Path(path).expanduser()
    if not path or not folder.is_dir():  # an empty path would name the current folder
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
