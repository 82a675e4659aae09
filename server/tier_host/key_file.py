"""Key file (TOML): keys that encrypt the values of tenants in shared tiers.

Keys of each `[[keys]]` table:

- tenant: the tenant; "*" for all tenants without keys of their own; "" for clients without a tenant
- key: 32 random bytes in base64, as `openssl rand -base64 32` prints them

The first key of a tenant encrypts. All keys of a tenant decrypt.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...protos.trusted_files import open_trusted
from ...tiers.remote.encryption import KEY_BYTES, KeyRing
from ..auth.tokens import ANY_TENANT, explain_problem, file_version
from ..config.tenants import tenant_tag
from ..telemetry.logs import get_logger

__all__ = ["KeyFile", "KeyFileError", "read_key_file"]

_log = get_logger(__name__)

_MAX_FILE_BYTES = 4 << 20
_CHECK_SECONDS = 1.0
"""Time between two checks whether the file has changed."""
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO
"""A group may read the file: Kubernetes gives mode 0440 to the secrets of a pod with `fsGroup`."""


class KeyFileError(Exception):
    """The key file cannot be used; the message is one line and contains no key."""


class _Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenant: str
    key: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: list[_Key]


class KeyFile:
    """Current keys of a file. Thread-safe. The constructor raises `KeyFileError`.

    If the file changes later and cannot be used, the previous keys stay in use.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._version = file_version(path)
        self._refusal = ""
        """Error of the last reading, which is logged once."""
        self._keys = read_key_file(path)
        self._check_at = clock() + _CHECK_SECONDS

    def __call__(self) -> KeyRing:
        if self._clock() >= self._check_at:
            with self._lock:
                if self._clock() >= self._check_at:
                    self._refresh()
                    self._check_at = self._clock() + _CHECK_SECONDS
        return self._keys

    def _refresh(self) -> None:
        version = file_version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_key_file(self._path)
        except KeyFileError as error:
            if str(error) != self._refusal:
                _log.error("the keys cannot be read; the previous keys stay in use", error=str(error))
            self._refusal = str(error)
            self._version = ()  # read again, because a directory's mode may be the fault
        else:
            self._refusal = ""
            _log.info("keys read again", path=str(self._path))


def read_key_file(path: Path) -> KeyRing:
    """Reads a key file. Raises `KeyFileError`."""
    try:
        with open_trusted(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from None
    if mode & _FORBIDDEN_MODE:
        raise KeyFileError(f"{path}: has mode {mode:04o}, so other users can use the keys: chmod 0600")
    if len(text) > _MAX_FILE_BYTES:
        raise KeyFileError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes")
    try:
        parsed = msgspec.convert(tomllib.loads(text.decode()), _File)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{path}: {explain_problem(f'{error}')}") from None
    except (ValueError, RecursionError) as error:  # an integer of over 4,300 digits
        raise KeyFileError(f"{path}: is not TOML: {error}") from None
    if not parsed.keys:
        raise KeyFileError(f"{path}: has no keys")
    tenants: defaultdict[str, list[bytes]] = defaultdict(list)
    for number, entry in enumerate(parsed.keys, start=1):
        key = _decoded(entry.key)
        if key is None:
            raise KeyFileError(f"{path}: keys, number {number}: key: must be {KEY_BYTES} bytes in base64")
        if key in tenants[entry.tenant]:
            raise KeyFileError(f"{path}: keys, number {number}: the tenant has this key already")
        tenants[entry.tenant].append(key)
    others = tuple(tenants.pop(ANY_TENANT, ()))
    return KeyRing({tenant_tag(tenant): tuple(keys) for tenant, keys in tenants.items()}, others)


def _decoded(text: str) -> bytes | None:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == KEY_BYTES else None
