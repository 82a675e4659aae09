"""Key file of the publisher (TOML): its own secret key, and the public keys of permitted readers.

- secret: the server's secret key, 40 characters of Z85, as `zmq.curve_keypair()` returns it
- readers: for each reader a `name`, its public `key` (Z85), and the `tenant` whose events it may
  read: "*" for all tenants, "" for clients without a tenant
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...protos.trusted_files import open_trusted
from ..auth.tokens import ANY_TENANT, explain_problem, file_version
from ..config.tenants import tenant_tag
from ..telemetry.downgrades import Report
from ..telemetry.logs import get_logger
from .reader_sockets import PublisherError

__all__ = ["MAX_TENANTS", "ReaderKeyFile"]

_log = get_logger(__name__)

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KEY_CHARACTERS = 40
MAX_TENANTS = 64
"""Tenants that may have readers of their own, each with messages of up to `events.buffer`."""
_MAX_FILE_BYTES = 4 << 20
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO
"""A group may read the file, as in `server/tier_host/key_file.py`."""


class _Reader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    key: str
    tenant: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    secret: str
    readers: list[_Reader] = msgspec.field(default_factory=list)


class ReaderKeyFile:
    """Keys of a file. The constructor raises `PublisherError`.

    If the file changes later and cannot be used, the previous readers stay permitted.
    """

    def __init__(self, path: Path, report: Report = lambda _: None) -> None:
        """`report`: why the keys in use are not those of the file."""
        _require_curve(path)
        self._report = report
        self._path = path
        self._version = file_version(path)
        self._refusal = ""
        """Error of the last reading, which is logged once."""
        self.secret, self._readers = _read(path)

    def readers(self) -> Mapping[bytes, bytes | None]:
        """Returns the public keys and their tenants (None: all). Reads a changed file again."""
        version = file_version(self._path)
        if version != self._version:
            self._version = version
            try:
                secret, self._readers = _read(self._path)
            except PublisherError as error:
                if str(error) != self._refusal:
                    _log.error("the keys of readers cannot be read; the previous keys stay in use", error=str(error))
                self._refusal = str(error)
                self._report(f"the keys of readers cannot be read; the previous keys stay in use: {error}")
                self._version = ()  # read again, because a directory's mode may be the fault
            else:
                self._refusal = ""
                self._report("")
                _log.info("keys of readers read again", readers=len(self._readers))
                if secret != self.secret:
                    cause = "the publisher uses its new secret key after a restart"
                    _log.warning(cause, path=str(self._path))
                    self._report(f"{cause} ({self._path})")
        return self._readers


def _require_curve(path: Path) -> None:
    try:
        from . import curve  # noqa: F401
    except ImportError as error:
        raise PublisherError(f"events.keys = {path}: {error}; install it with: pip install 'kvtier[events]'") from error


def _read(path: Path) -> tuple[bytes, Mapping[bytes, bytes | None]]:
    try:
        with open_trusted(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PublisherError(f"{path}: cannot be read: {error.strerror}") from None
    if mode & _FORBIDDEN_MODE:
        raise PublisherError(f"{path}: has mode {mode:04o}, so other users can use the key: chmod 0600")
    if len(text) > _MAX_FILE_BYTES:
        raise PublisherError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes")
    try:
        parsed = msgspec.convert(tomllib.loads(text.decode()), _File)
    except msgspec.ValidationError as error:
        raise PublisherError(f"{path}: {explain_problem(f'{error}')}") from None
    except (ValueError, RecursionError) as error:
        raise PublisherError(f"{path}: is not TOML: {error}") from None
    readers: dict[bytes, bytes | None] = {}
    for entry in parsed.readers:
        key = _decoded(entry.key, f"{path}: readers, {entry.name!r}: key")
        if key in readers:
            raise PublisherError(f"{path}: readers, {entry.name!r}: another reader has this key")
        readers[key] = None if entry.tenant == ANY_TENANT else tenant_tag(entry.tenant)
    if len(set(readers.values()) - {None}) > MAX_TENANTS:
        raise PublisherError(f"{path}: readers of more than {MAX_TENANTS} tenants")
    return _decoded(parsed.secret, f"{path}: secret"), readers


def _decoded(text: str, what: str) -> bytes:
    """Returns the 32 bytes of a key in Z85 (https://rfc.zeromq.org/spec/32/)."""
    problem = PublisherError(f"{what}: must be {_KEY_CHARACTERS} characters of Z85")
    if len(text) != _KEY_CHARACTERS or any(char not in _Z85 for char in text):
        raise problem
    decoded = b""
    for start in range(0, _KEY_CHARACTERS, 5):
        number = 0
        for char in text[start : start + 5]:
            number = number * 85 + _Z85.index(char)
        if number >= 1 << 32:
            raise problem
        decoded += number.to_bytes(4, "big")
    return decoded
