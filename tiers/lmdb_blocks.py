"""Blocks in an LMDB environment: what happens to one block inside a transaction that the caller begins and ends."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import lmdb

from .addresses import address_of, copy_from, writable_address_of
from .base import BlockBytes, Outcome
from .checksum import block_checksum
from .lmdb_env import Environment
from .lmdb_format import (
    PAGE_HEADER_BYTES,
    TAILS_BYTES,
    DamagedRecordError,
    Record,
    chunk_key,
    chunk_prefix,
    chunk_spans,
    record_id_of,
    tail_bytes,
)

__all__ = ["clear_orphans", "data_cursor", "delete_block", "last_record_id", "put_block", "read_block", "read_index"]

_PAGE_HEADER = struct.Struct("=QHHI")
_OVERFLOW, _DIRTY = 0x04, 0x10
_ENGINE_WITH_THIS_HEADER = 0
"""LMDB 0.9; the pages of 1.0 begin otherwise."""
_SHORT_BYTES = 128 << 10
"""Up to here a copy may hold the GIL, for 5 µs: to have it back can take ten times as long beside a busy event loop."""


def put_block(store: Environment, txn: Any, block: BlockBytes, record_id: int) -> None:
    """Writes a block, replacing what was there. `record_id` must be greater than any before it."""
    index_key = block.namespace + block.key
    checksum = block_checksum(block.namespace, block.key, block.parts)
    tails, kept = _tails(block.parts, store.page_bytes)
    record = Record(record_id, checksum, tuple(part.nbytes for part in block.parts), tails).pack(index_key)
    if not txn.put(index_key, record, overwrite=False, db=store.index):
        delete_block(store, txn, index_key, data_cursor(store, txn))
        txn.put(index_key, record, db=store.index)
    for part_number, part in enumerate(block.parts):
        spans = chunk_spans(part.nbytes, store.page_bytes)
        for chunk_number, (start, stop) in enumerate(spans[:-1] if kept[part_number] else spans):
            key = chunk_key(record_id, part_number, chunk_number)
            if not txn.put(key, part[start:stop], append=True, db=store.data):
                raise lmdb.CorruptedError("the chunks of the store are out of order")


def read_block(store: Environment, txn: Any, block: BlockBytes) -> Outcome:
    """Fills the parts of a block and verifies them. The transaction must be one with buffers."""
    index_key = block.namespace + block.key
    packed = txn.get(index_key, db=store.index)
    if packed is None:
        return Outcome.MISSING
    try:
        record = Record.unpack(index_key, bytes(packed))
    except DamagedRecordError:
        return Outcome.CORRUPT
    if record.sizes != tuple(part.nbytes for part in block.parts):
        return Outcome.CORRUPT
    if not _fill_tails(block.parts, record.tails, store.page_bytes):
        return Outcome.CORRUPT
    for part_number, part in enumerate(block.parts):
        if not _fill(store, txn, record, part_number, part):
            return Outcome.CORRUPT
    whole = block_checksum(block.namespace, block.key, block.parts) == record.checksum
    return Outcome.DONE if whole else Outcome.CORRUPT


def data_cursor(store: Environment, txn: Any) -> Any:
    """Returns what `delete_block` goes through the chunks with: one for all blocks of a transaction."""
    return txn.cursor(db=store.data)


def delete_block(store: Environment, txn: Any, index_key: bytes, cursor: Any) -> None:
    """Removes a block's record and chunks. The chunks of a damaged record stay, until `clear_orphans` finds them."""
    packed = txn.get(index_key, db=store.index)
    if packed is None:
        return
    packed = bytes(packed)
    txn.delete(index_key, db=store.index)
    try:
        record = Record.unpack(index_key, packed)
    except DamagedRecordError:
        return
    _delete_chunks(store, cursor, record.record_id)


