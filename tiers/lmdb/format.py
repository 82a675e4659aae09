"""On-disk format of an LMDB store: keys, records and chunks.

| database | key | value |
|---|---|---|
| `meta` | `b"format"` | the format version, u32 |
| `meta` | `b"tally"` | number and digest of the blocks (`tally`) |
| `index` | namespace (32 bytes) + block key | a `BlockRecord` |
| `data` | record id u64, part u16, chunk u32, all big-endian | the bytes of one chunk |

Record ids only increase. So writes append to `data`, and the leaf pages of `data` stay full. The
order of the ids is the order of the stores.

If a value does not fit into a tree page, LMDB stores it in separate pages after a 16-byte header.
The chunk length is chosen so that header and bytes fill whole pages. Most chunks have the same
length, so freed pages fit new chunks. The short rest of a part, the tail, is stored in the record.
For example, a block of 64 KiB is one record and one chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import xxhash

from ..secondary_tier import BlockBytes, Entry, NamespaceId
from ..types import NAMESPACE_BYTES

__all__ = [
    "CHUNK_KEY_BYTES",
    "CHUNK_PAGES",
    "DATABASES",
    "DATA_FILE",
    "FORMAT_VERSION",
    "PAGE_HEADER_BYTES",
    "TAILS_BYTES",
    "BlockRecord",
    "Cut",
    "DamagedRecordError",
    "chunk_prefix",
    "chunk_spans",
    "cut",
    "entries_of",
    "is_name",
    "is_storable",
    "names_of",
    "parse_record",
    "record_id_of",
    "tail_bytes",
]

FORMAT_VERSION = 4
"""Version 4 has namespaces of 32 bytes, earlier versions of 16: no lookup finds their blocks."""
DATA_FILE = "data.mdb"
DATABASES = (b"meta", b"index", b"data")
MAX_KEY_BYTES = 511 - NAMESPACE_BYTES
"""LMDB's limit of 511 bytes, minus the namespace."""
MAX_PARTS = 0xFFFF
PAGE_HEADER_BYTES = 16
CHUNK_PAGES = 64
TAILS_BYTES = 512
"""Limit for all tails in a record together. If a block's tails are longer, they are chunks."""

_HEAD = struct.Struct("<BxHQQ")
_CHECK = struct.Struct("<Q")
_PREFIX = struct.Struct(">Q")
_SUFFIX = struct.Struct(">HI")
CHUNK_KEY_BYTES = _PREFIX.size + _SUFFIX.size
_NODE_HEADER_BYTES = 8


class DamagedRecordError(Exception):
    """An index record is damaged."""


class BlockRecord(NamedTuple):
    """Index record of a block. The record contains a checksum of its fields."""

    record_id: int
    checksum: int
    sizes: tuple[int, ...]
    tails: bytes = b""
    """The tails of the parts, concatenated; empty if they are stored as chunks."""

    def pack(self, index_key: bytes) -> bytes:
        """Returns the bytes to store under `index_key`. A record without tails has format 1."""
        parts = len(self.sizes)
        head = _HEAD.pack(2 if self.tails else 1, parts, self.record_id, self.checksum)
        body = head + _sizes(parts).pack(*self.sizes) + self.tails
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(index_key + body))

    @classmethod
    def unpack(cls, index_key: bytes, value: bytes) -> BlockRecord:
        """Parses a record and verifies its checksum; raises `DamagedRecordError`."""
        end = len(value) - _CHECK.size
        if end < _HEAD.size or _CHECK.unpack_from(value, end)[0] != xxhash.xxh3_64_intdigest(index_key + value[:end]):
            raise DamagedRecordError
        return cls(*parse_record(value))


def parse_record(value: bytes) -> tuple[int, int, tuple[int, ...], bytes]:
    """Returns the fields of a `BlockRecord`; does not verify the record's checksum.

    For readers that verify the block itself. Raises `DamagedRecordError` if `value` cannot be a
    record.
    """
    end = len(value) - _CHECK.size
    if end < _HEAD.size:
        raise DamagedRecordError
    version, parts, record_id, checksum = _HEAD.unpack_from(value)
    start = _HEAD.size + 8 * parts
    if version not in (1, 2) or start > end or (version == 1) != (start == end):
        raise DamagedRecordError
    return record_id, checksum, _sizes(parts).unpack_from(value, _HEAD.size), value[start:end]


@lru_cache(maxsize=256)
def _sizes(parts: int) -> struct.Struct:
    return struct.Struct(f"<{parts}Q")


