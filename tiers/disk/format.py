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
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import xxhash

from ..lmdb.format import DamagedRecordError
from ..lmdb.identity import Layout

__all__ = ["DISK_STORE", "PAGE_BYTES", "SLAB_PAGES_KEY", "PageRun", "SlabRecord", "pages_for", "parse_record"]

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

_EMPTY_BYTES = struct.calcsize("<BxHIQQQ")
"""Size of a record without parts and runs."""
_CHECK = struct.Struct("<Q")
_MAX_FIELDS = 1 << 20


class PageRun(NamedTuple):
    """Consecutive pages of one slab."""

    start: int
    pages: int

    @property
    def end(self) -> int:
        return self.start + self.pages


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
        fields = [*sizes, *chain.from_iterable(runs)]
        body = _body(len(fields)).pack(RECORD_VERSION, len(sizes), len(runs), number, checksum, *fields)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(name + body))

    @classmethod
    def unpack(cls, name: bytes, value: bytes) -> SlabRecord:
        """Parses a record and verifies its checksum; raises `DamagedRecordError`."""
        number, checksum, sizes, runs = parse_record(name, value)
        return cls(number, checksum, sizes, tuple(map(PageRun._make, runs)))


def parse_record(name: bytes, value: bytes) -> tuple[int, int, tuple[int, ...], list[tuple[int, int]]]:
    """Returns the fields of a `SlabRecord`, with plain tuples as runs: half the time of `unpack`.

    Verifies the record's checksum; raises `DamagedRecordError`.
    """
    count, rest = divmod(len(value) - _EMPTY_BYTES, 8)
    if not 0 <= count <= _MAX_FIELDS or rest:
        raise DamagedRecordError
    version, parts, runs, number, checksum, *fields, check = _record(count).unpack(value)
    if check != xxhash.xxh3_64_intdigest(name + value[:-8]):
        raise DamagedRecordError
    sizes, pages = tuple(fields[:parts]), fields[parts + 1 :: 2]
    if version != RECORD_VERSION or parts + 2 * runs != count or pages_for(sizes) != sum(pages):
        raise DamagedRecordError
    places = [(fields[parts], pages[0])] if runs == 1 else list(zip(fields[parts::2], pages, strict=True))
    return number, checksum, sizes, places


@lru_cache(maxsize=256)
def _body(fields: int) -> struct.Struct:
    """Returns the format of a record with this number of sizes, starts and lengths."""
    return struct.Struct(f"<BxHIQQ{fields}Q")


@lru_cache(maxsize=256)
def _record(fields: int) -> struct.Struct:
    """Returns the format of `_body` with the checksum of the record."""
    return struct.Struct(f"<BxHIQQ{fields}QQ")


@lru_cache(maxsize=256)
def pages_for(sizes: tuple[int, ...]) -> int:
    return sum([-(-size // PAGE_BYTES) for size in sizes])
