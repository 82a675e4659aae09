"""Tier `valkey`: blocks in a Valkey or Redis server, or in a cluster of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit

from ..secondary_tier import TierOpenError
from . import value_codec
from .dialing import Dialer, ServerAddress
from .network_tier import RemoteLimits, split_url
from .remote_tier import RemoteTier
from .valkey_nodes import ValkeyNodes
from .valkey_store import ValkeyStore
from .value_codec import ValueCodec

__all__ = ["ValkeyAddress", "ValkeyTier"]

_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""URL schemes, and whether they use TLS."""
_PORT = 6379
_DATABASE = re.compile(r"/?|/\d{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """Address of a store: `valkey://HOST[:PORT][,HOST[:PORT]…][/DATABASE]`; `valkeys://` for TLS.

    Several servers must be nodes of one cluster.
    """

    servers: tuple[ServerAddress, ...]
    database: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses a URL. Raises ValueError; the message never contains a password."""
        refusal = "must not contain a user or password, nor parameters; use `username` and `password_file`"
        parts = split_url(url, _SCHEMES, refusal)
        if not _DATABASE.fullmatch(parts.path):
            raise ValueError("must be like valkey://HOST:PORT or valkey://HOST:PORT/DATABASE")
        servers = tuple(map(_server, parts.netloc.split(",")))
        database = int(parts.path[1:] or 0)
        if database and len(servers) > 1:
            raise ValueError("must not contain a database, because a cluster has only one")
        return cls(servers, database, _SCHEMES[parts.scheme])


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
        """Connects on first use. Raises `TierOpenError` if the URL is invalid."""
        try:
            address = ValkeyAddress.parse(url)
        except ValueError as error:
            raise TierOpenError(f"url: {error}") from None
        dialer = Dialer(address.database, username, password_file, address.tls, tls_ca, tls_cert, tls_key)

        def open_client(endpoint: ServerAddress, deadline_seconds: float, moved: Callable[[], None]) -> ValkeyStore:
            return ValkeyStore(lambda ends_at: dialer.dial(endpoint, ends_at), deadline_seconds, moved)

        nodes = ValkeyNodes(address.servers, open_client, limits.deadline_seconds)
        super().__init__(name, size_bytes, topology=nodes, limits=limits, codec=codec)


def _server(text: str) -> ServerAddress:
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port or _PORT
    except ValueError:
        raise ValueError("the port must be between 1 and 65535") from None
    if not parts.hostname:
        raise ValueError("must be like valkey://HOST:PORT or valkey://HOST:PORT,HOST:PORT")
    return ServerAddress(parts.hostname, port)
