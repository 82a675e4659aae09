"""Token file (TOML): tokens and client certificates, with the tenant and roles of each.

Keys of each `[[tokens]]` table:

- name: name of the caller in the log, for example "vllm"
- hash: "sha256:" and the hash of the token, as `kvtier token new` prints it
- tenant: the tenant; "*" for any tenant
- roles: list of engine, reader, admin, metrics
- shared_memory: whether the caller may map the memory of its tenant (`server/memory_pools.py`); if
  not, the caller can use only streams
- expires: date and time in TOML, for example 2027-01-01T00:00:00Z

A `[[certificates]]` table has the same keys except `hash`. Its `name` is a name in the certificate
with its kind, for example "dns:engine-1.acme.example" (`certificates`).

A token has 256 random bits, so a fast hash (a microsecond) is safe.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..config.toml import toml_text
from .certificate_names import entry_name
from .credential_files import FileError, read_toml
from .roles import Identity, Role

__all__ = [
    "ANY_TENANT",
    "TokenFile",
    "format_entry",
    "new_token",
    "read_token_file",
    "token_hash",
]

ANY_TENANT = "*"

_PREFIX = "sha256:"
_TOKEN_BYTES = 32
_TENANT_ROLES = {"engine", "reader"}


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    roles: Annotated[list[Literal["engine", "reader", "admin", "metrics"]], msgspec.Meta(min_length=1)]
    tenant: str | None = None
    shared_memory: bool = False
    expires: datetime | None = None

    def identity(self, credential: bytes) -> Identity:
        tenant = None if self.tenant == ANY_TENANT else self.tenant or ""
        return Identity(self.name, tenant, frozenset(map(Role, self.roles)), self.shared_memory, credential)


class _Token(_Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hash: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[_Token] = []
    certificates: list[_Entry] = []


@dataclass(frozen=True, slots=True)
class _Credential:
    identity: Identity
    expires: float | None

    def identity_at(self, now: float) -> Identity | None:
        return self.identity if self.expires is None or now < self.expires else None


@dataclass(frozen=True, slots=True)
class TokenFile:
    tokens: Mapping[bytes, _Credential] = field(default_factory=dict)
    certificates: Mapping[str, _Credential] = field(default_factory=dict)

    def find_token(self, token: str, now: float) -> Identity | None:
        """Returns the token's identity; None if unknown, or expired at `now` (Unix time)."""
        digest = hashlib.sha256(token.encode()).digest()
        # The duration of the search reveals nothing about a stored hash: a caller cannot choose the
        # hash that is looked up, and the comparison takes constant time.
        known = self.tokens.get(digest[:8])
        if known is None or not hmac.compare_digest(known.identity.credential or b"", digest):
            return None
        return known.identity_at(now)

    def find_certificate(self, names: Iterable[str], now: float) -> list[Identity | None]:
        """Returns the identities of all entries that list one of a client certificate's names.

        TLS has verified the certificate. None stands for an entry that has expired.
        """
        known = [self.certificates.get(name) for name in dict.fromkeys(names)]
        return [entry.identity_at(now) for entry in known if entry is not None]

    def identities(self) -> list[Identity]:
        """Returns the identities of all entries, also of expired ones."""
        return [entry.identity for entry in (*self.tokens.values(), *self.certificates.values())]

    def is_still_valid(self, identity: Identity, now: float) -> bool:
        """Returns whether the file still has this identity and the identity has not expired."""
        if identity.credential is None:
            return True
        of_token = self.tokens.get(identity.credential[:8])
        of_name = self.certificates.get(identity.name)
        return any(known is not None and known.identity_at(now) == identity for known in (of_token, of_name))


def new_token() -> str:
    return f"kvt_{secrets.token_urlsafe(_TOKEN_BYTES)}"


def token_hash(token: str) -> str:
    return f"{_PREFIX}{hashlib.sha256(token.encode()).hexdigest()}"


def read_token_file(path: Path, *, trusted: bool = True) -> TokenFile:
    """Reads a token file. Raises `FileError`, with `trusted` also if other users can write it."""
    parsed = read_toml(path, _File, trusted=trusted)
    for entry in (*parsed.tokens, *parsed.certificates):
        if entry.tenant is None and _TENANT_ROLES & set(entry.roles):
            raise FileError(f'{path}: {entry.name}: an engine or reader needs a tenant; write "*" for any')
    digests = [bytes.fromhex(entry.hash.removeprefix(_PREFIX)) for entry in parsed.tokens]
    tokens = {digest[:8]: _credential(entry, digest) for entry, digest in zip(parsed.tokens, digests, strict=True)}
    certificates = _certificates(path, parsed.certificates)
    if len(tokens) < len(parsed.tokens) or len(certificates) < len(parsed.certificates):
        raise FileError(f"{path}: a token or a certificate is listed twice")
    return TokenFile(tokens, certificates)


def _certificates(path: Path, entries: Sequence[_Entry]) -> dict[str, _Credential]:
    """Returns the credentials of certificates by name. Raises `FileError`."""
    certificates = {}
    for number, entry in enumerate(entries, start=1):
        try:
            name = entry_name(entry.name)
        except ValueError as error:
            raise FileError(f"{path}: certificates, number {number}: name: {entry.name!r}: {error}") from None
        certificates[name] = _credential(msgspec.structs.replace(entry, name=name), b"name:" + name.encode())
    return certificates


def format_entry(name: str, hashed: str, tenant: str | None, roles: Sequence[str], *, shared_memory: bool) -> str:
    lines = ["[[tokens]]", f"name = {toml_text(name)}", f"hash = {toml_text(hashed)}"]
    if tenant is not None:
        lines.append(f"tenant = {toml_text(tenant)}")
    lines.append(f"roles = [{', '.join(map(toml_text, roles))}]")
    if shared_memory:
        lines.append("shared_memory = true")
    return "\n".join(lines) + "\n"


def _credential(entry: _Entry, credential: bytes) -> _Credential:
    expires = entry.expires
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return _Credential(entry.identity(credential), expires.timestamp() if expires is not None else None)
