"""Packed lists of numbers: little-endian unsigned 64-bit, as the `…_offsets` fields carry them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

__all__ = ["pack_offsets", "unpack_offsets"]


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