def read_index(store: Environment, txn: Any) -> tuple[list[tuple[int, bytes, int]], list[bytes]]:
    """Returns record id, index key and bytes of every block, oldest first, and the keys of damaged records.

    Reads no block. Plain tuples, for there may be millions, and the garbage collector leaves these alone.
    """
    records, damaged = [], []
    for key, value in txn.cursor(db=store.index):
        try:
            record_id, _, sizes, _ = Record.unpack(key, value)
        except DamagedRecordError:
            damaged.append(key)
        else:
            records.append((record_id, key, sum(sizes)))
    records.sort()
    return records, damaged


def clear_orphans(store: Environment, txn: Any, live: set[int], damaged: Sequence[bytes]) -> None:
    """Removes damaged records, and the chunks that belong to no record in `live`."""
    for index_key in damaged:
        txn.delete(index_key, db=store.index)
    owners = {record_id_of(bytes(key)) for key in txn.cursor(db=store.data).iternext(values=False)}
    cursor = data_cursor(store, txn)
    for record_id in sorted(owners - live):
        _delete_chunks(store, cursor, record_id)


def last_record_id(store: Environment, txn: Any) -> int:
    """Returns the highest record id in use: every block has at least one chunk."""
    cursor = txn.cursor(db=store.data)
    return record_id_of(bytes(cursor.key())) if cursor.last() else 0


def _tails(parts: Sequence[memoryview], page_bytes: int) -> tuple[bytes, list[int]]:
    """Returns what of the parts' ends goes into the record, and how many bytes of each part that is."""
    kept = [tail_bytes(part.nbytes, page_bytes) for part in parts]
    if sum(kept) > TAILS_BYTES:
        return b"", [0] * len(parts)
    return b"".join([part[part.nbytes - nbytes :] for part, nbytes in zip(parts, kept, strict=True) if nbytes]), kept


def _fill_tails(parts: Sequence[memoryview], tails: bytes, page_bytes: int) -> bool:
    """Fills the ends of parts from a record; returns whether it has what it should have."""
    start = 0
    if tails:
        for part in parts:
            nbytes = tail_bytes(part.nbytes, page_bytes)
            end = tails[start : start + nbytes]
            if len(end) != nbytes:
                return False
            part[part.nbytes - nbytes :] = end
            start += nbytes
    return start == len(tails)


def _fill(store: Environment, txn: Any, record: Record, part_number: int, part: memoryview) -> bool:
    """Fills a part from its chunks; returns whether all of them are there.

    The pages are in memory by then: `get` touches them, without the GIL.
    """
    spans = chunk_spans(part.nbytes, store.page_bytes)
    if record.tails and tail_bytes(part.nbytes, store.page_bytes):
        spans = spans[:-1]
    for chunk_number, (start, stop) in enumerate(spans):
        chunk = txn.get(chunk_key(record.record_id, part_number, chunk_number), db=store.data)
        if chunk is None or len(chunk) != stop - start:
            return False
        if stop - start <= _SHORT_BYTES:
            part[start:stop] = chunk
        else:
            copy_from(writable_address_of(part) + start, chunk)
    return True


def _delete_chunks(store: Environment, cursor: Any, record_id: int) -> None:
    prefix = chunk_prefix(record_id)
    # Blocks that were stored together often go together: then the cursor is there already.
    more = bytes(cursor.key()[: len(prefix)]) == prefix or cursor.set_range(prefix)
    while more and bytes(cursor.key()[: len(prefix)]) == prefix:
        if _may_be_freed(store, cursor.value()):
            cursor.delete()  # and goes on to the next
            more = bool(cursor.key())
        else:
            more = cursor.next()


def _may_be_freed(store: Environment, chunk: memoryview) -> bool:
    """Whether the header in front of a long chunk is whole.

    LMDB reads in it how many pages to free, and believes what it reads: pages of other blocks among them.
    """
    if len(chunk) <= store.page_bytes // 2 or store.engine != _ENGINE_WITH_THIS_HEADER:
        return True
    header = ctypes.string_at(address_of(chunk) - PAGE_HEADER_BYTES, PAGE_HEADER_BYTES)
    _, _, flags, pages = _PAGE_HEADER.unpack(header)
    needed = -(-(len(chunk) + PAGE_HEADER_BYTES) // store.page_bytes)
    return bool(flags & ~_DIRTY == _OVERFLOW and pages == needed)
