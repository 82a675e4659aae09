"""Two servers, each with its own CPU tier, at one Mooncake store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.mooncake_cluster import MASTER, MooncakeCluster, needs_mooncake
from harness.own_network import own_network
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client

pytestmark = pytest.mark.remote

PART = 256 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(32)]
GENEROUS_SECONDS = 15.0
"""Limit for one call, whose deadline at the store is 1 s. The lookups wait up to 60 s."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MooncakeCluster]:
    needs_mooncake()
    with own_network():
        cluster = MooncakeCluster(tmp_path)
        yield cluster
        cluster.end()


@pytest.fixture
def servers(cluster: MooncakeCluster) -> Iterator[list[ServerProcess]]:
    """Starts two servers in the network of the cluster. The harness's fork server is not in it."""
    tmp_path = cluster.directory
    options = f'master = "{MASTER}", deadline = "1s", log = "{tmp_path}/client.log"'
    config = f'[[tiers]]\ntype = "mooncake"\nname = "shared"\noptions = {{ {options} }}\n'
    servers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        servers.append(ServerProcess(tmp_path / name, region=32 * MIB, config=config, prefix=["env"]).start())
    with servers[0], servers[1]:
        yield servers


def load(client: Client, keys: list[bytes]) -> int:
    """Returns how many blocks were loaded, and checks their bytes."""
    buffers = [bytearray(PART) for _ in keys]
    started = time.monotonic()
    count = client.load(keys, buffers, wait=60.0)
    assert time.monotonic() - started < GENEROUS_SECONDS
    for key, buffer in list(zip(keys, buffers, strict=True))[:count]:
        assert bytes(buffer) == bytes(payload(key, PART))
    return count


def client_processes(server: ServerProcess) -> list[int]:
    """Returns the processes of Mooncake's client that a server has started."""
    tasks = Path(f"/proc/{server.pid}/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in children if b"mooncake_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _is_running(pid: int) -> bool:
    try:
        # Empty after the end, until the process is reaped.
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_servers_start_without_the_store_and_lose_it(cluster: MooncakeCluster, servers: list[ServerProcess]) -> None:
    """A block of one server is loaded by the other. A killed store causes misses and no error."""
    first, second = servers
    with (
        Client(first.endpoint, namespace=NAMESPACE) as one,
        Client(second.endpoint, namespace=NAMESPACE) as other,
    ):
        assert load(other, KEYS) == 0
        wait_until(lambda: not second.tier("shared").healthy)
        cluster.start()
        wait_until(lambda: first.tier("shared").healthy and second.tier("shared").healthy)
        one.store(KEYS, [payload(key, PART) for key in KEYS])
        wait_until(lambda: load(other, KEYS[:16]) == 16)
        assert second.tier("shared").loaded_bytes == 16 * PART
        loaded: list[int] = []
        reader = threading.Thread(target=lambda: loaded.extend(load(other, [key]) for key in KEYS[16:]))
        reader.start()
        wait_until(lambda: bool(loaded))
        cluster.kill()
        reader.join()
        assert len(loaded) == 16
        assert load(one, KEYS) == len(KEYS), "the CPU tier of the first server still has the blocks"
        wait_until(lambda: not second.tier("shared").healthy)
        cluster.start()
        wait_until(lambda: first.tier("shared").healthy and second.tier("shared").healthy)
        new = [key_of(number) for number in range(100, 104)]
        other.store(new, [payload(key, PART) for key in new])
        wait_until(lambda: load(one, new) == len(new))


def test_the_client_process_ends_with_its_server(cluster: MooncakeCluster, servers: list[ServerProcess]) -> None:
    """Also if the server is killed."""
    cluster.start()
    first, second = servers
    wait_until(lambda: client_processes(first) and client_processes(second))
    pids = client_processes(first) + client_processes(second)
    assert len(pids) == 2
    first.kill()
    second.terminate()
    wait_until(lambda: not any(map(_is_running, pids)))
