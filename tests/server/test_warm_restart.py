"""A server is killed, and the next one has the blocks of its CPU tier: with a real keeper."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.payloads import assert_serves, correct_hits, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess
from harness.store_server import RunningKeeper

from kvtier.client import Client, KVTierError, Timeouts
from kvtier.server import warm_restart
from kvtier.server.memory_pools import MemoryLayout
from kvtier.server.telemetry.downgrades import Downgrades
from kvtier.server.warm_restart import WarmMemory, open_memory

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


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_slots_that_a_client_may_write_to_stay_out_of_use(keeper: RunningKeeper, tmp_path: Path, how: str) -> None:
    """A client writes to its slots after the restart. No other block is in them."""
    written, others = keys_of(64), keys_of(1200, salt="others")
    with server_of(keeper, tmp_path, region=32 * MIB, config='[cpu]\neviction = "lru"') as server:
        server.start()
        with client_of(server) as writer, client_of(server) as other:
            with pytest.raises(KVTierError), writer.write(written) as batch:  # noqa: PT012 - of the exit
                views = list(batch.views())
                getattr(server, how)()
                server.start()
                wait_until(lambda: _connected(other), 60.0)
                assert server.status().quarantined_bytes >= sum(len(view) for view in views)
                for start in range(0, len(others), 100):
                    store(other, others[start : start + 100])
                    for view in views:
                        view[:] = b"\xee" * len(view)
                latest = others[-100:]
                assert_serves(other, latest)
                assert correct_hits(other, written) == 0
            server.wait_for(lambda status: not status.quarantined_bytes)
            assert_serves(other, latest)
            store(other, written)
            assert_serves(other, written)


def test_a_reader_learns_that_its_lease_has_ended(keeper: RunningKeeper, tmp_path: Path) -> None:
    """The next server may give the slots to others while the client still reads them."""
    keys, others = keys_of(64), keys_of(1200, salt="others")
    with server_of(keeper, tmp_path, region=32 * MIB, config='[cpu]\neviction = "lru"') as server:
        server.start()
        with client_of(server) as reader, client_of(server) as other:
            store(other, keys)
            lease = reader.lookup(keys)
            with pytest.raises(KVTierError), reader.read(lease, range(len(keys))) as batch:  # noqa: PT012 - its exit
                assert len(list(batch.views())) == len(keys)
                server.restart()
                wait_until(lambda: _connected(other), 60.0)
                assert_serves(other, keys)
                for start in range(0, len(others), 100):
                    store(other, others[start : start + 100])
            assert_serves(other, others[-100:])


def test_a_killed_writer_leaves_nothing_out_of_use(keeper: RunningKeeper, tmp_path: Path) -> None:
    """The client ends while no server runs."""
    with server_of(keeper, tmp_path) as server:
        server.start()
        program = _WRITER.format(tests=str(Path(__file__).parent.parent), endpoint=server.endpoint)
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            server.kill()
            writer.kill()
        server.start()
        server.wait_for(lambda status: not status.quarantined_bytes)
        assert server.tier("cpu").used_bytes == 0


_WRITER = """
import signal, sys
sys.path.insert(0, {tests!r})
from harness.payloads import key_of, namespace_of
from kvtier.client import Client
with Client({endpoint!r}, namespace=namespace_of(65536), transport="shm") as client:
    client.wait_until_connected(60)
    with client.write([key_of(number) for number in range(16)]):
        print("writing", flush=True)
        signal.pause()
