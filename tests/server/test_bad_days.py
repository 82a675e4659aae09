"""Full disks, damaged files and missing descriptors: the tier degrades and reports it.

Others work.
"""

from __future__ import annotations

import random
import resource
import socket
import threading
import time
from pathlib import Path

import pytest
from harness.payloads import assert_serves, filled, is_payload, key_of, namespace_of, payload
from harness.polling import polls, stays, wait_until
from harness.raw import attach_reply
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, DurableStatus, StoreStatus, Unavailable
from kvtier.client.errors import KVTierError

PART = 256 << 10
NAMESPACE = namespace_of(PART)
UNLIMITED = resource.RLIM_INFINITY


def keys_of(count: int, salt: str) -> list[bytes]:
    """Returns keys that no other call returns."""
    return [key_of(number, salt=salt) for number in range(count)]


def store(client: Client, keys: list[bytes]) -> None:
    """Stores blocks, all of which must fit into the CPU tier."""
    assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}


def file_of(server: ServerProcess) -> Path:
    return server.data_dir / "lmdb" / "data.mdb"


def test_a_full_disk_costs_durability_only(tmp_path: Path) -> None:
    """With a full disk the CPU tier still stores, the status reports it, and durable blocks stay.

    Once the disk has space again, blocks become durable again.
    """
    before, during, after = keys_of(32, "before"), keys_of(32, "during"), keys_of(32, "after")
    with ServerProcess(tmp_path) as server, Client(server.start().endpoint, namespace=NAMESPACE) as client:
        store(client, before)
        assert set(client.flush(before)) == {DurableStatus.DURABLE}
        server.limit(resource.RLIMIT_FSIZE, file_of(server).stat().st_size + PART)
        store(client, during)
        began = time.monotonic()
        assert set(client.flush(during, wait=30)) == {DurableStatus.VOLATILE}
        assert time.monotonic() - began < 25, "the flush waited although the disk is full"
        tier = server.tier("lmdb")
        assert not tier.healthy
        assert "cannot store" in tier.trouble
        assert_serves(client, [*before, *during])
        assert set(client.flush(before)) == {DurableStatus.DURABLE}
        server.limit(resource.RLIMIT_FSIZE, UNLIMITED)
        store(client, after)
        assert set(client.flush([*during, *after])) == {DurableStatus.DURABLE}
        assert server.tier("lmdb").healthy
        server.restart()
        read_when_back(server, client, [*before, *during, *after])


def test_a_kill_during_a_full_disk_loses_no_durable_block(tmp_path: Path) -> None:
    """The restarted server serves no wrong bytes."""
    before, during = keys_of(32, "before"), keys_of(32, "during")
    with ServerProcess(tmp_path) as server, Client(server.start().endpoint, namespace=NAMESPACE) as client:
        store(client, before)
        assert set(client.flush(before)) == {DurableStatus.DURABLE}
        server.limit(resource.RLIMIT_FSIZE, file_of(server).stat().st_size)
        store(client, during)
        client.flush(during, wait=0.5)
        server.restart()
        read_when_back(server, client, before)
        buffers = filled(len(during), PART)
        hits = client.load(during, buffers, wait=2)
        assert all(is_payload(key, found) for key, found in zip(during[:hits], buffers, strict=False))


def test_a_destroyed_file_is_reported(tmp_path: Path) -> None:
    """The server starts with an empty tier, reports it in log and status, and serves."""
    keys = keys_of(32, "a")
    with ServerProcess(tmp_path) as server, Client(server.start().endpoint, namespace=NAMESPACE) as client:
        store(client, keys)
        assert set(client.flush(keys)) == {DurableStatus.DURABLE}
        server.kill()
        with file_of(server).open("r+b") as file:
            file.write(random.Random(1).randbytes(3 * 4096))
        server.start()
        tier = server.tier("lmdb")
        assert "damaged" in tier.trouble
        wait_until(lambda: "damaged" in server.log)
        assert not tier.healthy
        assert (server.data_dir / "lmdb" / "damaged-1" / "data.mdb").exists()
        wait_until_back(server, client)
        assert client.lookup(keys).prefix_hits == 0
        store(client, keys)
        assert set(client.flush(keys)) == {DurableStatus.DURABLE}
        server.restart()
        read_when_back(server, client, keys)
        assert server.tier("lmdb").healthy


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_cause_no_wrong_block(tmp_path: Path, seed: int) -> None:
    """The bytes of the LMDB file change between two runs.

    The server starts and serves intact blocks only.
    """
    keys = keys_of(64, "a")
    rng = random.Random(seed)
    with ServerProcess(tmp_path) as server, Client(server.start().endpoint, namespace=NAMESPACE) as client:
        store(client, keys)
        assert set(client.flush(keys)) == {DurableStatus.DURABLE}
        server.kill()
        size = file_of(server).stat().st_size
        with file_of(server).open("r+b") as file:
            for _ in range(16):
                file.seek(rng.randrange(2 * 4096, size - 64))
                file.write(rng.randbytes(64))
        server.start()
        wait_until_back(server, client)
        found = 0
        for key in keys:
            buffers = filled(1, PART)
            if client.load([key], buffers, wait=2):
                assert is_payload(key, buffers[0])
                found += 1
        print(f"{found} of {len(keys)} blocks survived")
        assert found < len(keys)
        # The others are stored again.
        client.store(keys, [payload(key, PART) for key in keys])
        assert set(client.flush(keys)) == {DurableStatus.DURABLE}
        assert_serves(client, keys)


