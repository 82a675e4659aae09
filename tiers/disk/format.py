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
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import xxhash

from ..lmdb.format import DamagedRecordError
from ..lmdb.identity import Layout

__all__ = ["DISK_STORE", "PAGE_BYTES", "SLAB_PAGES_KEY", "PageRun", "SlabRecord", "pages_for"]

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

_FIXED = struct.Struct("<BxHIQQQ")
"""Fields of every record: version, numbers of parts and runs, number, checksum, and own checksum."""
_CHECK = struct.Struct("<Q")
_MAX_FIELDS = 1 << 20


class PageRun(NamedTuple):
    """Consecutive pages of one slab."""

    start: int
    pages: int

    @property
    def end(self) -> int:
        return self.start + self.pages


_as_run = partial(tuple.__new__, PageRun)
"""`PageRun._make` without a Python function, for the load of many blocks."""


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
        number, checksum, sizes, runs = self
        body = _body(len(sizes) + 2 * len(runs)).pack(
            RECORD_VERSION, len(sizes), len(runs), number, checksum, *sizes, *chain.from_iterable(runs)
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(name + body))

    @classmethod
    def unpack(cls, name: bytes, value: bytes) -> SlabRecord:
        """Parses a record and verifies its checksum; raises `DamagedRecordError`."""
        count, rest = divmod(len(value) - _FIXED.size, 8)
        if not 0 <= count <= _MAX_FIELDS or rest:
            raise DamagedRecordError
        if _CHECK.unpack_from(value, len(value) - 8)[0] != xxhash.xxh3_64_intdigest(name + value[:-8]):
            raise DamagedRecordError
        version, parts, runs, number, checksum, *fields = _body(count).unpack_from(value)
        if version != RECORD_VERSION or parts + 2 * runs != count:
            raise DamagedRecordError
        sizes, starts, pages = tuple(fields[:parts]), fields[parts::2], fields[parts + 1 :: 2]
        if pages_for(sizes) != sum(pages):
            raise DamagedRecordError
        return tuple.__new__(cls, (number, checksum, sizes, tuple(map(_as_run, zip(starts, pages, strict=True)))))


@lru_cache(maxsize=256)
def _body(fields: int) -> struct.Struct:
    """Returns the format of a record with this number of sizes, starts and lengths."""
    return struct.Struct(f"<BxHIQQ{fields}Q")


@lru_cache(maxsize=256)
def pages_for(sizes: tuple[int, ...]) -> int:
    return sum([-(-size // PAGE_BYTES) for size in sizes])
