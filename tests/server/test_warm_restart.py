"""A server is killed, and the next one has the blocks of its CPU tier: with a real keeper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.payloads import assert_serves, correct_hits, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess
from harness.store_server import RunningKeeper

from kvtier.client import Client, KVTierError, Timeouts

PART_BYTES = (64 << 10, 8 << 10)
NAMESPACE = namespace_of(*PART_BYTES)
TIMEOUTS = Timeouts(connect=10.0, call=10.0, transfer=10.0)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[RunningKeeper]:
    with RunningKeeper(tmp_path) as keeper:
        yield keeper


def server_of(
    keeper: RunningKeeper, directory: Path, *, region: int = 64 * MIB, lmdb: int = 0, config: str = ""
) -> ServerProcess:
    (directory / "server").mkdir(exist_ok=True)
    return ServerProcess(directory / "server", region=region, lmdb=lmdb, config=f'keeper = "{keeper.path}"\n{config}')


def client_of(server: ServerProcess, **options: Any) -> Client:
    return Client(server.endpoint, namespace=NAMESPACE, timeouts=TIMEOUTS, **options)


def store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, client.namespace.part_bytes_of(key)) for key in keys])


def keys_of(count: int, *, salt: str = "", first: int = 0) -> list[bytes]:
    return [key_of(number, number % 2, salt=salt) for number in range(first, first + count)]


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_blocks_survive_the_server(keeper: RunningKeeper, tmp_path: Path, how: str) -> None:
    keys = keys_of(300)
    with server_of(keeper, tmp_path) as server:
        server.start()
        with client_of(server) as client:
            store(client, keys)
        for _ in range(3):
            getattr(server, how)()
            server.start()
            with client_of(server, transport="shm") as client:
                assert_serves(client, keys)
            with client_of(server, transport="grpc") as client:
                assert_serves(client, keys)
        assert "warm start" in server.log


def test_without_a_keeper_the_tier_is_empty(tmp_path: Path) -> None:
    keys = keys_of(20)
    with ServerProcess(tmp_path, region=64 * MIB, lmdb=0) as server:
        server.start()
        with client_of(server) as client:
            store(client, keys)
        server.restart()
        with client_of(server) as client:
            assert correct_hits(client, keys) == 0


def test_a_client_that_stays_connects_again(keeper: RunningKeeper, tmp_path: Path) -> None:
    keys, more = keys_of(100), keys_of(100, salt="more")
    with server_of(keeper, tmp_path, config="[sessions]\nheartbeat_interval = 0.1\n") as server:
        server.start()
        with client_of(server) as client:
            store(client, keys)
            server.restart()
            wait_until(lambda: _serves(client, keys), 60.0)
            store(client, more)
            assert_serves(client, keys + more)
            assert server.status().quarantined_bytes == 0


def _serves(client: Client, keys: list[bytes]) -> bool:
    try:
        return correct_hits(client, keys) == len(keys)
    except KVTierError:
        return False
