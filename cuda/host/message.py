"""Message assembly from memory ranges, and scattering of payloads into ranges, with a single copy.

Long copies run without the GIL. `bytes.join` would hold the GIL during the whole copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

from .copy import address_of, copy_batch

__all__ = ["assemble", "scatter"]

_CHECKSUM_BYTES = 8

# `pythonapi["name"]` is a new object, so its `argtypes` can be set. The object `pythonapi.name` is
# shared with other libraries.
_new_bytes = ctypes.pythonapi["PyBytes_FromStringAndSize"]
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_new_bytes.restype = ctypes.py_object


def assemble(head: bytes, checksum_at: int, addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Returns `head` followed by `sizes[i]` bytes from each of `addresses`, as one new object.

    The xxh3-64 of the payload is written into the head: 8 bytes, little-endian, at `checksum_at`.
    The checksum is computed from the copy. So it matches the message even if the source changes
    meanwhile. The caller keeps the memory mapped until the call returns.
    """
    total = sum(sizes)
    # The C API permits writing to a new bytes object before other code refers to it.
    message: bytes = _new_bytes(None, len(head) + total)
    start, _ = address_of(message)
    ctypes.memmove(start, head, len(head))
    position = start + len(head)
    destinations = []
    for size in sizes:
        destinations.append(position)
        position += size
    copy_batch(destinations, addresses, sizes)
    checksum = xxhash.xxh3_64_intdigest(memoryview(message)[len(head) :])
    ctypes.memmove(start + checksum_at, checksum.to_bytes(_CHECKSUM_BYTES, "little"), _CHECKSUM_BYTES)
    return message


def scatter(payload: memoryview, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Copies `sizes[i]` bytes of the payload to `addresses[i]`, for all i, in this order.

    Raises `ValueError` if the sum of the sizes is not the payload's size.
    """
    position, nbytes = address_of(payload)
    if nbytes != sum(sizes):
        raise ValueError(f"the payload has {nbytes} bytes, but its destinations have {sum(sizes)}")
    sources = []
    for size in sizes:
        sources.append(position)
        position += size
    copy_batch(addresses, sources, sizes)
