"""Codecs of lists in one `bytes` field: keys of equal length, and offsets.

An offset is a little-endian unsigned 64-bit number, as in the `…_offsets` fields.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable

__all__ = ["pack_offsets", "unpack_keys", "unpack_offsets"]


def unpack_keys(packed: bytes, key_bytes: int) -> list[bytes]:
    """Splits keys of `key_bytes` each. Raises ValueError if the length does not match."""
    if key_bytes < 1 or len(packed) % key_bytes:
        raise ValueError(f"{len(packed)} bytes are not a multiple of the key length {key_bytes}")
    # `struct.unpack` would keep every format in a cache.
    return list(struct.Struct(f"{key_bytes}s" * (len(packed) // key_bytes)).unpack(packed))


def pack_offsets(offsets: Iterable[int]) -> bytes:
    numbers = array("Q", offsets)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack_offsets(packed: bytes) -> list[int]:
    """Returns the offsets. Raises ValueError if the length is not a multiple of eight bytes."""
    numbers = array("Q")
    numbers.frombytes(packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