"""


def test_a_reset_stays_a_reset(keeper: RunningKeeper, tmp_path: Path) -> None:
    keys, others = keys_of(100), keys_of(50, salt="others")
    with server_of(keeper, tmp_path) as server:
        server.start()
        with client_of(server) as client:
            store(client, keys)
            client.reset()
            store(client, others)
        server.restart()
        with client_of(server) as client:
            assert correct_hits(client, keys) == 0
            assert_serves(client, others)


def test_blocks_reach_the_tiers_below(keeper: RunningKeeper, tmp_path: Path) -> None:
    """The server is killed before it has written all blocks to LMDB; the next one writes them."""
    keys = keys_of(400)
    with server_of(keeper, tmp_path, lmdb=256 * MIB) as server:
        server.start()
        with client_of(server) as client:
            store(client, keys)
            server.restart()
        server.wait_for_stored(len(keys))
        server.terminate()
        keeper.process.kill()
        keeper.process.wait()
        server.start()
        with client_of(server) as client:
            assert_serves(client, keys)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("region_size = 33554432", "region"),
        ("header", "layout"),
        ("classes", "slot size"),
    ],
)
def test_other_settings_or_damage_are_a_cold_start(
    keeper: RunningKeeper, tmp_path: Path, change: str, reason: str
) -> None:
    keys = keys_of(50)
    with server_of(keeper, tmp_path) as server:
        server.start()
        with client_of(server) as client:
            store(client, keys)
        if "=" in change:
            config = server.directory / "kvtier.toml"
            config.write_text(config.read_text().replace(f"region_size = {64 * MIB}", change))
            server.kill()
        else:
            with _records_of(server.pid) as records:
                server.kill()
                at = 0 if change == "header" else 4096
                os.pwrite(records, b"\xff" * 8, at)
        server.start(backed=False)
        server.wait_for(lambda status: status.tiers[0].available_bytes >= 16 * MIB)
        lines = [json.loads(line) for line in server.log.splitlines()]
        (cold,) = [line for line in lines if line["event"].startswith("cold start")]
        assert reason in cold["reason"]
        with client_of(server) as client:
            assert correct_hits(client, keys) == 0
            store(client, keys)
        server.kill()
        server.start(backed=False)
        with client_of(server) as client:
            assert_serves(client, keys)


@contextlib.contextmanager
def _records_of(pid: int) -> Iterator[int]:
    """Yields a descriptor of the records of a running server."""
    for each in Path(f"/proc/{pid}/fd").iterdir():
        if "kvtier-records" in os.readlink(each):  # noqa: PTH115 - the file has no path
            descriptor = os.open(each, os.O_RDWR)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
            return
    raise AssertionError("the server has no records")


def test_two_servers_never_share_memory(keeper: RunningKeeper, tmp_path: Path) -> None:
    keys = keys_of(50)
    (tmp_path / "b").mkdir()
    with server_of(keeper, tmp_path) as server, server_of(keeper, tmp_path / "b") as second:
        server.start()
        with client_of(server) as client:
            store(client, keys)
            second.start()
            assert [each for each in second.status().downgrades if each.feature == "warm_restart"]
            with client_of(second) as other:
                assert correct_hits(other, keys) == 0
            server.restart()
            assert not [each for each in server.status().downgrades if each.feature == "warm_restart"]
        with client_of(server) as client:
            assert_serves(client, keys)


def test_a_server_without_its_keeper_serves(keeper: RunningKeeper, tmp_path: Path) -> None:
    keys = keys_of(50)
    with server_of(keeper, tmp_path) as server:
        server.start()
        keeper.process.kill()
        keeper.process.wait()
        with client_of(server) as client:
            store(client, keys)
            assert_serves(client, keys)
        server.restart()
        assert [each for each in server.status().downgrades if each.feature == "warm_restart"]
        with client_of(server) as client:
            assert correct_hits(client, keys) == 0
            store(client, keys)
            assert_serves(client, keys)


def _connected(client: Client) -> bool:
    try:
        client.lookup([key_of(0)]).release()
    except KVTierError:
        return False
    return True


def test_a_process_of_the_earlier_server_that_has_not_ended(
    keeper: RunningKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write to the memory, so the next server does not use the memory."""
    monkeypatch.setattr(warm_restart, "_END_SECONDS", 0.2)
    with _memory(keeper) as first:
        (of_a_child,) = map(os.dup, first.region.inherited)
        first.region.memory[:4] = b"old!"
    with _memory(keeper) as second:
        assert not second.is_warm
        assert second.region.memory[:4] == bytes(4)
        second.region.memory[:4] = b"new!"
    os.close(of_a_child)
    with _memory(keeper) as third:
        assert third.is_warm
        assert third.region.memory[:4] == b"new!"


def test_memory_that_a_tier_shares_ends_with_the_server(keeper: RunningKeeper) -> None:
    with _memory(keeper) as first:
        first.region.memory[:4] = b"old!"
    downgrades = Downgrades()
    with _memory(keeper, downgrades, is_shared=True) as second:
        assert (second.is_warm, second.records) == (False, None)
        assert second.region.memory[:4] == bytes(4)
        assert [each.feature for each in downgrades.all()] == ["warm_restart"]


@contextlib.contextmanager
def _memory(
    keeper: RunningKeeper, downgrades: Downgrades | None = None, *, is_shared: bool = False
) -> Iterator[WarmMemory]:
    memory = open_memory(keeper.path, MemoryLayout(4 * MIB), downgrades or Downgrades(), is_shared=is_shared)
    try:
        yield memory
    finally:
        memory.close()
