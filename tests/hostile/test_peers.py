"""Attacks of a tenant on a source of blocks that another tenant also names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from harness.payloads import key_of, namespace_of, payload
from harness.raw import RawSession
from harness.server_process import ServerProcess

from kvtier.client import Client
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys

PART = 4096
KEYS = [key_of(number) for number in range(32)]
FOUND, UNREACHABLE = cache_pb2.SOURCE_OUTCOME_FOUND, cache_pb2.SOURCE_OUTCOME_UNREACHABLE
STREAMS = 256
"""Streams of an HTTP/2 connection to a server. Each session of a source takes one."""


@contextlib.contextmanager
def two_servers(directory: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A server, and the source that it may ask, which has blocks of the tenant "zeta"."""
    for name in "ab":
        (directory / name).mkdir()
    with ServerProcess(directory / "b", tcp=True).start() as source:
        config = f'[peers]\nservers = ["{source.tcp}"]\ndeadline = "5s"'
        with ServerProcess(directory / "a", config=config).start() as server:
            with Client(source.endpoint, namespace=namespace_of(PART, tenant="zeta")) as client:
                client.wait_until_connected(60)
                client.store(KEYS, [payload(key, PART) for key in KEYS])
            yield server, source


def searched(session: RawSession, key: bytes, source: ServerProcess) -> int:
    """Looks up a block with a source; returns the outcome."""
    request = cache_pb2.LookupRequest(
        session=session.ref, keys=pack_keys([key]), source=source.tcp, wait=Duration(seconds=30)
    )
    outcome: int = session.cache.Lookup(request, timeout=60).source_outcome
    return outcome


def attack(server: ServerProcess, source: ServerProcess, ranks: int, number: int) -> set[int]:
    """Searches with a namespace of its own; the server opens a session per rank at the source."""
    namespace = namespace_of(1, world_size=ranks, model=f"{number}", tenant="acme")
    with RawSession(server.endpoint, namespace, engine_id=f"{number}", rank=0) as session:
        return {searched(session, key_of(each), source) for each in range(3)}


@pytest.mark.parametrize(("ranks", "namespaces"), [(1024, 4), (STREAMS, 4), (64, 8), (1, STREAMS + 64)])
def test_sessions_of_a_tenant_take_no_source_from_others(tmp_path: Path, ranks: int, namespaces: int) -> None:
    """Sessions of two tenants shared a connection, its 256 streams and a circuit breaker."""
    with (
        two_servers(tmp_path) as (server, source),
        RawSession(server.endpoint, namespace_of(PART, tenant="zeta"), engine_id="victim") as victim,
        ThreadPoolExecutor(8) as threads,
    ):
        assert searched(victim, KEYS[0], source) == FOUND
        attacks = [threads.submit(attack, server, source, ranks, number) for number in range(namespaces)]
        during = [searched(victim, key, source) for key in KEYS[1:16]]
        for each in attacks:
            each.result(120)
        after = [searched(victim, key, source) for key in KEYS[16:]]
        assert set(during + after) == {FOUND}
        assert len(source.status().sessions) <= STREAMS
