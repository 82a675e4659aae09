"""Codecs of packed keys and offsets."""

import pytest

from kvtier.protos.wire.packed_keys import pack_offsets, unpack_keys, unpack_offsets


@pytest.mark.parametrize("number", [0, 1, 255, 256, 257, 512, 1000])
def test_keys_are_unpacked(number: int) -> None:
    """In order, whether or not their number is a multiple of the keys that are unpacked at once."""
    keys = [b"%07d" % each for each in range(number)]
    assert unpack_keys(b"".join(keys), 7) == keys
    with pytest.raises(ValueError, match="not a multiple"):
        unpack_keys(b"".join(keys) + b"x", 7)


def test_offsets_are_unpacked() -> None:
    offsets = [0, 1, 2**64 - 1]
    assert unpack_offsets(pack_offsets(offsets)) == offsets
