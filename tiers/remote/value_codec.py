"""Names and values of blocks in a remote store.

A name is `kvtier/FORMAT/TENANT/NAMESPACE/KEY`, all in hexadecimal except the format. The tenant is
the tag at the start of a namespace id, so permissions of a store can be given per tenant. Servers
of another format do not see each other's values. This module is the `ValueCodec` of format 1;
`encryption.py` has format 2.

A value of format 1 is a header and the parts of the block:

| bytes | meaning |
|---|---|
| 4 | magic number with the format |
| 4 | number of parts |
| 8 | checksum of namespace, key and parts (`block_checksum`) |
| 8 each | size of each part |

All numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Protocol

from ..base import BlockBytes, NamespaceId, Outcome
from ..storage.buffers import copy_from, writable_address_of
from ..storage.checksum import block_checksum
from ..types import TENANT_TAG_BYTES

__all__ = ["ValueCodec", "can_store", "decode", "encode", "is_name", "name_of", "value_bytes"]

FORMAT = 1
_MAGIC = b"kvt" + bytes([FORMAT])
_HEADER = struct.Struct("<4sIQ")
_NAMESPACE_BYTES = 16
_MAX_KEY_BYTES = 1024


class ValueCodec(Protocol):
    """Codec of the values of one format. Thread-safe."""

    def name_of(self, namespace: NamespaceId, key: bytes, /) -> bytes:
        """Returns the name of a block in the store. It contains the format."""
        ...

    def can_store(self, namespace: NamespaceId, /) -> bool:
        """Returns whether values of this namespace can be encoded."""
        ...

    def value_bytes(self, block: BlockBytes, /) -> int:
        """Returns the size of a block's value."""
        ...

    def encode(self, block: BlockBytes, value: memoryview, /) -> None:
        """Writes a block's value into a buffer of exactly `value_bytes`. Raises `TierError`."""
        ...

    def decode(self, value: memoryview, block: BlockBytes, /) -> Outcome:
        """Fills the parts of a block from a value. Changes nothing in the value.

        Returns CORRUPT if the value is not the block's: it may be deleted. Returns MISSING if
        only other servers can tell.
        """
        ...


def is_name(namespace: NamespaceId, key: bytes) -> bool:
    return len(namespace) == _NAMESPACE_BYTES and 0 < len(key) <= _MAX_KEY_BYTES


def name_of(namespace: NamespaceId, key: bytes, value_format: int = FORMAT) -> bytes:
    tenant, rest = namespace[:TENANT_TAG_BYTES], namespace[TENANT_TAG_BYTES:]
    return f"kvtier/{value_format}/{tenant.hex()}/{rest.hex()}/{key.hex()}".encode()


def can_store(_namespace: NamespaceId) -> bool:
    return True


def value_bytes(block: BlockBytes) -> int:
    return _HEADER.size + 8 * len(block.parts) + block.nbytes


def encode(block: BlockBytes, value: memoryview) -> None:
    parts = block.parts
    _HEADER.pack_into(value, 0, _MAGIC, len(parts), block_checksum(block.namespace, block.key, parts))
    struct.pack_into(f"<{len(parts)}Q", value, _HEADER.size, *(part.nbytes for part in parts))
    at = _HEADER.size + 8 * len(parts)
    for part in parts:
        if part.nbytes:
            copy_from(writable_address_of(value[at : at + part.nbytes]), part)
            at += part.nbytes


def decode(value: memoryview, block: BlockBytes) -> Outcome:
    sizes = [part.nbytes for part in block.parts]
    if value.nbytes != value_bytes(block):
        return Outcome.CORRUPT
    magic, count, checksum = _HEADER.unpack_from(value)
    if magic != _MAGIC or count != len(sizes):
        return Outcome.CORRUPT
    if list(struct.unpack_from(f"<{count}Q", value, _HEADER.size)) != sizes:
        return Outcome.CORRUPT
    at, stored = _HEADER.size + 8 * count, []
    for size in sizes:
        stored.append(value[at : at + size])
        at += size
    if block_checksum(block.namespace, block.key, tuple(stored)) != checksum:
        return Outcome.CORRUPT
    for part, source in zip(block.parts, stored, strict=True):
        if part.nbytes:
            copy_from(writable_address_of(part), source)
    return Outcome.DONE
