"""What an LMDB store looks like inside: keys, records and chunks.

| database | key | value |
|---|---|---|
| `meta` | `b"format"` | the format version, u32 |
| `index` | namespace (16 bytes) + block key | a `BlockRecord` |
| `data` | record id u64, part u16, chunk u32, all big-endian | the bytes of one chunk |

Record ids only grow. Writes therefore append to `data`, whose leaves stay full, and the order of the ids is the order
in which blocks were stored.

LMDB keeps a value that does not fit a tree page in a run of pages of its own, with a 16-byte header in front. Chunks
are cut so that header and bytes fill whole pages, and most have one length: a run that one leaves fits the next. What
is left of a part then, if it is short, lies in the record: a block of 64 KiB is one record and one chunk.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import xxhash

__all__ = [
    "CHUNK_PAGES",
    "DATABASES",
    "DATA_FILE",
    "FORMAT_VERSION",
    "MAX_KEY_BYTES",
    "MAX_PARTS",
    "NAMESPACE_BYTES",
    "PAGE_HEADER_BYTES",
    "TAILS_BYTES",
    "BlockRecord",
    "Cut",
    "DamagedRecordError",
    "chunk_key",
    "chunk_prefix",
    "chunk_spans",
    "cut",
    "record_id_of",
    "tail_bytes",
]

FORMAT_VERSION = 2
"""2 since records may hold the ends of parts."""
DATA_FILE = "data.mdb"
"""What LMDB calls its file in the directory of a store."""
DATABASES = (b"meta", b"index", b"data")
NAMESPACE_BYTES = 16
MAX_KEY_BYTES = 511 - NAMESPACE_BYTES
"""LMDB's limit of 511 bytes, less the namespace."""
MAX_PARTS = 0xFFFF
PAGE_HEADER_BYTES = 16
CHUNK_PAGES = 64
TAILS_BYTES = 512
"""Most bytes of parts' ends that lie in a record."""

_HEAD = struct.Struct("<BxHQQ")
_CHECK = struct.Struct("<Q")
_CHUNK_KEY = struct.Struct(">QHI")
_PREFIX = struct.Struct(">Q")
_SUFFIX = struct.Struct(">HI")
_NODE_HEADER_BYTES = 8


class DamagedRecordError(Exception):
    """An index record is not what was written there."""


class BlockRecord(NamedTuple):
    """The index record of a block, with a checksum of itself: a damaged one is known before it is used."""

    record_id: int
    checksum: int
    sizes: tuple[int, ...]
    """Bytes of each part."""
    tails: bytes = b""
    """The ends of the parts, one behind the other; nothing where they are chunks like the rest."""

    def pack(self, index_key: bytes) -> bytes:
        """Returns the record as it is stored under `index_key`; one without tails as format 1 had it."""
        parts = len(self.sizes)
        head = _HEAD.pack(2 if self.tails else 1, parts, self.record_id, self.checksum)
        body = head + _sizes(parts).pack(*self.sizes) + self.tails
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(index_key + body))

    @classmethod
    def unpack(cls, index_key: bytes, value: bytes) -> BlockRecord:
        """Reads what `pack` wrote under the same key; anything else raises `DamagedRecordError`."""
        end = len(value) - _CHECK.size
        if end < _HEAD.size or _CHECK.unpack_from(value, end)[0] != xxhash.xxh3_64_intdigest(index_key + value[:end]):
            raise DamagedRecordError
        return cls.read(value)

    @classmethod
    def read(cls, value: bytes) -> BlockRecord:
        """Reads what `pack` wrote, and believes it: for who verifies the block that it leads to, and changes nothing.

        What cannot be a record raises `DamagedRecordError`.
        """
        end = len(value) - _CHECK.size
        if end < _HEAD.size:
            raise DamagedRecordError
        version, parts, record_id, checksum = _HEAD.unpack_from(value)
        start = _HEAD.size + 8 * parts
        if version not in (1, 2) or start > end or (version == 1) != (start == end):
            raise DamagedRecordError
        return cls(record_id, checksum, _sizes(parts).unpack_from(value, _HEAD.size), value[start:end])


@lru_cache(maxsize=256)
def _sizes(parts: int) -> struct.Struct:
    return struct.Struct(f"<{parts}Q")


def chunk_key(record_id: int, part: int, chunk: int) -> bytes:
    """Returns the key of a chunk in `data`."""
    return _CHUNK_KEY.pack(record_id, part, chunk)


def chunk_prefix(record_id: int) -> bytes:
    """Returns what the keys of all chunks of a record begin with."""
    return _PREFIX.pack(record_id)


def record_id_of(key: bytes) -> int:
    """Returns the record that a chunk belongs to, from the chunk's key."""
    if len(key) != _CHUNK_KEY.size:
        raise DamagedRecordError
    record_id: int = _PREFIX.unpack_from(key)[0]
    return record_id


@lru_cache(maxsize=256)
def tail_bytes(nbytes: int, page_bytes: int) -> int:
    """Returns how much of a part's end may lie in the record: what is behind its long chunks, if it has any."""
    runs = chunk_spans(nbytes, page_bytes)
    start, stop = runs[-1] if runs else (0, 0)
    return stop - start if start and stop - start < page_bytes - PAGE_HEADER_BYTES else 0


class Cut(NamedTuple):
    """How blocks are stored whose parts have certain sizes."""

    tails: tuple[tuple[int, int], ...]
    """What lies in the record, in order: (part, where in it the tail begins)."""
    tail_bytes: int
    chunks: tuple[tuple[bytes, int, int, int], ...]
    """What lies in `data`: (end of the chunk's key, part, where in it the chunk begins, where it ends)."""
    pages: int
    """Pages that the chunks take outside of the tree."""


@lru_cache(maxsize=256)
def cut(sizes: tuple[int, ...], page_bytes: int, *, tails: bool) -> Cut:
    """Returns how a block with parts of `sizes` is stored, with the parts' ends in the record or without."""
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
    """Returns how long a chunk can be that LMDB keeps beside its key, of which two must fit a page (`me_nodemax`)."""
    node_bytes = ((page_bytes - PAGE_HEADER_BYTES) // 2 & -2) - 2
    return node_bytes - _NODE_HEADER_BYTES - _CHUNK_KEY.size


@lru_cache(maxsize=256)
def chunk_spans(nbytes: int, page_bytes: int) -> tuple[tuple[int, int], ...]:
    """Returns where the chunks of a part begin and end.

    First as many of `CHUNK_PAGES` as there are, then one of whole pages, then what is left: less than a page, which
    LMDB puts into the tree itself when it is short (128 bytes of a 2 MiB part, 16 of a 64 KiB one).
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
