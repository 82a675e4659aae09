"""Tier `valkey`: blocks in a Valkey or Redis server, through the library `valkey-glide-sync`.

The library is the optional extra `kvtier[valkey]`. This module imports it when a tier is opened.
Its synchronous client reads values into buffers and writes them from buffers.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from ..base import TierOpenError
from . import value_codec
from .object_store import ObjectStore, StoreRefusedError, StoreUnavailableError
from .remote_tier import RemoteLimits, RemoteTier
from .value_codec import ValueCodec

__all__ = ["ValkeyAddress", "ValkeyTier", "import_glide"]

_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""URL schemes, and whether they use TLS."""
_PORT = 6379
_DATABASE = re.compile(r"/?|/\d{1,5}", re.ASCII)

DELETE_IF_EQUAL = b"if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0"
"""Script: Valkey has `DELIFEQ` since version 9, Redis has no such command in version 8.2."""


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """Address of a server: `valkey://HOST[:PORT][/DATABASE]`, or `valkeys://` for TLS."""

    host: str
    port: int
    database: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses a URL. Raises ValueError; the message never contains a password."""
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise ValueError(f"must begin with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not contain a user or password; use `username` and `password_file`")
        try:
            port = parts.port or _PORT
        except ValueError:
            raise ValueError("the port must be between 1 and 65535") from None
        if not parts.hostname or parts.query or parts.fragment or not _DATABASE.fullmatch(parts.path):
            raise ValueError("must be like valkey://HOST:PORT or valkey://HOST:PORT/DATABASE")
        return cls(parts.hostname, port, int(parts.path[1:] or 0), _SCHEMES[parts.scheme])

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ValkeyTier(RemoteTier):
    type: ClassVar[str] = "valkey"

    def __init__(
        self,
        name: str,
        size_bytes: int,
        *,
        url: str,
        limits: RemoteLimits,
        username: str | None = None,
        password_file: Path | None = None,
        tls_ca: Path | None = None,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        codec: ValueCodec = value_codec,
    ) -> None:
        """Connects on first use. The files are read at each connection.

        Raises `TierOpenError` if the client library is not installed, or the URL is invalid.
        """
        glide = import_glide()
        try:
            address = ValkeyAddress.parse(url)
        except ValueError as error:
            raise TierOpenError(f"url: {error}") from None

        def connect() -> ObjectStore:
            try:
                credentials = _credentials(glide, username, password_file)
                tls = _tls(glide, tls_ca, tls_cert, tls_key)
            except OSError as error:
                raise StoreUnavailableError(f"cannot read {error.filename}: {error.strerror}") from error
            return _ValkeyStore(glide, address, credentials, tls, limits.deadline_seconds)

        super().__init__(name, size_bytes, node=str(address), connect=connect, limits=limits, codec=codec)


class _ValkeyStore:
    """`ObjectStore` with one connection. The library reconnects by itself."""

    def __init__(
        self, glide: ModuleType, address: ValkeyAddress, credentials: Any, tls: Any, deadline_seconds: float
    ) -> None:
        self._glide = glide
        self._deadline_seconds = deadline_seconds
        deadline_ms = max(1, round(deadline_seconds * 1000))
        configuration = glide.GlideClientConfiguration(
            [glide.NodeAddress(address.host, address.port)],
            use_tls=address.tls,
            credentials=credentials,
            request_timeout=deadline_ms,
            reconnect_strategy=glide.BackoffStrategy(num_of_retries=3, factor=50, exponent_base=2),
            database_id=address.database,
            client_name="kvtier",
            advanced_config=glide.AdvancedGlideClientConfiguration(
                connection_timeout=deadline_ms, tls_config=tls if address.tls else None
            ),
        )
        self._client = self._try(lambda: glide.GlideClient.create(configuration))

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [found == 1 for found in self._batch([[b"EXISTS", name] for name in names])]

    def get(self, names: Sequence[bytes], buffers: Sequence[memoryview]) -> list[memoryview | None]:
        try:
            sizes = self._try(lambda: self._client.mget(list(names), buffers=list(buffers)))
        except StoreRefusedError:
            # The library fails the whole call if one value is larger than its buffer.
            values = [self._try(lambda name=name: self._client.get(name)) for name in names]
            return [None if value is None else memoryview(value) for value in values]
        return [None if size is None else buffer[: int(size)] for size, buffer in zip(sizes, buffers, strict=True)]

    def put(self, values: Sequence[tuple[bytes, memoryview]], ttl_seconds: float) -> list[bool]:
        ttl = _seconds(ttl_seconds)
        answers = self._batch([[b"SET", name, value, b"NX", b"EX", ttl] for name, value in values])
        return [not _is_full(answer) for answer in answers]

    def renew(self, names: Sequence[bytes], ttl_seconds: float) -> None:
        self._batch([[b"EXPIRE", name, _seconds(ttl_seconds)] for name in names])

    def delete_if_equal(self, name: bytes, value: memoryview) -> None:
        self._try(lambda: self._client.custom_command([b"EVAL", DELETE_IF_EQUAL, b"1", name, value]))

    def ping(self) -> None:
        self._try(self._client.ping)

    def close(self) -> None:
        self._client.close()

    def _batch(self, commands: Sequence[list[bytes | memoryview]]) -> list[Any]:
        """Sends commands at once; returns an answer per command, an error if the memory is full."""
        batch = self._glide.Batch(is_atomic=False)
        for command in commands:
            batch.custom_command(command)
        answers: list[Any] = self._try(lambda: self._client.exec(batch, raise_on_error=False)) or []
        for answer in answers:
            if isinstance(answer, Exception) and not _is_full(answer):
                raise StoreRefusedError(f"{answer}") from answer
        return answers

    def _try(self, call: Any) -> Any:
        """Runs a call of the library and translates its errors."""
        glide = self._glide
        try:
            return call()
        except glide.TimeoutError as error:
            raise StoreUnavailableError(f"no answer within {self._deadline_seconds:g} s") from error
        except (glide.ClosingError, glide.ConnectionError) as error:
            raise StoreUnavailableError(f"{error}".strip()) from error
        except glide.GlideError as error:
            raise StoreRefusedError(f"{error}") from error


def import_glide() -> ModuleType:
    """Returns the client library. Raises TierOpenError if it is not installed."""
    try:
        glide = importlib.import_module("glide_sync")
    except ImportError as error:
        raise TierOpenError(f"needs the package valkey-glide-sync: pip install 'kvtier[valkey]' ({error})") from error
    # The tier reports errors itself.
    glide.Logger.init(glide.LogLevel.OFF)
    return glide


def _credentials(glide: ModuleType, username: str | None, password_file: Path | None) -> Any:
    if password_file is None:
        return None
    password = password_file.read_text(encoding="utf-8").strip()
    return glide.ServerCredentials(password=password, username=username)


def _tls(glide: ModuleType, ca: Path | None, cert: Path | None, key: Path | None) -> Any:
    return glide.TlsAdvancedConfiguration(
        root_pem_cacerts=ca.read_bytes() if ca else None, client_cert_path=cert, client_key_path=key
    )


def _is_full(answer: object) -> bool:
    """Returns whether an answer is the error of a store without memory that does not evict."""
    return isinstance(answer, Exception) and f"{answer}".startswith("OOM")


def _seconds(duration: float) -> bytes:
    return b"%d" % max(1, round(duration))
