"""Key file (TOML): keys that encrypt the values of tenants in shared tiers.

Keys of each `[[keys]]` table:

- tenant: the tenant; "*" for all tenants without keys of their own; "" for clients without a tenant
- key: 32 random bytes in base64, as `openssl rand -base64 32` prints them

The first key of a tenant encrypts. All keys of a tenant decrypt.
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...tiers.remote.encryption import KEY_BYTES, KeyRing
from ..auth.credential_files import FileError, ReloadedFile, read_toml
from ..auth.tokens import ANY_TENANT
from ..config.tenants import tenant_tag
from ..telemetry.logs import get_logger

__all__ = ["KeyFile", "read_key_file"]

_log = get_logger(__name__)

_CHECK_SECONDS = 1.0
"""Time between two checks whether the file has changed."""


class _Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenant: str
    key: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[_Key]


class KeyFile:
    """Current keys of a file. Thread-safe. The constructor raises `FileError`.

    If the file changes later and cannot be used, the previous keys stay in use.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = ReloadedFile(path, read_key_file, "the keys cannot be read; the previous keys stay in use")
        self._clock = clock
        self._lock = threading.Lock()
        self._check_at = clock() + _CHECK_SECONDS

    def __call__(self) -> KeyRing:
        if self._clock() >= self._check_at:
            with self._lock:
                if self._clock() >= self._check_at:
                    if self._file.refresh():
                        _log.info("keys read again", path=str(self._file.path))
                    self._check_at = self._clock() + _CHECK_SECONDS
        return self._file.content


def read_key_file(path: Path) -> KeyRing:
    """Reads a key file. Raises `FileError`."""
    parsed = read_toml(path, _File, private="the keys")
    if not parsed.keys:
        raise FileError(f"{path}: has no keys")
    tenants: defaultdict[str, list[bytes]] = defaultdict(list)
    for number, entry in enumerate(parsed.keys, start=1):
        key = _decoded(entry.key)
        if key is None:
            raise FileError(f"{path}: keys, number {number}: key: must be {KEY_BYTES} bytes in base64")
        if key in tenants[entry.tenant]:
            raise FileError(f"{path}: keys, number {number}: the tenant has this key already")
        tenants[entry.tenant].append(key)
    others = tuple(tenants.pop(ANY_TENANT, ()))
    return KeyRing({tenant_tag(tenant): tuple(keys) for tenant, keys in tenants.items()}, others)


def _decoded(text: str) -> bytes | None:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == KEY_BYTES else None
