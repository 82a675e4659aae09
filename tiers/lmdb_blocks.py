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
    DamagedRecordError,
    Record,
    chunk_key,
    chunk_prefix,
    chunk_spans,
    record_id_of,
)

__all__ = ["clear_orphans", "delete_block", "last_record_id", "put_block", "read_block", "read_index"]

_PAGE_HEADER = struct.Struct("=QHHI")
_OVERFLOW, _DIRTY = 0x04, 0x10
_ENGINE_WITH_THIS_HEADER = 0
"""LMDB 0.9; the pages of 1.0 begin otherwise."""
_SHORT_BYTES = 4096
"""Up to here a copy may hold the GIL: it takes less time than letting go of it."""


def put_block(store: Environment, txn: Any, block: BlockBytes, record_id: int) -> None:
    """Writes a block, replacing what was there. `record_id` must be greater than any before it."""
    index_key = block.namespace + block.key
    checksum = block_checksum(block.namespace, block.key, block.parts)
    record = Record(record_id, checksum, tuple(part.nbytes for part in block.parts)).pack(index_key)
    if not txn.put(index_key, record, overwrite=False, db=store.index):
        delete_block(store, txn, index_key)
        txn.put(index_key, record, db=store.index)
    for part_number, part in enumerate(block.parts):
        for chunk_number, (start, stop) in enumerate(chunk_spans(part.nbytes, store.page_bytes)):
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
    for part_number, part in enumerate(block.parts):
        target = writable_address_of(part) if part.nbytes else 0
        for chunk_number, (start, stop) in enumerate(chunk_spans(part.nbytes, store.page_bytes)):
            chunk = txn.get(chunk_key(record.record_id, part_number, chunk_number), db=store.data)
            if chunk is None or len(chunk) != stop - start:
                return Outcome.CORRUPT
            if len(chunk) > _SHORT_BYTES:
                copy_from(target + start, chunk)
            else:
                part[start:stop] = chunk
    whole = block_checksum(block.namespace, block.key, block.parts) == record.checksum
    return Outcome.DONE if whole else Outcome.CORRUPT


def delete_block(store: Environment, txn: Any, index_key: bytes) -> None:
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
    _delete_chunks(store, txn, record.record_id)


def read_index(store: Environment, txn: Any) -> tuple[list[tuple[int, bytes, int]], list[bytes]]:
    """Returns record id, index key and bytes of every block, oldest first, and the keys of damaged records.

    Reads no block. Plain tuples, for there may be millions, and the garbage collector leaves these alone.
    """
    records, damaged = [], []
    for key, value in txn.cursor(db=store.index):
        try:
            record_id, _, sizes = Record.unpack(key, value)
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
    for record_id in sorted(owners - live):
        _delete_chunks(store, txn, record_id)


def last_record_id(store: Environment, txn: Any) -> int:
    """Returns the highest record id in use: every block has at least one chunk."""
    cursor = txn.cursor(db=store.data)
    return record_id_of(bytes(cursor.key())) if cursor.last() else 0


def _delete_chunks(store: Environment, txn: Any, record_id: int) -> None:
    prefix = chunk_prefix(record_id)
    cursor = txn.cursor(db=store.data)
    more = cursor.set_range(prefix)
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
