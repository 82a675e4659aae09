"""Identity of LoRA adapters, which becomes part of the keys of blocks.

vLLM's block hashes contain the name and the path of a request's adapter. Both can stay the same
when the content of the files changes. So the connector appends a tag to each hash: a digest of
name, path and samples of the adapter's files.

The connector reads the files when requests arrive, but the engine computes with the content that
its workers loaded. If the two may differ, requests with the adapter are neither loaded nor saved:

- The files have changed since the first request with this `lora_int_id`, or another adapter has the
  same id. Workers load an id once, unless each request says `load_inplace`.
- The files have changed since the first request with this name and path. vLLM's own prefix cache
  may still have KV of the old content under the same hashes, until the connector is reset.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from .background import RateLimitedLog
from .namespace import fingerprint_of, weight_files

__all__ = ["LoraAdapters"]

_TAG_BYTES = 16
_CONFIG = "adapter_config.json"

_Identity = tuple[str, str, str]
_Stamp = tuple[tuple[str, int, int, int], ...]


class LoraAdapters:
    """Tags of the adapters of one engine. Called on the scheduler's thread."""

    def __init__(self, log: RateLimitedLog) -> None:
        self._log = log
        # By path: sizes and times of the files, and the fingerprint that they had then.
        self._fingerprints: dict[str, tuple[_Stamp, str]] = {}
        # By `lora_int_id`: what workers have loaded.
        self._loaded: dict[int, _Identity] = {}
        # By name and path: fingerprint of the adapter whose KV vLLM's prefix cache may have.
        self._cached: dict[tuple[str, str], str] = {}
        self._used_since_reset: set[int] = set()

    def tag_of(self, adapter: Any) -> bytes | None:
        """Returns the tag of a request's adapter; None if the adapter cannot be identified."""
        name, path, number = str(adapter.lora_name), str(adapter.lora_path), int(adapter.lora_int_id)
        try:
            fingerprint = self._fingerprint(path)
        except OSError as error:
            self._refuse(name, f"its files cannot be read: {error}")
            return None
        identity = (name, path, fingerprint)
        reloads = getattr(adapter, "load_inplace", False) and number not in self._used_since_reset
        if reloads or number not in self._loaded:
            self._loaded[number] = identity
        self._used_since_reset.add(number)
        if self._loaded[number] != identity or self._cached.setdefault((name, path), fingerprint) != fingerprint:
            self._refuse(name, "its id was used for another adapter, or its files have changed")
            return None
        return hashlib.sha256(repr(identity).encode()).digest()[:_TAG_BYTES]

    def reset(self) -> None:
        """Called when vLLM's prefix cache is empty, and no request runs."""
        self._cached.clear()
        self._used_since_reset.clear()

    def _fingerprint(self, path: str) -> str:
        """Returns a digest of the adapter's files. Raises OSError."""
        folder = _folder_of(path)
        stamp = tuple((file.name, *_stamp(file)) for file in weight_files(folder, _CONFIG))
        known = self._fingerprints.get(path)
        if known is None or known[0] != stamp:
            known = self._fingerprints[path] = (stamp, fingerprint_of(folder, _CONFIG))
        return known[1]

    def _refuse(self, name: str, reason: str) -> None:
        self._log.warn(
            f"lora {name}",
            f"requests with the LoRA adapter {name!r} are neither loaded nor saved: {reason}",
            interval_s=math.inf,
        )


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _folder_of(path: str) -> Path:
    """Returns the local folder of an adapter, also of one that vLLM loaded from a model hub.

    Raises OSError if the folder does not exist or has no weights.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            config = try_to_load_from_cache(path, _CONFIG)
        except ValueError:  # neither a folder nor a name in a hub
            config = None
        if not isinstance(config, str):
            raise FileNotFoundError(f"no folder {path!r}")
        folder = Path(config).parent
    if all(file.name == _CONFIG for file in weight_files(folder, _CONFIG)):
        raise FileNotFoundError(f"no weights in {folder}")
    return folder
