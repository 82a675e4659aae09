"""Reset of the CPU tier of a server that is in use."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, DurableStatus, KeyStatus

KEYS = [key_of(number) for number in range(4)]
HIT, MISS = bytes([KeyStatus.HIT]), bytes([KeyStatus.MISS])


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Yields a client of a server with a CPU and an LMDB tier."""
    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=namespace_of(MIB)) as client,
    ):
        client.wait_until_connected(60)
        yield client


def blocks_of(client: Client, tier: str) -> int:
    return next(status.blocks for status in client.status().tiers if status.name == tier)


def test_a_reset_waits_for_readers_and_keeps_secondary_tiers(client: Client) -> None:
    """B3.19, B4.13: while a lease exists, lookups miss.

    Then the CPU tier is empty, and LMDB still serves.
    """
    client.store(KEYS, [payload(key, MIB) for key in KEYS])
    assert set(client.flush(KEYS)) == {DurableStatus.DURABLE}
    lease = client.lookup(KEYS)
    assert client.reset() == 4
    assert client.lookup(KEYS).statuses == MISS * 4
    assert client.reset(wait=0.05) == 4, "not yet"
    with client.read(lease, [2]) as batch:
        assert bytes(batch.views()[0]) == bytes(payload(KEYS[2], MIB)), "the reader is not disturbed"
    done: list[int] = []
    waiting = threading.Thread(target=lambda: done.append(client.reset(wait=30)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    lease.release()
    waiting.join(60)
    assert done == [0]
    assert (blocks_of(client, "cpu"), blocks_of(client, "lmdb")) == (0, 4)
    with client.lookup(KEYS, wait=30) as found:
        assert found.statuses == HIT * 4
        assert set(found.sources) == {"lmdb"}
        with client.read(found, range(4)) as batch:
            assert [bytes(view) for view in batch.views()] == [bytes(payload(key, MIB)) for key in KEYS]


def test_a_store_during_a_reset_is_not_found_afterwards(client: Client) -> None:
    """B4.13: the writer completes normally; its block is in no tier and can be stored again."""
    with client.write(KEYS) as batch:
        for view, key in zip(batch.views(), KEYS, strict=True):
            view[:] = bytes(payload(key, MIB))
        assert client.reset() == 4, "not yet"
    assert client.reset(wait=30) == 0
    assert client.lookup(KEYS, wait=1).statuses == MISS * 4
    assert (blocks_of(client, "cpu"), blocks_of(client, "lmdb")) == (0, 0)
    client.store(KEYS, [payload(key, MIB) for key in KEYS])
    with client.lookup(KEYS) as found:
        assert found.statuses == HIT * 4
