"""Keys of a request: packed before the call, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from contracts.cache_client import new_keys

from kvtier.client import InvalidRequest, make_key
from kvtier.client.operations.arguments import packed
from kvtier.protos.wire.packed_keys import unpack_key_list

KEYS = new_keys(3)


@pytest.mark.parametrize("keys", [KEYS, [], [*KEYS, make_key(b"short", 0)], [b"", b"key"]])
def test_keys_are_packed(keys: list[bytes]) -> None:
    """Also keys of different lengths, and keys that the server will refuse."""
    assert unpack_key_list(packed(keys)) == keys


@pytest.mark.parametrize(
    "keys", [["text", "more"], [1, 2], [memoryview(b"1234").cast("H")] * 2, [b"key", bytes(1 << 16)], None]
)
def test_invalid_keys(keys: Any) -> None:
    """They are refused before the call."""
    with pytest.raises(InvalidRequest):
        packed(keys)
