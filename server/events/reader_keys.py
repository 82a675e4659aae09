"""Key file of the publisher (TOML): its own secret key, and the public keys of permitted readers.

- secret: the server's secret key, 40 characters of Z85, as `zmq.curve_keypair()` returns it
- readers: for each reader a `name`, its public `key` (Z85), and the `tenant` whose events it may
  read: "*" for all tenants, "" for clients without a tenant
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..auth.credential_files import FileError, ReloadedFile, read_toml
from ..auth.tokens import ANY_TENANT
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


class _Reader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    key: str
    tenant: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    secret: str
    readers: list[_Reader] = msgspec.field(default_factory=list)


class ReaderKeyFile:
    """Keys of a file. The constructor raises `FileError` and `PublisherError`.

    If the file changes later and cannot be used, the previous readers stay permitted.
    """

    def __init__(self, path: Path, report: Report = lambda _: None) -> None:
        """`report`: why the keys in use are not those of the file."""
        _require_curve(path)
        self._report = report
        failure = "the keys of readers cannot be read; the previous keys stay in use"
        self._file = ReloadedFile(path, _read, failure, report)
        self.secret, _ = self._file.content

    def readers(self) -> Mapping[bytes, bytes | None]:
        """Returns the public keys and their tenants (None: all). Reads a changed file again."""
        is_new = self._file.refresh()
        secret, readers = self._file.content
        if is_new:
            _log.info("keys of readers read again", readers=len(readers))
            if secret != self.secret:
                cause = "the publisher uses its new secret key after a restart"
                _log.warning(cause, path=str(self._file.path))
                self._report(f"{cause} ({self._file.path})")
        return readers


def _require_curve(path: Path) -> None:
    try:
        from . import curve  # noqa: F401
    except ImportError as error:
        raise PublisherError(f"events.keys = {path}: {error}; install it with: pip install 'kvtier[events]'") from error


def _read(path: Path) -> tuple[bytes, Mapping[bytes, bytes | None]]:
    parsed = read_toml(path, _File, private="the key")
    readers: dict[bytes, bytes | None] = {}
    for entry in parsed.readers:
        key = _decoded(entry.key, f"{path}: readers, {entry.name!r}: key")
        if key in readers:
            raise FileError(f"{path}: readers, {entry.name!r}: another reader has this key")
        readers[key] = None if entry.tenant == ANY_TENANT else tenant_tag(entry.tenant)
    if len(set(readers.values()) - {None}) > MAX_TENANTS:
        raise FileError(f"{path}: readers of more than {MAX_TENANTS} tenants")
    return _decoded(parsed.secret, f"{path}: secret"), readers


def _decoded(text: str, what: str) -> bytes:
    """Returns the 32 bytes of a key in Z85 (https://rfc.zeromq.org/spec/32/)."""
    problem = FileError(f"{what}: must be {_KEY_CHARACTERS} characters of Z85")
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
