"""Packed keys: used if the server supports them, and if all keys have one length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contracts.cache_client import NAMESPACE, SMALL, new_keys
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, InvalidRequest, KeyStatus, make_key
from kvtier.client.operations.base import key_fields
from kvtier.protos.v1 import common_pb2

KEYS = new_keys(3)


def fields_for(keys: Sequence[Any], *, taken: bool = True) -> dict[str, Any]:
    """Returns the key fields of a request, for a server with or without packed keys."""
    return key_fields(SimpleNamespace(packs_keys=taken), keys)  # type: ignore[arg-type]


def test_keys_of_one_length_are_packed() -> None:
    """In one field."""
    assert fields_for(KEYS) == {"packed_keys": common_pb2.PackedKeys(keys=b"".join(KEYS), key_bytes=len(KEYS[0]))}


@pytest.mark.parametrize(
    ("keys", "taken"), [(KEYS, False), ([], True), ([*KEYS, make_key(b"short", 0)], True), ([b"", b""], True)]
)
def test_other_keys_are_not_packed(keys: list[bytes], *, taken: bool) -> None:
    """For servers without packed keys, for different lengths, and for keys that will be refused."""
    assert fields_for(keys, taken=taken) == {"keys": keys}


@pytest.mark.parametrize("keys", [["text", "more"], [1, 2], [memoryview(b"1234").cast("H")] * 2])
def test_invalid_keys(keys: list[Any]) -> None:
    """They are refused before the call."""
    with pytest.raises(InvalidRequest):
        fields_for(keys)


@pytest.mark.parametrize("taken", [True, False])
def test_packed_and_single_keys_are_equivalent(tmp_path: Path, *, taken: bool) -> None:
    """A block stored by a client without packed keys is found by one with them, and vice versa."""
    with (
        ServerProcess(tmp_path, region=128 * MIB).start() as server,
        Client(server.endpoint, namespace=NAMESPACE) as one,
        Client(server.endpoint, namespace=NAMESPACE) as other,
    ):
        for client, packs in ((one, taken), (other, not taken)):
            client.wait_until_connected(60)
            session = client._transport.session
            assert session.packs_keys
            session.packs_keys = packs
        one.store(KEYS, [bytes([number]) * SMALL for number in range(3)])
        with other.begin_request("r", KEYS) as lease:
            assert set(lease.statuses) == {KeyStatus.HIT}
        buffers = [bytearray(SMALL) for _ in KEYS]
        assert other.load(KEYS, buffers) == 3
        assert [buffer[0] for buffer in buffers] == [0, 1, 2]
