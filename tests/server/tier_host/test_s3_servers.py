"""Two servers, each with its own CPU tier, at one SeaweedFS server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.seaweed import SeaweedServer, needs_seaweed
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client

pytestmark = pytest.mark.remote

PART = 256 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(32)]


@pytest.fixture
def seaweed(tmp_path: Path) -> Iterator[SeaweedServer]:
    needs_seaweed()
    server = SeaweedServer(tmp_path)
    server.start()
    yield server
    server.end()


def load(client: Client, keys: list[bytes]) -> int:
    """Returns how many blocks were loaded, and checks their bytes."""
    buffers = [bytearray(PART) for _ in keys]
    count = client.load(keys, buffers, wait=60.0)
    for key, buffer in list(zip(keys, buffers, strict=True))[:count]:
        assert bytes(buffer) == bytes(payload(key, PART))
    return count


def test_blocks_of_another_server_are_loaded(seaweed: SeaweedServer, tmp_path: Path) -> None:
    """Byte by byte. A killed store causes misses, and both servers go on."""
    options = "\n".join(f'{key} = "{value}"' for key, value in seaweed.options().items())
    config = f'[[tiers]]\ntype = "s3"\nname = "shared"\n[tiers.options]\ndeadline = "3s"\n{options}\n'
    servers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        servers.append(ServerProcess(tmp_path / name, region=32 * MIB, config=config).start())
    first, second = servers
    with (
        first,
        second,
        Client(first.endpoint, namespace=NAMESPACE) as one,
        Client(second.endpoint, namespace=NAMESPACE) as other,
    ):
        assert load(other, KEYS) == 0
        for key in KEYS:
            one.store([key], [payload(key, PART)])
        wait_until(lambda: load(other, KEYS[:24]) == 24)
        assert second.tier("shared").hits == 24
        assert len(seaweed.paths()) < len(KEYS) // 2, "single blocks become packs"
        seaweed.kill()
        assert load(other, KEYS[24:]) == 0
        assert load(one, KEYS) == len(KEYS), "the CPU tier of the first server still has the blocks"
        wait_until(lambda: not second.tier("shared").healthy)
        seaweed.start()
        wait_until(lambda: first.tier("shared").healthy and second.tier("shared").healthy)
        new = [key_of(number) for number in range(100, 104)]
        other.store(new, [payload(key, PART) for key in new])
        wait_until(lambda: load(one, new) == len(new))


def test_a_stop_stores_the_blocks_that_wait_for_others(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "bucket").mkdir()
    config = f'[[tiers]]\ntype = "s3"\noptions = {{ url = "file://{tmp_path}/bucket" }}\n'
    with ServerProcess(tmp_path, region=32 * MIB, config=config).start() as server:
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            client.store(KEYS[:1], [payload(KEYS[0], PART)])
        assert server.terminate() == 0
        assert any(path.is_file() for path in (tmp_path / "bucket").rglob("*"))
