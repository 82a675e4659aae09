"""On-disk format of a disk store: slab files, and the index of their pages.

Slab files (`slab-00000`, …) consist of pages of 4096 bytes. Page n is in slab n // pages per slab.
The parts of a block are stored one after another, and each part starts on a page. A block uses one
run of pages, or several runs if no run is long enough. The index is an LMDB environment next to the
slabs:

| database | key | value |
|---|---|---|
| `meta` | `b"disk format"` | the format version, u32 |
| `meta` | `b"slab pages"` | pages per slab, u64, and the complement of this number, u64 |
| `meta` | `b"tally"` | number and digest of the blocks (`lmdb.index_digest`) |
| `blocks` | namespace (32 bytes) + block key | a `SlabRecord` |
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import xxhash

from ..lmdb.format import DamagedRecordError
from ..lmdb.identity import Layout

__all__ = ["DISK_STORE", "PAGE_BYTES", "SLAB_PAGES_KEY", "PagePiece", "PageRun", "SlabRecord", "pages_for", "pieces"]

PAGE_BYTES = 4096
FORMAT_VERSION = 3
"""Version 3 has namespaces of 32 bytes, earlier versions of 16: no lookup finds their blocks."""
RECORD_VERSION = 1
SLAB_PAGES_KEY = b"slab pages"
DISK_STORE = Layout(
    "disk store",
    (b"meta", b"blocks"),
    b"disk format",
    FORMAT_VERSION,
    guarded_key=SLAB_PAGES_KEY,
    block_files="slab-*",
)

_HEAD = struct.Struct("<BxHIQQ")
_CHECK = struct.Struct("<Q")
_MAX_FIELDS = 1 << 20


class PageRun(NamedTuple):
    """Consecutive pages of one slab."""

    start: int
    pages: int

    @property
    def end(self) -> int:
        return self.start + self.pages


class PagePiece(NamedTuple):
    """A piece of memory and its first page in the slabs. Only the last page may be partly used."""

    page: int
    view: memoryview


class SlabRecord(NamedTuple):
    """Index record of a block. The record contains a checksum of its fields."""

    number: int
    """Unique number; increases with each store."""
    checksum: int
    sizes: tuple[int, ...]
    runs: tuple[PageRun, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def pack(self, name: bytes) -> bytes:
        head = _HEAD.pack(RECORD_VERSION, len(self.sizes), len(self.runs), self.number, self.checksum)
        fields = [*self.sizes, *(field for run in self.runs for field in run)]
        body = head + _fields(len(fields)).pack(*fields)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(name + body))

    @classmethod
    def unpack(cls, name: bytes, value: bytes) -> SlabRecord:
        """Parses a record and verifies its checksum; raises `DamagedRecordError`."""
        count, rest = divmod(len(value) - _HEAD.size - _CHECK.size, 8)
        if not 0 <= count <= _MAX_FIELDS or rest:
            raise DamagedRecordError
        if _CHECK.unpack_from(value, len(value) - 8)[0] != xxhash.xxh3_64_intdigest(name + value[:-8]):
            raise DamagedRecordError
        version, parts, runs, number, checksum = _HEAD.unpack_from(value)
        if version != RECORD_VERSION or parts + 2 * runs != count:
            raise DamagedRecordError
        fields = _fields(count).unpack_from(value, _HEAD.size)
        sizes = fields[:parts]
        record = cls(number, checksum, sizes, tuple(map(PageRun, fields[parts::2], fields[parts + 1 :: 2])))
        if pages_for(sizes) != sum(fields[parts + 1 :: 2]):
            raise DamagedRecordError
        return record


@lru_cache(maxsize=256)
def _fields(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def pages_for(sizes: Sequence[int]) -> int:
    return sum([-(-size // PAGE_BYTES) for size in sizes])


def pieces(runs: Sequence[PageRun], parts: Sequence[memoryview]) -> Iterator[PagePiece]:
    left = iter(runs)
    page, room = next(left, PageRun(0, 0))
    for part in parts:
        start = 0
        while start < part.nbytes:
            if not room:
                page, room = next(left)
            stop = min(part.nbytes, start + room * PAGE_BYTES)
            yield PagePiece(page, part[start:stop])
            pages = -(-(stop - start) // PAGE_BYTES)
            page, room, start = page + pages, room - pages, stop
