"""Records of the slots of the region, from which the next server recovers the blocks.

The records are in shared memory that outlives the server (`server/warm_restart.py`). Each slot has
one record: it is free, a client may write to it, or it has a part of a complete block. Its state is
written last, and the rest has checksums. So a server that was killed while it wrote a record loses
only this block.

A grant is recorded before a client learns of it, and a block is recorded after its last part is
complete. A slot that is neither is free after a restart: only threads and child processes of the
server write to it, and all of them have ended before another server reads the records.

Layout: header, slot size per extent, namespaces, and for each slot a state, the checksum of its key
and a record. The slots of a store follow each other, so one copy writes all of their records.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from ..errors import InvalidNamespace
from ..secondary_tier import NamespaceId
from ..types import HOLD_ONLY_KEY_PREFIX, NAMESPACE_BYTES, SLOT_ALIGNMENT, NamespaceSpec, tenant_of
from .block import Block, NamespaceIndex
from .pin_budget import affordable

if TYPE_CHECKING:
    from ..eviction.queues import EvictionQueue

__all__ = ["ExtentRecords", "NoRecords", "PartRecord", "RecordsError", "SlotRecords", "session_tag"]

LAYOUT = 2
"""Version of the layout of the records, and of the region with its digests. A server uses no memory
of another version."""

MAX_KEY_BYTES = 80
"""Blocks with longer keys are not recorded."""

MAX_NAMESPACES = 16_384
"""Limit of the recorded namespaces. A tenant gets at most as many as are then left."""

_MAGIC = b"kvtslots"
_PAGE = 4096
_HEADER = struct.Struct("<8sIIQQ16sI")  # magic, layout, record, region, extent, pools, checksum
_UNKEPT_AT, _ATTEMPTS_AT = 64, 68

MAX_ATTEMPTS = 4  # systemd permits five starts
"""Number of starts with a recovery that may fail before the records are not used."""

_HEAD = struct.Struct("<IBBHIIQ")
"""Checksum, kind, bytes of the key, rank, namespace, pages of the slot, age or session."""
_RECORD = struct.Struct(f"<{_HEAD.size}s{MAX_KEY_BYTES}s")
_U32 = struct.Struct("<I")
_CLASS = struct.Struct("<II")  # pages of a slot, and their complement
_MASK = 0xFFFFFFFF

_FREE, _GRANTED, _READY = b"\0", b"\x0f", b"\x33"
"""They differ in four bits. A free slot keeps the rest of its record, and one flipped bit must not
bring its block back."""

_NAMESPACE_BYTES = 256
_NAMESPACE = struct.Struct(f"<IIIH{NAMESPACE_BYTES}s")  # checksum, number, world size, runs, id
_RUN = struct.Struct("<HI")  # number of consecutive groups, bytes of a part
_MAX_RUNS = (_NAMESPACE_BYTES - _NAMESPACE.size) // _RUN.size

_INDEX_BITS = MAX_NAMESPACES.bit_length()
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_MAX_GENERATION = (1 << (32 - _INDEX_BITS)) - 1

_index_of, _queue_of, _key_of, _slots_of = map(attrgetter, ("namespace_index", "queue", "key", "slots"))


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

    def granted(self, tag: int, offsets: Sequence[int]) -> None:
        """Called before a client of a session gets slots to write to."""

    def free(self, offsets: Sequence[int]) -> None:
        """Called when slots have no block that a restart may recover, before others get them."""

    def ready(self, blocks: Sequence[Block]) -> None:
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
        pools: bytes = bytes(16),
    ) -> None:
        """`memory`: `size_bytes` bytes, either all zero or with records.

        `pools`: 16 bytes that differ for regions whose memory pools have other sizes or tenants.
        `back` allocates the pages of a range, and returns whether it could: writing to a page that
        the kernel cannot allocate would end the process.
        """
        self._memory = memory
        self._region_bytes, self._extent_bytes, self._pools = region_bytes, extent_bytes, pools
        self._back = back
        self._sizes = _sizes(region_bytes, extent_bytes)
        self._namespaces_at = _PAGE + self._sizes.classes
        self._states_at = self._namespaces_at + MAX_NAMESPACES * _NAMESPACE_BYTES
        self._checks_at = self._states_at + self._sizes.slots
        self._records_at = self._checks_at + self._sizes.slots * _U32.size
        self._slot_bytes = [0] * self._sizes.extents
        """Slot size of each extent with records; 0 for others."""
        self._age = 0
        self._unkept = 0
        self._unbacked: set[int] = set()
        """Extents whose records have no memory. No server would know which slots are granted."""
        self._numbers: dict[int, bytes] = {}
        """Tenants of the numbers of the recorded namespaces."""
        self._per_tenant: Counter[bytes] = Counter()
        self._unused = deque(range(MAX_NAMESPACES))
        """Places of the table of namespaces; the longest unused one first."""
        self._generations = memoryview(bytearray(4 * MAX_NAMESPACES)).cast("I")

    @staticmethod
    def size_bytes(region_bytes: int, extent_bytes: int) -> int:
        """Returns the size of the records. Most of their pages are never allocated."""
        sizes = _sizes(region_bytes, extent_bytes)
        per_slot = 1 + _U32.size + _RECORD.size
        return _whole_pages(_PAGE + sizes.classes + MAX_NAMESPACES * _NAMESPACE_BYTES + sizes.slots * per_slot)

    def format(self) -> None:
        """Begins records in memory that is zero. Raises RecordsError if memory is short."""
        if not self._back(0, self._states_at):
            raise RecordsError("memory is short")
        self._memory[: _HEADER.size] = self._header()

    def check(self) -> None:
        """Raises RecordsError if the records are of another layout or region, or incomplete."""
        magic, layout, record, region, extent, pools, _ = _HEADER.unpack_from(self._memory)
        if magic != _MAGIC or layout != LAYOUT or record != _RECORD.size:
            raise RecordsError(f"they have another layout than that of this version ({LAYOUT})")
        if (region, extent) != (self._region_bytes, self._extent_bytes):
            raise RecordsError(f"they belong to a region of {region} bytes, not {self._region_bytes}")
        if pools != self._pools:
            raise RecordsError("other tenants had memory of their own, or other amounts")
        if self._memory[: _HEADER.size] != self._header():
            raise RecordsError("their header is damaged")
        if _U32.unpack_from(self._memory, _UNKEPT_AT)[0]:
            raise RecordsError("the connection of a client could not be kept, or memory was short")
        if _U32.unpack_from(self._memory, _ATTEMPTS_AT)[0] >= MAX_ATTEMPTS:
            raise RecordsError(f"{MAX_ATTEMPTS} recoveries have failed")
        self._classes()

    def _header(self) -> bytes:
        fields = _MAGIC, LAYOUT, _RECORD.size, self._region_bytes, self._extent_bytes, self._pools
        return _HEADER.pack(*fields, crc32(_HEADER.pack(*fields, 0)))

    def count_recovery(self, *, has_ended: bool = False) -> None:
        """Called before a recovery, which could end the server, and when the server is ready."""
        attempts = _U32.unpack_from(self._memory, _ATTEMPTS_AT)[0]
        _U32.pack_into(self._memory, _ATTEMPTS_AT, 0 if has_ended else attempts + 1)

    def count_unkept(self, change: int) -> None:
        """Changes the number of reasons for which no other server may use the records.

        Such a reason is a client whose end the next server could not notice.
        """
        self._unkept += change
        _U32.pack_into(self._memory, _UNKEPT_AT, self._unkept)

    def cut(self, offset: int, slot_bytes: int) -> None:
        extent = offset // self._extent_bytes
        first, count = self._first_place(extent), self._extent_bytes // slot_bytes
        areas = (self._states_at, 1), (self._checks_at, _U32.size), (self._records_at, _RECORD.size)
        was_unbacked = extent in self._unbacked
        self._unbacked.discard(extent)
        if not all(self._back(at + first * nbytes, count * nbytes) for at, nbytes in areas):
            slot_bytes = 0
            self._unbacked.add(extent)
        self.count_unkept((extent in self._unbacked) - was_unbacked)
        self._slot_bytes[extent] = slot_bytes
        pages = slot_bytes // SLOT_ALIGNMENT
        _CLASS.pack_into(self._memory, _PAGE + extent * _CLASS.size, pages, ~pages & _MASK)

    def granted(self, tag: int, offsets: Sequence[int]) -> None:
        record = _grant_record(tag)
        for place, first, end in self._runs(offsets):
            self._write(self._records_at + place * _RECORD.size, record * (end - first))
            self._write(self._states_at + place, _GRANTED * (end - first))

    def free(self, offsets: Sequence[int]) -> None:
        for place, first, end in self._runs(offsets):
            self._write(self._states_at + place, _FREE * (end - first))

    def ready(self, blocks: Sequence[Block]) -> None:
        self._age += 1
        sizes = set(map(len, map(_key_of, blocks)))
        if len(sizes) == len(set(map(_queue_of, blocks))) == len(set(map(_index_of, blocks))) == 1:
            # The usual case. `groupby` takes three times as long as the rest.
            self._ready(blocks[0].namespace_index, blocks[0].queue, sizes.pop(), blocks)
            return
        for kind, alike in groupby(blocks, key=lambda block: (block.namespace_index, block.queue, len(block.key))):
            self._ready(*kind, list(alike))

    def _ready(
        self, index: NamespaceIndex, queue: EvictionQueue[Block], key_bytes: int, blocks: Sequence[Block]
    ) -> None:
        keys = list(map(_key_of, blocks))
        if HOLD_ONLY_KEY_PREFIX in b"".join(keys):
            self._complete([block for block in blocks if block.hold_only])
            blocks = [block for block in blocks if not block.hold_only]
            keys = list(map(_key_of, blocks))
        number = index.number or self._register(index)
        if not number or not keys or key_bytes > MAX_KEY_BYTES:
            self._complete(blocks)
            return
        pages = queue.size_class // SLOT_ALIGNMENT
        for rank, offsets in enumerate(zip(*map(_slots_of, blocks), strict=True)):
            self._write_parts(_head(_READY[0], key_bytes, rank, number, pages, self._age), keys, list(offsets))

    def _complete(self, blocks: Sequence[Block]) -> None:
        """Ends the grants of blocks that are not recorded: their clients do not write any more."""
        for offsets in zip(*map(_slots_of, blocks), strict=True):
            self.free(list(offsets))

    def _write_parts(self, head: bytes, keys: Sequence[bytes], offsets: Sequence[int]) -> None:
        between = bytes(MAX_KEY_BYTES - len(keys[0])) + head
        checks = struct.pack(f"<{len(keys)}I", *map(crc32, keys))
        for place, first, end in self._runs(offsets):
            self._write(self._records_at + place * _RECORD.size, head + between.join(keys[first:end]))
            self._write(self._checks_at + place * _U32.size, checks[first * _U32.size : end * _U32.size])
            self._write(self._states_at + place, _READY * (end - first))

    def forget(self, index: NamespaceIndex) -> None:
        number, index.number = index.number, 0
        tenant = self._numbers.pop(number, None)
        if tenant is not None:
            self._per_tenant[tenant] -= 1
            place = number & _INDEX_MASK
            _U32.pack_into(self._memory, self._namespace_at(place) + _U32.size, 0)  # its number
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

    def namespaces(self) -> list[tuple[int, NamespaceSpec]]:
        """Returns the recorded namespaces with their numbers. Damaged ones are left out.

        Call it before a namespace is recorded. The caller passes those that it does not use to
        `forget`.
        """
        read = [self._read_namespace(place) for place in range(MAX_NAMESPACES)]
        self._unused = deque(place for place, namespace in enumerate(read) if namespace is None)
        for number, spec in (found := list(filter(None, read))):
            self._numbers[number] = tenant = tenant_of(spec.id)
            self._per_tenant[tenant] += 1
            self._generations[number & _INDEX_MASK] = number >> _INDEX_BITS
        return found

    def continue_after(self, age: int) -> None:
        self._age = max(self._age, age)

    def _records_of(self, extent: int, slot_bytes: int) -> ExtentRecords:
        found = ExtentRecords(extent * self._extent_bytes, slot_bytes)
        pages, first, count = slot_bytes // SLOT_ALIGNMENT, self._first_place(extent), self._extent_bytes // slot_bytes
        states = bytes(self._memory[self._states_at + first :][:count])
        checks = struct.unpack(f"<{count}I", self._memory[self._checks_at + first * _U32.size :][: count * _U32.size])
        records = self._memory[self._records_at + first * _RECORD.size :][: count * _RECORD.size]
        offsets = range(found.offset, found.offset + count * slot_bytes, slot_bytes)
        head_before, fields = b"", (0, 0, 0, 0, 0, 0)
        for offset, state, check, (head, key) in zip(
            offsets, states, checks, _RECORD.iter_unpack(records), strict=True
        ):
            if state == _FREE[0]:
                continue
            if head != head_before:
                head_before, fields = head, _fields(head)
            kind, key_bytes, rank, number, record_pages, age = fields
            if kind == state == _GRANTED[0]:
                found.granted.append((offset, age))
            elif kind == state == _READY[0] and record_pages == pages and crc32(key[:key_bytes]) == check:
                found.parts.append(PartRecord(age, number, key[:key_bytes], rank, offset, slot_bytes))
            else:
                found.torn.append(offset)
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
        self._generations[place] = generation = self._generations[place] % _MAX_GENERATION + 1
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
        if not number or (number & _INDEX_MASK) != place or runs > _MAX_RUNS:
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

    def _runs(self, offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yields the slots that follow each other: place of the first one, begin and end."""
        begin, count = 0, len(offsets)
        while begin < count:
            offset, end = offsets[begin], begin + 1
            extent, within = divmod(offset, self._extent_bytes)
            if slot_bytes := self._slot_bytes[extent]:
                most = min(count, begin + (self._extent_bytes - within) // slot_bytes)
                if not begin and offsets == list(range(offset, offset + most * slot_bytes, slot_bytes)):
                    end = most  # the usual case
                while end < most and offsets[end] == offset + (end - begin) * slot_bytes:
                    end += 1
                yield self._first_place(extent) + within // slot_bytes, begin, end
            begin = end

    def _first_place(self, extent: int) -> int:
        return extent * (self._extent_bytes // SLOT_ALIGNMENT)

    def _write(self, position: int, data: bytes) -> None:
        self._memory[position : position + len(data)] = data

    def _namespace_at(self, place: int) -> int:
        return self._namespaces_at + place * _NAMESPACE_BYTES


def session_tag(session_id: bytes) -> int:
    """Returns the tag under which the slots of a session are recorded."""
    return int.from_bytes(session_id[:8], "little")


@lru_cache(maxsize=1024)
def _grant_record(tag: int) -> bytes:
    return _RECORD.pack(_head(_GRANTED[0], 0, 0, 0, 0, tag), b"")


def _head(*fields: int) -> bytes:
    """Returns the head of a record with these fields after its checksum."""
    return _HEAD.pack(crc32(_HEAD.pack(0, *fields)), *fields)


def _fields(head: bytes) -> tuple[int, int, int, int, int, int]:
    """Returns the fields of a head after its checksum; zeros if it is damaged."""
    checksum, *fields = _HEAD.unpack(head)
    return tuple(fields) if crc32(_HEAD.pack(0, *fields)) == checksum else (0, 0, 0, 0, 0, 0)


class _Sizes(NamedTuple):
    """Number of extents, bytes of the slot sizes of all extents, and largest number of slots."""

    extents: int
    classes: int
    slots: int


def _sizes(region_bytes: int, extent_bytes: int) -> _Sizes:
    extents = region_bytes // extent_bytes
    return _Sizes(extents, _whole_pages(extents * _CLASS.size), extents * (extent_bytes // SLOT_ALIGNMENT))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
