"""A server whose disk is really full: a small file system under its data directory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess
from harness.traffic import wait_connected

from kvtier.client import Client, DurableStatus, StoreStatus

PART = 256 << 10
NAMESPACE = namespace_of(PART)
BEFORE, DURING, AFTER = ([key_of(number, salt=salt) for number in range(32)] for salt in ("before", "during", "after"))


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """Yields a data directory on a file system of 16 MiB."""
    path = tmp_path / "data"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("kind", ["lmdb", "disk"])
def test_a_full_disk_recovers(data_dir: Path, kind: str) -> None:
    """The CPU tier serves, and all blocks become durable once there is space."""
    with ServerProcess(data_dir.parent, tier=kind) as server:
        server.start()
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            wait_connected(client)

            def store(keys: list[bytes]) -> None:
                statuses = client.store(keys, [payload(key, PART) for key in keys])
                assert set(statuses) == {StoreStatus.GRANTED}

            store(BEFORE)
            assert set(client.flush(BEFORE)) == {DurableStatus.DURABLE}
            store(DURING)
            store(AFTER)
            volatile = client.flush([*DURING, *AFTER], wait=5).count(DurableStatus.VOLATILE)
            assert volatile
            server.wait_for(lambda status: status.tiers[1].dropped_blocks >= volatile)

            def is_refused() -> bool:
                """Stores refused blocks again: the last ones can fit in space of evicted ones."""
                client.flush([*DURING, *AFTER], wait=0.1)
                status = server.tier(kind)
                return "cannot store" in status.trouble and not status.healthy

            wait_until(is_refused)
            assert_serves(client, [*BEFORE, *DURING, *AFTER])
            subprocess.run(["mount", "-o", "remount,size=64m", str(data_dir)], check=True)
            assert set(client.flush([*BEFORE, *DURING, *AFTER])) == {DurableStatus.DURABLE}
            assert server.tier(kind).healthy
            server.restart()
            epoch = server.status().epoch
            wait_until(lambda: client.epoch == epoch)
            assert_serves(client, [*BEFORE, *DURING, *AFTER])
            assert server.tier(kind).blocks == 96
        assert server.terminate() == 0