def is_name(namespace: bytes, key: bytes) -> bool:
    return len(namespace) == NAMESPACE_BYTES and len(key) <= MAX_KEY_BYTES


def names_of(blocks: Iterable[BlockBytes]) -> dict[int, bytes]:
    """Returns namespace and key of each block by its position, without those that are no name."""
    return {
        number: block.namespace + block.key
        for number, block in enumerate(blocks)
        if len(block.namespace) == NAMESPACE_BYTES and len(block.key) <= MAX_KEY_BYTES
    }


def is_storable(block: BlockBytes) -> bool:
    namespace, key, parts = block
    return len(namespace) == NAMESPACE_BYTES and len(key) <= MAX_KEY_BYTES and len(parts) <= MAX_PARTS and any(parts)


def entries_of(blocks: Iterable[tuple[int, bytes, int]]) -> Iterator[Entry]:
    """Yields an entry per (number, name, size). All entries of a namespace share its id object."""
    namespaces: dict[bytes, NamespaceId] = {}
    for _, name, nbytes in blocks:
        namespace = name[:NAMESPACE_BYTES]
        yield Entry(namespaces.setdefault(namespace, NamespaceId(namespace)), name[NAMESPACE_BYTES:], nbytes)


chunk_prefix: Callable[[int], bytes] = _PREFIX.pack
"""Returns the start of the keys of a record's chunks."""


def record_id_of(key: bytes) -> int:
    if len(key) != CHUNK_KEY_BYTES:
        raise DamagedRecordError
    record_id: int = _PREFIX.unpack_from(key)[0]
    return record_id


@lru_cache(maxsize=256)
def tail_bytes(nbytes: int, page_bytes: int) -> int:
    """Returns the length of a part's tail: the bytes after its long chunks; 0 without tail."""
    runs = chunk_spans(nbytes, page_bytes)
    start, stop = runs[-1] if runs else (0, 0)
    return stop - start if start and stop - start < page_bytes - PAGE_HEADER_BYTES else 0


class Cut(NamedTuple):
    """Layout of a block, which depends only on the part sizes."""

    tails: tuple[tuple[int, int], ...]
    """Tails that are in the record, in order: (part, offset of the tail)."""
    tail_bytes: int
    chunks: tuple[tuple[bytes, int, int, int], ...]
    """Chunks that are in `data`: (key suffix, part, start, end)."""
    pages: int
    """Number of pages that the chunks use outside the tree."""


@lru_cache(maxsize=256)
def cut(sizes: tuple[int, ...], page_bytes: int, *, tails: bool) -> Cut:
    """Returns the layout of a block, with tails in the record or as chunks."""
    ends: list[tuple[int, int]] = []
    chunks: list[tuple[bytes, int, int, int]] = []
    kept = pages = 0
    for part, nbytes in enumerate(sizes):
        runs = chunk_spans(nbytes, page_bytes)
        if tails and (tail := tail_bytes(nbytes, page_bytes)):
            kept += tail
            ends.append((part, nbytes - tail))
            runs = runs[:-1]
        for number, (start, stop) in enumerate(runs):
            chunks.append((_SUFFIX.pack(part, number), part, start, stop))
            if stop - start > _longest_in_tree(page_bytes):
                pages += -(-(stop - start + PAGE_HEADER_BYTES) // page_bytes)
    return Cut(tuple(ends), kept, tuple(chunks), pages)


def _longest_in_tree(page_bytes: int) -> int:
    """Returns the largest value size such that two fit a tree page (`me_nodemax` of LMDB)."""
    node_bytes = ((page_bytes - PAGE_HEADER_BYTES) // 2 & -2) - 2
    return node_bytes - _NODE_HEADER_BYTES - CHUNK_KEY_BYTES


@lru_cache(maxsize=256)
def chunk_spans(nbytes: int, page_bytes: int) -> tuple[tuple[int, int], ...]:
    """Returns the start and end of each chunk of a part.

    A part has as many chunks of `CHUNK_PAGES` as possible, then a chunk of whole pages, then a rest
    of less than a page. LMDB stores a short rest in the tree. The rest of a 2 MiB part has 128
    bytes. The rest of a 64 KiB part has 16 bytes.
    """
    longest = CHUNK_PAGES * page_bytes - PAGE_HEADER_BYTES
    stops = list(range(longest, nbytes + 1, longest))
    done = len(stops) * longest
    pages = (nbytes - done + PAGE_HEADER_BYTES) // page_bytes
    if pages:
        done += pages * page_bytes - PAGE_HEADER_BYTES
        stops.append(done)
    if done < nbytes:
        stops.append(nbytes)
    return tuple(pairwise([0, *stops]))
