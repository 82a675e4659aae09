"""Packed lists, each in one field of bytes: of keys that are of one length, and of numbers.

Numbers are little-endian unsigned 64-bit, as the `…_offsets` fields carry them.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable

__all__ = ["pack_offsets", "unpack_keys", "unpack_offsets"]


def unpack_keys(packed: bytes, key_bytes: int) -> list[bytes]:
    """Returns the keys, of so many bytes each, that lie one behind the other.

    Raises:
        ValueError: they do not fill it.
    """
    if key_bytes < 1 or len(packed) % key_bytes:
        raise ValueError(f"{len(packed)} bytes are no keys of {key_bytes}")
    # `Struct` and not `struct.unpack`, which would keep the format.
    return list(struct.Struct(f"{key_bytes}s" * (len(packed) // key_bytes)).unpack(packed))


def pack_offsets(offsets: Iterable[int]) -> bytes:
    """Returns the packed form."""
    numbers = array("Q", offsets)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack_offsets(packed: bytes) -> list[int]:
    """Returns the numbers.

    Raises:
        ValueError: the length is not a multiple of eight bytes.
    """
    numbers = array("Q")
    numbers.frombytes(packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
