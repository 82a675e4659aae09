"""Online check of a disk store: verifies blocks against their checksums."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from ..lmdb.format import DamagedRecordError
from ..secondary_tier import NamespaceId
from ..storage.checksum import block_checksum
from ..storage.fsck import SLICE_BLOCKS, SLICE_BYTES, Finding, Slice
from ..types import NAMESPACE_BYTES
from .format import PAGE_BYTES, SlabRecord, pages_for
from .store import DiskStore

__all__ = ["check_slice"]


def check_slice(store: DiskStore, after: bytes, *, repair: bool) -> Slice:
    """Implements `fsck.Checkable.check_slice`. Raises `lmdb.Error`."""
    records = store.index.records_after(after, SLICE_BLOCKS)
    suspects: list[tuple[bytes, bytes, int, str]] = []
    whole: list[tuple[bytes, bytes, SlabRecord]] = []
    checked = nbytes = 0
    for name, packed in records:
        checked += 1
        try:
            record = SlabRecord.unpack(name, packed)
        except DamagedRecordError:
            suspects.append((name, packed, 0, "its index record is damaged"))
            continue
        if not all(map(store.slabs.holds, record.runs)):
            suspects.append((name, packed, record.nbytes, "its pages are beyond the end of the slab file"))
            continue
        whole.append((name, packed, record))
        nbytes += record.nbytes
        if nbytes >= SLICE_BYTES:
            break
    suspects += _verify(store, whole)
    findings = [finding for suspect in suspects if (finding := _confirm(store, *suspect, repair=repair))]
    at_end = checked == len(records) < SLICE_BLOCKS
    return Slice(None if at_end else records[checked - 1][0], checked, nbytes, tuple(findings))


def _verify(store: DiskStore, blocks: list[tuple[bytes, bytes, SlabRecord]]) -> Iterator[tuple[bytes, bytes, int, str]]:
    if not blocks:
        return
    buffer = memoryview(mmap.mmap(-1, sum(pages_for(record.sizes) for _, _, record in blocks) * PAGE_BYTES))
    views = []
    at = 0
    for _, _, record in blocks:
        views.append(tuple(_views(buffer[at:], record.sizes)))
        at += pages_for(record.sizes) * PAGE_BYTES
    unreadable = store.slabs.read([(record.runs, parts) for (_, _, record), parts in zip(blocks, views, strict=True)])
    for number, (name, packed, record) in enumerate(blocks):
        if number in unreadable:
            yield name, packed, record.nbytes, f"it cannot be read: {unreadable[number]}"
            continue
        namespace, key = NamespaceId(name[:NAMESPACE_BYTES]), name[NAMESPACE_BYTES:]
        if block_checksum(namespace, key, views[number]) != record.checksum:
            yield name, packed, record.nbytes, "its bytes are not those that were stored"


def _views(buffer: memoryview, sizes: tuple[int, ...]) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        yield buffer[at : at + size]
        at += pages_for((size,)) * PAGE_BYTES


def _confirm(
    store: DiskStore, name: bytes, packed: bytes, nbytes: int, problem: str, *, repair: bool
) -> Finding | None:
    """Returns a finding, or None if the block was removed or replaced after the check."""
    with store.writing:
        same = store.drop(name, packed, quarantine=True) if repair else store.index.get([name]) == [packed]
    return Finding(name, nbytes, problem, repair) if same else None
