"""Two servers share a directory, as on a network file system, and find each other's blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, InvalidRequest, KeyStatus, Medium, TierFilter

PART = 64 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(8)]
TESTS = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ServerProcess]:
    """Returns a function that starts a server with the shared tier and an LMDB tier of its own."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    config = (
        '[[tiers]]\ntype = "harness.shared_tier:SharedDirectory"\nname = "shared"\nsize = "64MiB"\n'
        f'path = "{tmp_path}/shared"\noptions = {{ delay_seconds = 0.2 }}\n'
    )

    def make(name: str) -> ServerProcess:
        (tmp_path / name).mkdir()
        return ServerProcess(tmp_path / name, region=16 * MIB, config=config).start()

    return make


def test_blocks_of_another_server_are_found(start: Callable[[str], ServerProcess]) -> None:
    """B3.15, B3.17: a waiting lookup gets the blocks.

    Another gets RETRY at once, and the blocks later.
    """
    with start("a") as first, start("b") as second:
        with Client(first.endpoint, namespace=NAMESPACE) as client:
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            client.flush(KEYS, wait=30)
            wait_for_files(first, len(KEYS))
        with Client(second.endpoint, namespace=NAMESPACE) as client:
            with client.lookup(KEYS[:4]) as lease:
                assert lease.statuses == bytes([KeyStatus.RETRY]) * 4
            with client.lookup(KEYS[:4], wait=30) as lease:
                assert lease.prefix_hits == 4
            buffers = [bytearray(PART) for _ in KEYS]
            assert client.load([*KEYS, key_of(99)], [*buffers, bytearray(PART)], wait=30) == len(KEYS)
            assert [bytes(buffer) for buffer in buffers] == [bytes(payload(key, PART)) for key in KEYS]


def test_a_lookup_can_leave_the_shared_tier_out(start: Callable[[str], ServerProcess]) -> None:
    """B3.15: by name, medium or locality; the tier is not asked, and the answer comes at once."""
    with start("a") as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        for without in (TierFilter(["shared"]), TierFilter(media=[Medium.NETWORK]), TierFilter(remote=True)):
            with client.lookup(KEYS, exclude=without, wait=30) as lease:
                assert lease.statuses == bytes([KeyStatus.MISS]) * len(KEYS)
        for name in ("shraed", "cpu"):
            with pytest.raises(InvalidRequest, match=name):
                client.lookup(KEYS, exclude=TierFilter([name]))
        with pytest.raises(InvalidRequest, match="cpu"):
            client.begin_request("r", KEYS, exclude=TierFilter(["cpu"]))


def wait_for_files(server: ServerProcess, count: int) -> None:
    directory = server.directory.parent / "shared"
    wait_until(lambda: len([file for file in directory.iterdir() if file.suffix != ".new"]) >= count)
