"""A server that names memory outside of its region. The copies of a client check no addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, ServerError
from kvtier.client.operations import loads, stores
from kvtier.protos.wire.packed_keys import unpack_offsets

PART = 16 << 10
KEYS = [key_of(number) for number in range(4)]
DATA = [payload(key, PART) for key in KEYS]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client that maps the region, whose server has the blocks `KEYS`."""
    directory: Path = tmp_path_factory.mktemp("s")
    with (
        ServerProcess(directory, region=16 * MIB).start() as server,
        Client(server.endpoint, namespace=namespace_of(PART), transport="shm") as client,
    ):
        client.wait_until_connected(60)
        client.store(KEYS, DATA)
        yield client


def beyond(offsets: Any) -> list[int]:
    return [*unpack_offsets(offsets)[:-1], 16 * MIB - PART + 1]


def too_few(offsets: Any) -> list[int]:
    return unpack_offsets(offsets)[:-1]


@pytest.mark.parametrize("lie", [beyond, too_few])
def test_slots_of_a_store(client: Client, monkeypatch: pytest.MonkeyPatch, lie: Any) -> None:
    """The client writes nothing, and the store is not completed."""
    keys: Sequence[bytes] = [key_of(number, salt=lie.__name__) for number in range(4)]
    monkeypatch.setattr(stores, "unpack_offsets", lie)
    with pytest.raises(ServerError, match="slots"):
        client.store(keys, DATA)
    with client.lookup(keys) as lease:
        assert not lease.prefix_hits


@pytest.mark.parametrize("lie", [beyond, too_few, lambda _: [PART + 1] * 4])
def test_slots_and_sizes_of_a_load(client: Client, monkeypatch: pytest.MonkeyPatch, lie: Any) -> None:
    with client.lookup(KEYS) as lease:
        monkeypatch.setattr(loads, "unpack_offsets", lie)
        with pytest.raises(ServerError, match=r"slots|sizes"), client.read(lease.id, range(4)):
            pass
