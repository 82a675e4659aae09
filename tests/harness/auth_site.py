"""A server with TLS and a token file, and clients with and without credentials."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.client import Client, Credentials, KVTierError, Timeouts
from kvtier.server.auth.tokens import format_entry, new_token, token_hash

from .certificates import Authority
from .payloads import key_of, namespace_of
from .polling import wait_until
from .server_process import MIB, ServerProcess

__all__ = [
    "KEYS",
    "PART",
    "TIMEOUTS",
    "Site",
    "Tokens",
    "connected",
    "error_of",
    "make_site",
    "ready_line",
    "refusal_error",
    "status_of",
]

PART = 16 << 10
KEYS = [key_of(number) for number in range(8)]
TIMEOUTS = Timeouts(connect=60.0, call=60.0, transfer=60.0)


@dataclass
class Tokens:
    """A token file and its tokens."""

    path: Path
    token: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, tenant: str | None, *roles: str, shared_memory: bool = False, more: str = "") -> str:
        """Adds and returns a token."""
        token = self.token[name] = new_token()
        entry = format_entry(name, token_hash(token), tenant, roles, shared_memory=shared_memory) + more
        self.path.write_text((self.path.read_text() if self.path.exists() else "") + entry + "\n")
        return token

    def remove(self, name: str) -> None:
        entries = self.path.read_text().split("\n\n")
        kept = [entry for entry in entries if f'name = "{name}"' not in entry]
        beside = self.path.with_suffix(".new")
        beside.write_text("\n\n".join(kept))
        beside.replace(self.path)


@dataclass
class Site:
    """A running server, its files and its clients."""

    server: ServerProcess
    authority: Authority
    tokens: Tokens

    def credentials(self, name: str | None = None, **more: Any) -> Credentials:
        """The credentials of a token's holder, over TLS."""
        token = self.tokens.token[name] if name is not None else None
        return Credentials(ca=self.authority.ca, token=token, **more)

    def client(self, name: str | None, *, tenant: str = "", unix: bool = False, **more: Any) -> Client:
        return Client(
            self.server.endpoint if unix else self.server.tcp,
            namespace=namespace_of(PART, tenant=tenant),
            credentials=self.credentials(name),
            timeouts=TIMEOUTS,
            **more,
        )

    def audit_lines(self) -> list[str]:
        return [line for line in self.server.log.splitlines() if '"event": "audit"' in line]


def make_site(
    directory: Path,
    *,
    config: str = "",
    tls: str = "",
    auth: str = "",
    heartbeat: float = 4.0,
    region: int = 16 * MIB,
    lmdb: int = 32 * MIB,
    shared_memory: bool = True,
) -> Site:
    """A server that listens on TLS, not started; `tls` and `auth` are additions to their tables.

    With `shared_memory` the tenants acme and zeta have memory of their own; without it all tenants
    share the common memory.
    A client tolerates five missing heartbeats, because a busy machine may be silent for that long.
    """
    authority = Authority(directory)
    pair = authority.issue("server")
    tokens = Tokens(directory / "tokens.toml")
    tokens.add("acme-engine", "acme", "engine", shared_memory=shared_memory)
    tokens.add("acme-far", "acme", "engine")
    tokens.add("acme-reader", "acme", "reader", shared_memory=shared_memory)
    tokens.add("zeta-engine", "zeta", "engine", shared_memory=shared_memory)
    tokens.add("any-engine", "*", "engine")
    tokens.add("boss", None, "admin")
    tokens.add("prometheus", None, "metrics")
    tokens.add("old", "acme", "engine", more="expires = 2020-01-01T00:00:00Z\n")
    text = (
        f'{config}\n[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n{tls}\n'
        f'[auth]\ntokens = "{tokens.path}"\n{auth}\n[sessions]\nheartbeat_interval = {heartbeat}'
    )
    server = ServerProcess(directory, region=region, lmdb=lmdb, config=text, tcp=True, insecure=False)
    return Site(server, authority, tokens)


@contextlib.contextmanager
def connected(channel: grpc.Channel) -> Iterator[grpc.Channel]:
    """Waits until a channel's handshake has ended; closes the channel at the end."""
    with channel:
        grpc.channel_ready_future(channel).result(60)
        yield channel


def status_of(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return str(refused.value.code().name)


def error_of(client: Client, seconds: float = 3.0) -> KVTierError:
    """The client's error if it finds no server in this time."""
    with pytest.raises(KVTierError) as error:
        client.wait_until_connected(seconds)
    return error.value


def refusal_error(client: Client) -> KVTierError:
    """The error with which a server refuses a client. The client does not wait for the time-out."""
    return error_of(client, 3600.0)


def ready_line(server: ServerProcess) -> dict[str, Any]:
    """The server's log line of its start, which is written just after it begins to serve."""

    def said() -> dict[str, Any] | None:
        lines = server.log.splitlines(keepends=True)
        return next((json.loads(line) for line in lines if '"event": "ready"' in line and line.endswith("\n")), None)

    line: dict[str, Any] = wait_until(said)
    return line
