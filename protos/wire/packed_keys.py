"""Codecs of lists in one `bytes` field: keys of equal length, and offsets.

An offset is a little-endian unsigned 64-bit number, as in the `…_offsets` fields.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable

__all__ = ["pack_offsets", "unpack_keys", "unpack_offsets"]

_AT_ONCE = 256


def unpack_keys(packed: bytes, key_bytes: int) -> list[bytes]:
    """Splits keys of `key_bytes` each. Raises ValueError if the length does not match."""
    if key_bytes < 1 or len(packed) % key_bytes:
        raise ValueError(f"{len(packed)} bytes are not a multiple of the key length {key_bytes}")
    number = len(packed) // key_bytes
    many = number - number % _AT_ONCE
    keys: list[bytes] = []
    # `struct.unpack` would keep every format in a cache. A format of 65,536 keys takes 6 ms.
    if many:
        for part in struct.Struct(f"{key_bytes}s" * _AT_ONCE).iter_unpack(memoryview(packed)[: many * key_bytes]):
            keys += part
    keys += struct.Struct(f"{key_bytes}s" * (number - many)).unpack_from(packed, many * key_bytes)
    return keys


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
