"""Codecs of lists in one field."""

from __future__ import annotations

from struct import Struct
from types import SimpleNamespace

import pytest

from kvtier.protos.v1.common_pb2 import PackedKeys
from kvtier.protos.wire import packed_keys
from kvtier.protos.wire.packed_keys import (
    count_keys,
    pack_keys,
    pack_offsets,
    slices_of_keys,
    unpack_key_list,
    unpack_keys,
    unpack_offsets,
)

ONE_LENGTH = [bytes([number % 256]) * 7 for number in range(600)]


@pytest.mark.parametrize("keys", [ONE_LENGTH, [*ONE_LENGTH, b"longer than 7"], [b"a", b""], [b""], []])
@pytest.mark.parametrize("most", [1, 256, 1000])
def test_keys_survive_packing(keys: list[bytes], most: int) -> None:
    """One length for all keys costs no byte per key. The slices have at most `most` keys."""
    packed = pack_keys(keys)
    slices = list(slices_of_keys(packed, most))
    assert [key for _, part in slices for key in part] == unpack_key_list(packed) == keys
    assert all(0 < len(part) <= most and joined == b"".join(part) for joined, part in slices)
    assert count_keys(packed) == len(keys)
    assert bool(packed.lengths) == (len(set(map(len, keys))) > 1 or keys == [b""])


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(PackedKeys(keys=b"keys"), id="without a length"),
        pytest.param(PackedKeys(keys=b"keys", key_bytes=3), id="cut off"),
        pytest.param(PackedKeys(keys=b"keys", key_bytes=2**32 - 1), id="shorter than one key"),
        pytest.param(PackedKeys(keys=b"keys", key_bytes=2, lengths=b"\2\0\2\0"), id="both lengths"),
        pytest.param(PackedKeys(keys=b"keys", lengths=b"\4"), id="half a length"),
        pytest.param(PackedKeys(keys=b"keys", lengths=b"\2\0\1\0"), id="lengths of fewer bytes"),
        pytest.param(PackedKeys(keys=b"keys", lengths=b"\2\0\3\0"), id="lengths of more bytes"),
    ],
)
def test_malformed_keys_are_refused(packed: PackedKeys) -> None:
    with pytest.raises(ValueError, match=r"bytes|only one"):
        unpack_key_list(packed)


def test_formats_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send keys of any length and number. They do not use memory after the call."""
    made: list[str] = []
    monkeypatch.setattr(packed_keys, "struct", SimpleNamespace(Struct=lambda form: made.append(form) or Struct(form)))
    packed_keys._format.cache_clear()
    for _ in range(3):
        assert unpack_keys(b"abcdef" * 300, 6) == [b"abcdef"] * 300
    assert sorted(map(len, made)) == [2 * 44, 2 * 256]
    for length in range(1, 2000):
        assert len(unpack_keys(bytes(length * 5), length)) == 5
    assert packed_keys._format.cache_info().currsize <= 64


def test_offsets_survive_packing() -> None:
    assert unpack_offsets(pack_offsets([0, 2**64 - 1])) == [0, 2**64 - 1]
    with pytest.raises(ValueError, match=r"bytes|only one"):
        unpack_offsets(b"7 bytes")
