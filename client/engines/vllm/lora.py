"""Identity of LoRA adapters, which becomes part of the keys of blocks.

vLLM's block hashes contain the name and the path of a request's adapter. Both can stay the same
when the content of the files changes. So the connector appends a tag to each hash: a digest of
name, path and content of the adapter's files.

The scheduler's process reads the files, but the engine computes with the content that its workers
loaded. The connector sees a load in `EngineCore.add_lora`. It takes sizes and times of the files
before the load and compares them after it. An adapter that no such call has loaded is loaded by the
workers in the first step of its first request, so the connector takes those of the files when this
request arrives. The files are read in the background, because the engine does not wait. In these
cases requests with the adapter are neither loaded nor saved:

- The files have not been read yet.

- The files have changed since that moment or during the load, the load failed, or another adapter
  has the same id. Workers load an id once, unless each request says `load_inplace`.
- vLLM's own prefix cache may have KV of other content under the same name and path. This ends when
  the connector is reset.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from ..file_digests import content_files, fingerprint_of
from ..identity import InBackground, adapter_folder
from .background import RateLimitedLog

__all__ = ["LoraAdapters"]

_TAG_BYTES = 16

_Stamp = tuple[tuple[str, int, int, int, int, int], ...]
_Identity = tuple[str, str, _Stamp]


class LoraAdapters:
    """Tags of the adapters of one engine. Called on the scheduler's thread."""

    def __init__(self, log: RateLimitedLog) -> None:
        self._log = log
        # By path: sizes and times of the files, and the fingerprint that they have.
        self._fingerprints: dict[str, tuple[_Stamp, InBackground[str]]] = {}
        # By `lora_int_id`: what workers have loaded; None: not known.
        self._loaded: dict[int, _Identity | None] = {}
        self._loading: _Identity | None = None
        # By name and path: the adapter whose KV vLLM's prefix cache may have; None if it may have
        # KV of a refused request.
        self._cached: dict[tuple[str, str], _Identity | None] = {}
        self._used_since_reset: set[int] = set()

    def loads(self, adapter: Any) -> bool:
        """Called before workers load an adapter. Returns whether it replaces one with its id."""
        number = int(adapter.lora_int_id)
        replaces = number in self._loaded
        self._loading = self._loaded.get(number)
        if not replaces or getattr(adapter, "load_inplace", False):
            self._loading, self._loaded[number] = self._identify(adapter), None
            return replaces
        return False

    def loaded(self, adapter: Any) -> None:
        """Called when workers have loaded the adapter of the latest call of `loads`."""
        unchanged = self._identify(adapter) == self._loading
        self._loaded[int(adapter.lora_int_id)] = self._loading if unchanged else None

    def tag_of(self, adapter: Any) -> bytes | None:
        """Returns the tag of a request's adapter; None if the adapter cannot be identified."""
        number, identity = int(adapter.lora_int_id), self._identify(adapter)
        reloads = getattr(adapter, "load_inplace", False) and number not in self._used_since_reset
        if reloads or number not in self._loaded:
            self._loaded[number] = identity
        self._used_since_reset.add(number)
        name, path = str(adapter.lora_name), str(adapter.lora_path)
        if identity is None or not identity == self._loaded[number] == self._cached.setdefault((name, path), identity):
            self._cached[name, path] = None
            if identity is not None:
                self._refuse(name, "its id was used for another adapter, or its files have changed")
            return None
        fingerprint = self._fingerprints[path][1].value
        if fingerprint is None:  # not known yet; `_cached` has the content that will be known
            return None
        return hashlib.sha256(repr((name, path, fingerprint)).encode()).digest()[:_TAG_BYTES]

    def reset(self) -> None:
        """Called when vLLM's prefix cache is empty, and no request runs."""
        self._cached.clear()
        self._used_since_reset.clear()

    def _identify(self, adapter: Any) -> _Identity | None:
        name, path = str(adapter.lora_name), str(adapter.lora_path)
        try:
            folder = adapter_folder(path)
            stamp = tuple((str(file), *_stamp(file)) for file in content_files(folder))
        except OSError as error:
            self._refuse(name, f"its files cannot be read: {error}")
            return None
        known = self._fingerprints.get(path)
        if known is None or known[0] != stamp:
            self._fingerprints[path] = (stamp, self._read(name, folder))
        return name, path, stamp

    def _read(self, name: str, folder: Path) -> InBackground[str]:
        return InBackground(
            lambda: fingerprint_of(folder), lambda error: self._refuse(name, f"its files cannot be read: {error}")
        )

    def _refuse(self, name: str, reason: str) -> None:
        self._log.warn(
            f"lora {name}",
            f"requests with the LoRA adapter {name!r} are neither loaded nor saved: {reason}",
            interval_s=math.inf,
        )


def _stamp(file: Path) -> tuple[int, int, int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
