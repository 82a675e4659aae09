"""Blocks from another server: real servers on the loopback, one of which names the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client, KeyStatus, SourceOutcome

PART = 16 << 10
KEYS = [key_of(number) for number in range(40)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server that has the blocks."""
    with ServerProcess(tmp_path_factory.mktemp("b"), tcp=True).start() as server:
        yield server


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, source: ServerProcess) -> Iterator[ServerProcess]:
    """The server that pulls them."""
    port = source.tcp.rpartition(":")[2]
    config = f'insecure = true\n[peers]\nservers = ["localhost:{port}"]\n'
    with ServerProcess(tmp_path_factory.mktemp("a"), config=config).start() as server:
        yield server


def test_blocks_of_a_source_are_pulled_into_the_cpu_tier(here: ServerProcess, source: ServerProcess) -> None:
    """A name of DNS permits its address. The next lookup hits without the source."""
    namespace = namespace_of(PART, model="pulled")
    with Client(source.endpoint, namespace=namespace) as there, Client(here.endpoint, namespace=namespace) as client:
        there.store(KEYS, [payload(key, PART) for key in KEYS])
        client.store(KEYS[:10], [payload(key, PART) for key in KEYS[:10]])
        with client.lookup([*KEYS, key_of(1000)], wait=30, source=source.tcp) as lease:
            assert lease.source_outcome is SourceOutcome.FOUND
            assert lease.prefix_hits == len(KEYS)
            assert lease.sources[:40] == (*["cpu"] * 10, *["peers"] * 30)
        buffers = [bytearray(PART) for _ in KEYS]
        assert client.load(KEYS, buffers) == len(KEYS)
        assert [bytes(buffer) for buffer in buffers] == [payload(key, PART) for key in KEYS]
        with client.lookup(KEYS, source=source.tcp, wait=5) as lease:
            assert (lease.prefix_hits, lease.source_outcome) == (len(KEYS), SourceOutcome.NOT_NEEDED)
        wait_until(lambda: there.status().leases == 0)