def test_a_removed_data_directory_costs_durability_only(tmp_path: Path) -> None:
    """The directory is removed while the server runs; durability is lost at the restart."""
    keys = keys_of(16, "a")
    with ServerProcess(tmp_path) as server, Client(server.start().endpoint, namespace=NAMESPACE) as client:
        store(client, keys)
        client.flush(keys)
        for path in (server.data_dir / "lmdb").iterdir():
            path.unlink()
        (server.data_dir / "lmdb").rmdir()
        more = keys_of(16, "b")
        store(client, more)
        assert_serves(client, [*keys, *more])
        server.restart()
        wait_until_back(server, client)
        assert client.lookup(keys).prefix_hits == 0
        store(client, keys)
        assert_serves(client, keys)


def test_new_clients_are_refused_without_descriptors(tmp_path: Path) -> None:
    """Connected clients are served, and new ones are accepted once descriptors are free."""
    keys = keys_of(16, "a")
    with ServerProcess(tmp_path) as server, Client(server.start().endpoint, namespace=NAMESPACE) as client:
        store(client, keys)
        path = f"{server.path}.shm"
        server.limit(resource.RLIMIT_NOFILE, server.descriptors() + 8)
        idle = []
        for _ in range(40):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(path)
            idle.append(connection)
        stays(lambda: assert_serves(client, keys) is None, 0.3)
        store(client, keys_of(16, "b"))
        assert set(client.flush(keys)) == {DurableStatus.DURABLE}
        late = Client(server.endpoint, namespace=NAMESPACE, name="late")
        with late:
            with pytest.raises(Unavailable):
                late.wait_until_connected(0.3)
            assert_serves(client, keys)
            for connection in idle:
                connection.close()
            wait_until(lambda: late.connected)
            assert_serves(late, keys)
            with Client(server.endpoint, namespace=NAMESPACE, transport="shm") as fresh:
                wait_until(lambda: fresh.connected)
                assert_serves(fresh, keys)
        assert attach_reply(path, client._transport.session.ref) == 64 * MIB  # type: ignore[union-attr]


def test_terminate_under_load(tmp_path: Path) -> None:
    """The server ends in time, all stored blocks are on disk, and no socket or process is left."""
    stored: list[bytes] = []
    over = threading.Event()
    with ServerProcess(tmp_path) as server, Client(server.start().endpoint, namespace=NAMESPACE) as client:

        def run() -> None:
            # No more than the LMDB tier may queue: further blocks would be dropped.
            for number, _ in zip(range(0, 64, 2), polls(), strict=False):
                if number == 62:
                    over.wait(60)
                keys = [key_of(number + i, salt="t") for i in range(2)]
                try:
                    store(client, keys)
                except KVTierError:
                    return
                stored.extend(keys)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: len(stored) >= 16)
        began = time.monotonic()
        assert server.terminate() == 0
        over.set()
        print(f"{len(stored)} blocks stored; ended {time.monotonic() - began:.2f} s after SIGTERM")
        thread.join()
        assert 0 < len(stored) < 64
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("s")]
        server.start()
        read_when_back(server, client, stored)


def wait_until_back(server: ServerProcess, client: Client) -> None:
    """Waits until the client has reconnected.

    It may not have noticed the end of the previous run yet.
    """
    wait_until(lambda: client.epoch == server.status().epoch)


def read_when_back(server: ServerProcess, client: Client, keys: list[bytes]) -> None:
    """Waits until the client has reconnected, then reads all blocks."""
    wait_until_back(server, client)
    assert_serves(client, keys)
