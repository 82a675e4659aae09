"""Records of the slots of the region, from which the next server recovers the blocks.

The records are in shared memory that outlives the server (`server/warm_restart.py`). Each slot has
one record: it is free, a client may write to it, or it has a part of a complete block. A record of
a part has a checksum. So a server that was killed while it wrote a record loses only this block.

A grant is recorded before a client learns of it, and a block is recorded after its last part is
complete. A slot that is neither is free after a restart: only threads and child processes of the
server write to it, and all of them have ended before another server reads the records.

Layout: header, slot size per extent, namespaces, and per extent a record for each of its slots.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import NamedTuple
from zlib import crc32

from ..errors import InvalidNamespace
from ..secondary_tier import NamespaceId
from ..types import NAMESPACE_BYTES, SLOT_ALIGNMENT, NamespaceSpec, tenant_of
from .block import Block, NamespaceIndex
from .pin_budget import affordable

__all__ = ["ExtentRecords", "NoRecords", "PartRecord", "RecordsError", "SlotRecords", "session_tag"]

LAYOUT = 1
"""Version of the layout. A server uses no records of another version."""

MAX_KEY_BYTES = 80
"""Blocks with longer keys are not recorded."""

MAX_NAMESPACES = 16_384
"""Limit of the recorded namespaces. A tenant gets at most as many as are then left."""

_MAGIC = b"kvtslots"
_PAGE = 4096
_HEADER = struct.Struct("<8sIIQQI")  # magic, layout, bytes per record, region, extent, checksum
_UNKEPT = struct.Struct("<I")
_UNKEPT_AT = 64

_RECORD = struct.Struct(f"<IBBHIIQ{MAX_KEY_BYTES}s")
"""Checksum, state, bytes of the key, rank, namespace, pages of the slot, age or session, key."""
_HEAD = struct.Struct("<BBHIIQ")
_CRC = struct.Struct("<I")
_CLASS = struct.Struct("<II")  # pages of a slot, and their complement
_MASK = 0xFFFFFFFF
_STATE_AT = _CRC.size
_KEY_AT = _CRC.size + _HEAD.size

_FREE, _GRANTED, _READY = 0, 0x0F, 0x33
"""They differ in four bits. A free slot keeps the rest of its record, and one flipped bit must not
bring its block back."""

_NAMESPACE_BYTES = 256
_NAMESPACE = struct.Struct(f"<IIIH{NAMESPACE_BYTES}s")  # checksum, number, world size, runs, id
_RUN = struct.Struct("<HI")  # number of consecutive groups, bytes of a part
_MAX_RUNS = (_NAMESPACE_BYTES - _NAMESPACE.size) // _RUN.size

_INDEX_BITS = MAX_NAMESPACES.bit_length()
_MAX_GENERATION = (1 << (32 - _INDEX_BITS)) - 1


class RecordsError(Exception):
    """The records cannot be used; the message says why."""


class PartRecord(NamedTuple):
    """A part of a complete block. The parts of one block have the same `age`.

    Attributes:
        age: position in the order in which blocks became complete.
        number: number of the namespace.
    """

    age: int
    number: int
    key: bytes
    rank: int
    offset: int
    slot_bytes: int


@dataclass(slots=True)
class ExtentRecords:
    """The records of one extent.

    Attributes:
        granted: slots to which a client may write, with the tag of its session.
        torn: slots whose record is damaged, or was being written when the server ended.
    """

    offset: int
    slot_bytes: int
    parts: list[PartRecord] = field(default_factory=list)
    granted: list[tuple[int, int]] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)


class NoRecords:
    """Records of a server whose memory does not outlive it: none."""

    def cut(self, offset: int, slot_bytes: int) -> None:
        """Called when an extent without used slots is divided into slots of another size."""

    def granted(self, tag: int, offsets: Iterable[int]) -> None:
        """Called before a client of a session gets slots to write to."""

    def free(self, offsets: Iterable[int]) -> None:
        """Called when slots have no block that a restart may recover, before others get them."""

    def ready(self, blocks: Iterable[Block]) -> None:
        """Called when all parts of blocks are complete. Blocks that only holds use are left out."""

    def forget(self, index: NamespaceIndex) -> None:
        """Called when a namespace has no blocks any more, or a reset has invalidated them."""


class SlotRecords(NoRecords):
    """The records of one region. Used by the event loop only."""

    def __init__(
        self,
        memory: memoryview,
        region_bytes: int,
        extent_bytes: int,
        back: Callable[[int, int], bool] = lambda _, __: True,
    ) -> None:
        """`memory`: `size_bytes` bytes, either all zero or with records.

        `back` allocates the pages of a range, and returns whether it could: writing to a page that
        the kernel cannot allocate would end the process.
        """
        self._memory = memory
        self._region_bytes, self._extent_bytes = region_bytes, extent_bytes
        self._back = back
        self._sizes = _sizes(region_bytes, extent_bytes)
        self._namespaces_at = _PAGE + self._sizes.classes
        self._records_at = self._namespaces_at + MAX_NAMESPACES * _NAMESPACE_BYTES
        self._slot_bytes = [0] * self._sizes.extents
        """Slot size of each extent with records; 0 for others."""
        self._age = 0
        self._unkept = 0
        self._numbers: dict[int, bytes] = {}
        """Tenants of the numbers of the recorded namespaces."""
        self._per_tenant: Counter[bytes] = Counter()
        self._unused = deque(range(MAX_NAMESPACES))
        """Places of the table of namespaces; the longest unused one first."""
        self._generations = bytearray(4 * MAX_NAMESPACES)

    @staticmethod
    def size_bytes(region_bytes: int, extent_bytes: int) -> int:
        """Returns the size of the records. Most of their pages are never allocated."""
        sizes = _sizes(region_bytes, extent_bytes)
        return _PAGE + sizes.classes + MAX_NAMESPACES * _NAMESPACE_BYTES + sizes.extents * sizes.per_extent

    def format(self) -> None:
        """Begins records in memory that is zero. Raises RecordsError if memory is short."""
        if not self._back(0, self._records_at):
            raise RecordsError("memory is short")
        self._memory[: _HEADER.size] = self._header()

    def check(self) -> None:
        """Raises RecordsError if the records are of another layout or region, or incomplete."""
        magic, layout, record, region, extent, _ = _HEADER.unpack_from(self._memory)
        if magic != _MAGIC or layout != LAYOUT or record != _RECORD.size:
            raise RecordsError(f"they have another layout than that of this version ({LAYOUT})")
        if (region, extent) != (self._region_bytes, self._extent_bytes):
            raise RecordsError(f"they belong to a region of {region} bytes, not {self._region_bytes}")
        if self._memory[: _HEADER.size] != self._header():
            raise RecordsError("their header is damaged")
        if _UNKEPT.unpack_from(self._memory, _UNKEPT_AT)[0]:
            raise RecordsError("a client mapped the region whose connection could not be kept")
        self._classes()

    def _header(self) -> bytes:
        fields = _MAGIC, LAYOUT, _RECORD.size, self._region_bytes, self._extent_bytes
        return _HEADER.pack(*fields, crc32(_HEADER.pack(*fields, 0)))

    def count_unkept(self, change: int) -> None:
        """Changes the number of clients whose end the next server could not notice.

        While there is one, no server may use the records.
        """
        self._unkept += change
        _UNKEPT.pack_into(self._memory, _UNKEPT_AT, self._unkept)

    def cut(self, offset: int, slot_bytes: int) -> None:
        extent = offset // self._extent_bytes
        count = self._extent_bytes // slot_bytes
        if not self._back(self._position(extent, 0), count * _RECORD.size):
            slot_bytes = 0
        self._slot_bytes[extent] = slot_bytes
        pages = slot_bytes // SLOT_ALIGNMENT
        _CLASS.pack_into(self._memory, _PAGE + extent * _CLASS.size, pages, ~pages & _MASK)

    def granted(self, tag: int, offsets: Iterable[int]) -> None:
        memory, pack = self._memory, _HEAD.pack_into
        for offset in offsets:
            if position := self._position_of(offset):
                pack(memory, position + _STATE_AT, _GRANTED, 0, 0, 0, 0, tag)

    def free(self, offsets: Iterable[int]) -> None:
        memory = self._memory
        for offset in offsets:
            if position := self._position_of(offset):
                memory[position + _STATE_AT] = _FREE

    def ready(self, blocks: Iterable[Block]) -> None:
        self._age = age = self._age + 1
        memory, pack, position_of = self._memory, _HEAD.pack, self._position_of
        for block in blocks:
            key, index = block.key, block.namespace_index
            number = index.number or self._register(index)
            if not number or len(key) > MAX_KEY_BYTES or index.invalidated or block.hold_only:
                continue
            pages = block.queue.size_class // SLOT_ALIGNMENT
            for rank, offset in enumerate(block.slots):
                assert offset is not None  # the part is complete
                if position := position_of(offset):
                    record = pack(_READY, len(key), rank, number, pages, age) + key
                    memory[position : position + _CRC.size + len(record)] = _CRC.pack(crc32(record)) + record

    def forget(self, index: NamespaceIndex) -> None:
        number, index.number = index.number, 0
        tenant = self._numbers.pop(number, None)
        if tenant is not None:
            self._per_tenant[tenant] -= 1
            place = _place_of(number)
            _CRC.pack_into(self._memory, self._namespace_at(place) + _CRC.size, 0)  # its number
            self._unused.append(place)

    def extents(self) -> Iterator[ExtentRecords]:
        """Yields the extents with records. Takes about 1 µs per slot."""
        for extent, slot_bytes in enumerate(self._classes()):
            self._slot_bytes[extent] = slot_bytes
            if slot_bytes:
                yield self._records_of(extent, slot_bytes)

    def _classes(self) -> list[int]:
        """Returns the recorded slot sizes of the extents; 0 for none. Raises RecordsError."""
        found = []
        for extent in range(self._sizes.extents):
            pages, complement = _CLASS.unpack_from(self._memory, _PAGE + extent * _CLASS.size)
            if (pages or complement) and (pages ^ complement != _MASK or pages * SLOT_ALIGNMENT > self._extent_bytes):
                raise RecordsError(f"the slot size of extent {extent} is damaged")
            found.append(pages * SLOT_ALIGNMENT)
        return found

    def namespaces(self) -> Iterator[tuple[int, NamespaceSpec]]:
        """Yields the recorded namespaces with their numbers. Damaged ones are left out.

        Call it before a namespace is recorded. The caller passes those that it does not use to
        `forget`.
        """
        unused = []
        for place in range(MAX_NAMESPACES):
            found = self._read_namespace(place)
            if found is None:
                unused.append(place)
                continue
            number, spec = found
            self._numbers[number] = tenant = tenant_of(spec.id)
            self._per_tenant[tenant] += 1
            self._set_generation(place, number >> _INDEX_BITS)
            yield number, spec
        self._unused = deque(unused)

    def continue_after(self, age: int) -> None:
        self._age = max(self._age, age)

    def _records_of(self, extent: int, slot_bytes: int) -> ExtentRecords:
        found = ExtentRecords(extent * self._extent_bytes, slot_bytes)
        pages = slot_bytes // SLOT_ALIGNMENT
        start = self._position(extent, 0)
        count = self._extent_bytes // slot_bytes
        table = bytes(self._memory[start : start + count * _RECORD.size])
        parts, offset = found.parts, found.offset
        for slot, record in enumerate(_RECORD.iter_unpack(table)):
            checksum, state, key_bytes, rank, number, record_pages, age, key = record
            if state == _FREE:
                continue
            if state == _GRANTED:
                found.granted.append((offset + slot * slot_bytes, age))
                continue
            begin = slot * _RECORD.size + _STATE_AT
            is_whole = crc32(table[begin : begin + _HEAD.size + key_bytes]) == checksum
            if state == _READY and record_pages == pages and key_bytes <= MAX_KEY_BYTES and is_whole:
                parts.append(PartRecord(age, number, key[:key_bytes], rank, offset + slot * slot_bytes, slot_bytes))
            else:
                found.torn.append(offset + slot * slot_bytes)
        return found

    def _register(self, index: NamespaceIndex) -> int:
        """Records a namespace, and returns its number, or 0 if there is no room for it."""
        spec = index.spec
        if spec is None or index.invalidated:
            return 0
        runs = [(len(list(group)), nbytes) for nbytes, group in groupby(spec.part_bytes)]
        tenant = tenant_of(spec.id)
        own = self._per_tenant[tenant]
        if len(runs) > _MAX_RUNS or not affordable(repeat(1, 1), free=len(self._unused), own=own):
            return 0
        place = self._unused[0]
        self._unused.popleft()
        generation = self._generation(place) % _MAX_GENERATION + 1
        self._set_generation(place, generation)
        number = generation << _INDEX_BITS | place
        fields = number, spec.world_size, len(runs), spec.id
        packed = b"".join(_RUN.pack(*run) for run in runs)
        checksum = crc32(packed, crc32(_NAMESPACE.pack(0, *fields)))
        at = self._namespace_at(place)
        self._memory[at : at + _NAMESPACE.size + len(packed)] = _NAMESPACE.pack(checksum, *fields) + packed
        self._numbers[number] = tenant
        self._per_tenant[tenant] += 1
        index.number = number
        return number

    def _read_namespace(self, place: int) -> tuple[int, NamespaceSpec] | None:
        at = self._namespace_at(place)
        checksum, number, world_size, runs, namespace = _NAMESPACE.unpack_from(self._memory, at)
        if not number or _place_of(number) != place or runs > _MAX_RUNS:
            return None
        end = at + _NAMESPACE.size + runs * _RUN.size
        packed = bytes(self._memory[at + _NAMESPACE.size : end])
        if crc32(packed, crc32(_NAMESPACE.pack(0, number, world_size, runs, namespace))) != checksum:
            return None
        sizes = [nbytes for count, nbytes in _RUN.iter_unpack(packed) for _ in range(count)]
        try:
            return number, NamespaceSpec(NamespaceId(namespace), world_size, tuple(sizes))
        except InvalidNamespace:
            return None

    def _position_of(self, offset: int) -> int:
        """Returns where the record of a slot is; 0 if its extent has no records."""
        extent, within = divmod(offset, self._extent_bytes)
        slot_bytes = self._slot_bytes[extent]
        return self._position(extent, within // slot_bytes) if slot_bytes else 0

    def _position(self, extent: int, slot: int) -> int:
        return self._records_at + extent * self._sizes.per_extent + slot * _RECORD.size

    def _namespace_at(self, place: int) -> int:
        return self._namespaces_at + place * _NAMESPACE_BYTES

    def _generation(self, place: int) -> int:
        return int.from_bytes(self._generations[4 * place : 4 * place + 4], "little")

    def _set_generation(self, place: int, generation: int) -> None:
        self._generations[4 * place : 4 * place + 4] = generation.to_bytes(4, "little")


def session_tag(session_id: bytes) -> int:
    """Returns the tag under which the slots of a session are recorded."""
    return int.from_bytes(session_id[:8], "little")


class _Sizes(NamedTuple):
    """Number of extents, bytes of the slot sizes of all extents, and bytes of an extent's records."""

    extents: int
    classes: int
    per_extent: int


def _sizes(region_bytes: int, extent_bytes: int) -> _Sizes:
    extents = region_bytes // extent_bytes
    return _Sizes(
        extents, _whole_pages(extents * _CLASS.size), _whole_pages(extent_bytes // SLOT_ALIGNMENT * _RECORD.size)
    )


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _place_of(number: int) -> int:
    return number & ((1 << _INDEX_BITS) - 1)
