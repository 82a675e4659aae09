"""Names and values of blocks in a remote store.

A name is `kvtier/FORMAT/TENANT/NAMESPACE/KEY`, all in hexadecimal except the format. The tenant is
the tag at the start of a namespace id, so permissions of a store can be given per tenant. Servers
of another format do not see each other's values. This module is the `ValueCodec` of format 3;
`encryption.py` has format 4. In formats 1 and 2 the tag has 4 bytes and the namespace id 16.

A value of format 3 is a header and the parts of the block:

| bytes | meaning |
|---|---|
| 4 | magic number with the format |
| 4 | number of parts |
| 8 | checksum of namespace, key and parts (`block_checksum`) |
| 8 each | size of each part |

An index of a pack (`pack_format`) has a seal of 12 bytes before its entries:

| bytes | meaning |
|---|---|
| 4 | magic number with the format |
| 8 | checksum of the entries, seeded with the name of the pack |

All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import xxhash

from ..secondary_tier import BlockBytes, NamespaceId, Outcome
from ..storage.checksum import block_checksum
from ..types import NAMESPACE_BYTES, TENANT_TAG_BYTES

__all__ = [
    "FORMAT",
    "INDEX_SEAL_BYTES",
    "MAX_KEY_BYTES",
    "ValueCodec",
    "can_store",
    "decode",
    "encode",
    "is_name",
    "known_keys",
    "name_of",
    "open_index",
    "pieces_of",
    "seal_index",
    "value_bytes",
]

FORMAT: int = 3
INDEX_SEAL_BYTES: int = 12
_MAGIC = b"kvt" + bytes([FORMAT])
_HEADER = struct.Struct("<4sIQ")
_INDEX_MAGIC = b"kvp" + bytes([FORMAT])
_SEAL = struct.Struct("<4sQ")
MAX_KEY_BYTES = 1024


class ValueCodec(Protocol):
    """Codec of the values of one format. Thread-safe."""

    FORMAT: int
    """Part of the names of values, so that servers of another format do not see them."""
    INDEX_SEAL_BYTES: int
    """Bytes that `seal_index` adds."""

    def can_store(self, namespace: NamespaceId, /) -> bool:
        """Returns whether values of this namespace can be encoded and decoded."""
        ...

    def known_keys(self) -> object:
        """Returns the keys with which values can be decoded; None if none are needed."""
        ...

    def value_bytes(self, block: BlockBytes, /) -> int:
        """Returns the size of a block's value."""
        ...

    def encode(self, block: BlockBytes, /) -> list[bytes | memoryview]:
        """Returns the pieces of a block's value, which may be the parts. Raises `TierError`."""
        ...

    def pieces_of(self, block: BlockBytes, /) -> list[memoryview]:
        """Returns memory of `value_bytes` that receives a block's value, which may be the parts."""
        ...

    def decode(self, pieces: Sequence[memoryview], nbytes: int, block: BlockBytes, /) -> Outcome:
        """Fills the parts of a block from a value of `nbytes`. Changes nothing in the value.

        `pieces` has the value: what `pieces_of` returned for the block, or for a larger value one
        piece. Returns DONE, and only then the parts have the block. Returns CORRUPT if the value
        is not the block's: it may be deleted. Returns MISSING if only other servers can tell.
        """
        ...

    def seal_index(self, namespace: NamespaceId, path: str, entries: bytes, /) -> bytes:
        """Returns the index of a pack with this path. Raises `TierError`."""
        ...

    def open_index(self, namespace: NamespaceId, path: str, index: bytes, /) -> bytes | None:
        """Returns the entries of an index; None if only other servers can read it.

        Raises ValueError if it is not the index of this pack.
        """
        ...


def is_name(namespace: NamespaceId, key: bytes) -> bool:
    return len(namespace) == NAMESPACE_BYTES and 0 < len(key) <= MAX_KEY_BYTES


def name_of(namespace: NamespaceId, key: bytes, value_format: int = FORMAT) -> bytes:
    """Returns the name of a block in the store."""
    tenant, rest = namespace[:TENANT_TAG_BYTES], namespace[TENANT_TAG_BYTES:]
    return f"kvtier/{value_format}/{tenant.hex()}/{rest.hex()}/{key.hex()}".encode()


def can_store(_namespace: NamespaceId) -> bool:
    return True


def known_keys() -> None:
    return None


def value_bytes(block: BlockBytes) -> int:
    return _HEADER.size + 8 * len(block.parts) + block.nbytes


def encode(block: BlockBytes) -> list[bytes | memoryview]:
    parts = block.parts
    header = _HEADER.pack(_MAGIC, len(parts), block_checksum(block.namespace, block.key, parts))
    return [header + struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts)), *parts]


def pieces_of(block: BlockBytes) -> list[memoryview]:
    return [memoryview(bytearray(_HEADER.size + 8 * len(block.parts))), *block.parts]


def decode(pieces: Sequence[memoryview], nbytes: int, block: BlockBytes) -> Outcome:
    header, parts = pieces[0], block.parts
    if nbytes != value_bytes(block):
        return Outcome.CORRUPT
    magic, count, checksum = _HEADER.unpack_from(header)
    if magic != _MAGIC or count != len(parts):
        return Outcome.CORRUPT
    if list(struct.unpack_from(f"<{count}Q", header, _HEADER.size)) != [part.nbytes for part in parts]:
        return Outcome.CORRUPT
    # The parts are the other pieces.
    is_good = block_checksum(block.namespace, block.key, parts) == checksum
    return Outcome.DONE if is_good else Outcome.CORRUPT


def seal_index(_namespace: NamespaceId, path: str, entries: bytes) -> bytes:
    return _SEAL.pack(_INDEX_MAGIC, _index_checksum(path, entries)) + entries


def open_index(_namespace: NamespaceId, path: str, index: bytes) -> bytes:
    entries = index[_SEAL.size :]
    if len(index) < _SEAL.size or _SEAL.unpack_from(index) != (_INDEX_MAGIC, _index_checksum(path, entries)):
        raise ValueError("its index is damaged, or of another pack")
    return entries


def _index_checksum(path: str, entries: bytes) -> int:
    return xxhash.xxh3_64_intdigest(entries, xxhash.xxh3_64_intdigest(path.encode()))
