"""Codecs of lists in one `bytes` field: keys, and offsets.

An offset is a little-endian unsigned 64-bit number, as in the `…_offsets` fields. The length of a
key is a little-endian unsigned 16-bit number.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from ..v1.common_pb2 import PackedKeys

__all__ = [
    "check_form",
    "count_keys",
    "offset_table",
    "pack_keys",
    "pack_offsets",
    "slices_of_keys",
    "unpack_key_list",
    "unpack_keys",
    "unpack_offsets",
]

_AT_ONCE = 256
_FORMATS = 64
"""Maximum number of kept formats. The sender chooses the length and number of the keys."""
_LENGTH_BYTES = 2


def pack_keys(keys: Sequence[bytes]) -> PackedKeys:
    """Raises TypeError, ValueError or OverflowError for values that are no keys."""
    joined, lengths = b"".join(keys), set(map(len, keys))
    if len(lengths) == 1 and (length := lengths.pop()):
        packed = PackedKeys(keys=joined, key_bytes=length)
        total = length * len(keys)
    else:
        numbers = array("H", map(len, keys))
        total = sum(numbers)
        packed = PackedKeys(keys=joined, lengths=_little_endian(numbers).tobytes())
    if len(joined) != total:
        raise ValueError("keys must be bytes, not views with larger items")
    return packed


def count_keys(packed: PackedKeys) -> int:
    """Returns the number of keys. If bytes are missing at the end, counts the last key too."""
    if packed.key_bytes:
        return -(-len(packed.keys) // packed.key_bytes)
    return -(-len(packed.lengths) // _LENGTH_BYTES)


def check_form(packed: PackedKeys) -> None:
    """Raises ValueError if the fields do not fit together. Does not add up `lengths`."""
    keys, key_bytes, lengths = packed.keys, packed.key_bytes, packed.lengths
    if key_bytes and lengths:
        raise ValueError("only one of key_bytes and lengths may be given")
    if key_bytes and len(keys) % key_bytes:
        raise ValueError(f"{len(keys)} bytes are not a multiple of the key length {key_bytes}")
    if len(lengths) % _LENGTH_BYTES:
        raise ValueError(f"lengths: {len(lengths)} bytes, but each length has {_LENGTH_BYTES}")
    if keys and not key_bytes and not lengths:
        raise ValueError(f"{len(keys)} bytes of keys without key_bytes or lengths")


def slices_of_keys(packed: PackedKeys, most: int) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yields slices of at most `most` keys: their bytes, and the keys.

    Raises ValueError if the fields do not fit together. Finds only with the last slices that the
    lengths do not add up to the number of bytes.
    """
    check_form(packed)
    keys, key_bytes = packed.keys, packed.key_bytes
    if key_bytes:
        for start in range(0, len(keys), most * key_bytes):
            part = keys[start : start + most * key_bytes]
            yield part, unpack_keys(part, key_bytes)
        return
    lengths, end = _little_endian(array("H", packed.lengths)), 0
    for first in range(0, len(lengths), most):
        ends = list(accumulate(lengths[first : first + most], initial=end))
        end = ends[-1]
        if end > len(keys):
            break
        yield keys[ends[0] : end], [keys[start:stop] for start, stop in pairwise(ends)]
    if end != len(keys):
        raise ValueError(f"the keys have {len(keys)} bytes, but their lengths add up to another number")


def unpack_key_list(packed: PackedKeys) -> list[bytes]:
    """Returns the keys. Raises ValueError like `slices_of_keys`."""
    return [key for _, keys in slices_of_keys(packed, max(1, count_keys(packed))) for key in keys]


def unpack_keys(packed: bytes, key_bytes: int) -> list[bytes]:
    """Splits keys of `key_bytes` each. Raises ValueError if the length does not match."""
    if key_bytes < 1 or len(packed) % key_bytes:
        raise ValueError(f"{len(packed)} bytes are not a multiple of the key length {key_bytes}")
    number = len(packed) // key_bytes
    many = number - number % _AT_ONCE
    keys: list[bytes] = []
    if many:
        for part in _format(key_bytes, _AT_ONCE).iter_unpack(memoryview(packed)[: many * key_bytes]):
            keys += part
    keys += _format(key_bytes, number - many).unpack_from(packed, many * key_bytes)
    return keys


@lru_cache(_FORMATS)
def _format(key_bytes: int, number: int) -> struct.Struct:
    """Format of at most `_AT_ONCE` keys. Making it takes longer than unpacking the keys.

    It has 32 bytes for each key, so all kept formats have less than 0.6 MB.
    """
    return struct.Struct(f"{key_bytes}s" * number)


def pack_offsets(offsets: Iterable[int]) -> bytes:
    return _little_endian(array("Q", offsets)).tobytes()


def unpack_offsets(packed: bytes) -> list[int]:
    """Returns the offsets. Raises ValueError like `offset_table`."""
    return offset_table(packed).tolist()


def offset_table(packed: bytes) -> array[int]:
    """Returns the offsets. Raises ValueError if the length is not a multiple of eight bytes."""
    numbers = array("Q")
    numbers.frombytes(packed)
    return _little_endian(numbers)


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
