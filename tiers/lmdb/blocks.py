"""Operations on blocks in an LMDB environment, within a transaction of the caller."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import lmdb

from ...protos.buffers import address_of
from ..secondary_tier import BlockBytes, Outcome
from ..storage.checksum import checksum_of
from .environment import Environment
from .format import (
    PAGE_HEADER_BYTES,
    TAILS_BYTES,
    BlockRecord,
    Cut,
    DamagedRecordError,
    chunk_prefix,
    cut,
    parse_record,
    record_id_of,
)

__all__ = [
    "WrongPagesError",
    "clear_orphans",
    "delete_block",
    "delete_blocks",
    "last_record_id",
    "put_blocks",
    "read_block",
    "read_index",
]

_PAGE_HEADER = struct.Struct("=QHHI")
_OVERFLOW, _DIRTY = 0x04, 0x10
_ENGINE_WITH_THIS_HEADER = 0
"""Major version of LMDB 0.9. Pages of LMDB 1.0 have another header."""


class WrongPagesError(Exception):
    """A record, a chunk or the page header of a chunk is damaged."""


def put_blocks(store: Environment, txn: Any, blocks: Sequence[BlockBytes], first_id: int) -> list[bytes]:
    """Writes blocks with distinct names, replacing stored blocks of the same names.

    Returns the names that are new. Record ids count up from `first_id`, which must be greater than
    all stored record ids.
    """
    records: list[tuple[bytes, bytes]] = []
    put, added = txn.cursor(db=store.data).putmulti(_chunks(store, blocks, first_id, records), append=True)
    if added < put:
        raise lmdb.CorruptedError("the chunks of the store are out of order")
    _, added = txn.cursor(db=store.index).putmulti(records, overwrite=False)
    replaced = _replace(store, txn, records) if added < len(records) else set()
    return [name for name, _ in records if name not in replaced]


def read_block(store: Environment, txn: Any, name: bytes, block: BlockBytes) -> Outcome:
    """Fills and verifies the parts of a block. `name`: its namespace and key.

    The transaction must be open with `buffers=True`.
    """
    packed = txn.get(name, None, store.index)
    if packed is None:
        return Outcome.MISSING
    try:
        # The checksum of the block also detects a damaged record, so the record is not verified.
        record_id, checksum, sizes, tails = parse_record(bytes(packed))
    except DamagedRecordError:
        return Outcome.CORRUPT
    if sizes != block.sizes:
        return Outcome.CORRUPT
    where = cut(sizes, store.page_bytes, tails=bool(tails))
    filled = _fill(store, txn, record_id, tails, where, block.parts)
    return Outcome.DONE if filled and checksum_of(name, block.parts) == checksum else Outcome.CORRUPT


def delete_block(store: Environment, txn: Any, index_key: bytes, cursor: Any) -> bool:
    """Removes a block's record and chunks. The chunks of a damaged record stay (`clear_orphans`).

    `cursor`: a cursor of `store.data`, the same one for all blocks of a transaction. Returns
    whether there was a record.
    """
    packed = txn.get(index_key, db=store.index)
    if packed is None:
        return False
    packed = bytes(packed)
    txn.delete(index_key, db=store.index)
    try:
        record = BlockRecord.unpack(index_key, packed)
    except DamagedRecordError:
        return True
    _delete_chunks(store, cursor, record.record_id)
    return True


def delete_blocks(store: Environment, txn: Any, names: Sequence[bytes]) -> list[bytes]:
    """Removes blocks at half the cost of `delete_block`; returns those that were present.

    Does not read page headers, but compares the number of freed pages with the expected number.
    Raises WrongPagesError if the numbers differ or a record is damaged. The caller must then abort
    the transaction, which undoes all changes.
    """
    before = txn.stat(store.data)["overflow_pages"]
    records, data = txn.cursor(db=store.index), store.data
    pages, removed = 0, []
    for name in names:
        packed = records.pop(name)
        if packed is None:
            continue
        removed.append(name)
        try:
            record = BlockRecord.unpack(name, packed)
        except DamagedRecordError:
            raise WrongPagesError from None
        prefix = chunk_prefix(record.record_id)
        where = cut(record.sizes, store.page_bytes, tails=bool(record.tails))
        pages += where.pages
        for chunk in where.chunks:
            if not txn.delete(prefix + chunk[0], b"", data):
                raise WrongPagesError
    if before - txn.stat(data)["overflow_pages"] != pages:
        raise WrongPagesError
    return removed


def read_index(store: Environment, txn: Any) -> tuple[list[tuple[int, bytes, int]], list[bytes]]:
    """Returns (record id, index key, size) per block, oldest first, and keys of damaged records.

    Reads only the index. There may be millions of blocks, so the result has plain tuples, which the
    garbage collector does not track.
    """
    records, damaged = [], []
    for key, value in txn.cursor(db=store.index):
        try:
            record_id, _, sizes, _ = BlockRecord.unpack(key, value)
        except DamagedRecordError:
            damaged.append(key)
        else:
            records.append((record_id, key, sum(sizes)))
    records.sort()
    return records, damaged


def clear_orphans(store: Environment, txn: Any, live: set[int], damaged: Sequence[bytes]) -> None:
    """Removes the records of the keys `damaged`, and chunks whose record id is not in `live`."""
    for index_key in damaged:
        txn.delete(index_key, db=store.index)
    owners = {record_id_of(bytes(key)) for key in txn.cursor(db=store.data).iternext(values=False)}
    cursor = txn.cursor(db=store.data)
    for record_id in sorted(owners - live):
        _delete_chunks(store, cursor, record_id)


def last_record_id(store: Environment, txn: Any) -> int:
    """Returns the highest record id, or 0. The last chunk has this id: every block has a chunk."""
    cursor = txn.cursor(db=store.data)
    return record_id_of(bytes(cursor.key())) if cursor.last() else 0


def _cut(store: Environment, sizes: tuple[int, ...]) -> Cut:
    """Returns the layout of a new block, with the tails in the record unless they are too long."""
    with_tails = cut(sizes, store.page_bytes, tails=True)
    return with_tails if with_tails.tail_bytes <= TAILS_BYTES else cut(sizes, store.page_bytes, tails=False)


def _chunks(
    store: Environment, blocks: Sequence[BlockBytes], record_id: int, records: list[tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, memoryview]]:
    """Yields the chunks of blocks; appends the name and record of each block to `records`.

    Hashes each block just before the write, so that the write finds the bytes in the CPU cache.
    """
    for block in blocks:
        name, parts = block.namespace + block.key, block.parts
        sizes = block.sizes
        where = _cut(store, sizes)
        tails = b"".join([parts[part][start:] for part, start in where.tails])
        records.append((name, BlockRecord(record_id, checksum_of(name, parts), sizes, tails).pack(name)))
        prefix = chunk_prefix(record_id)
        for suffix, part, start, stop in where.chunks:
            yield prefix + suffix, parts[part][start:stop]
        record_id += 1


def _replace(store: Environment, txn: Any, records: Sequence[tuple[bytes, bytes]]) -> set[bytes]:
    """Overwrites existing records and removes the chunks of the old blocks; returns their names."""
    cursor, replaced = txn.cursor(db=store.data), set()
    for name, record in records:
        if bytes(txn.get(name, None, store.index)) != record:
            delete_block(store, txn, name, cursor)
            txn.put(name, record, db=store.index)
            replaced.add(name)
    return replaced


def _fill(store: Environment, txn: Any, record_id: int, tails: bytes, where: Cut, parts: Sequence[memoryview]) -> bool:
    """Fills parts from the record's tails and from chunks; returns whether all have the right size.

    `get` reads the pages without the GIL. The copy holds the GIL for at most 25 µs, because
    releasing and reacquiring the GIL next to a busy event loop can take longer.
    """
    if len(tails) != where.tail_bytes:
        return False
    at = 0
    for part, start in where.tails:
        view = parts[part][start:]
        view[:] = tails[at : at + view.nbytes]
        at += view.nbytes
    prefix, data = chunk_prefix(record_id), store.data
    for suffix, number, start, stop in where.chunks:
        chunk = txn.get(prefix + suffix, None, data)
        if chunk is None or len(chunk) != stop - start:
            return False
        parts[number][start:stop] = chunk
    return True


def _delete_chunks(store: Environment, cursor: Any, record_id: int) -> None:
    prefix = chunk_prefix(record_id)
    # After the previous deletion, the cursor often points to the first chunk of this block already.
    more = bytes(cursor.key()[: len(prefix)]) == prefix or cursor.set_range(prefix)
    while more and bytes(cursor.key()[: len(prefix)]) == prefix:
        if _may_be_freed(store, cursor.value()):
            cursor.delete()  # moves the cursor to the next chunk
            more = bool(cursor.key())
        else:
            more = cursor.next()


def _may_be_freed(store: Environment, chunk: memoryview) -> bool:
    """Returns whether the page header of a long chunk is intact.

    LMDB frees as many pages as the header says. A damaged header could free pages of other blocks.
    """
    if len(chunk) <= store.page_bytes // 2 or store.engine != _ENGINE_WITH_THIS_HEADER:
        return True
    header = ctypes.string_at(address_of(chunk) - PAGE_HEADER_BYTES, PAGE_HEADER_BYTES)
    _, _, flags, pages = _PAGE_HEADER.unpack(header)
    needed = -(-(len(chunk) + PAGE_HEADER_BYTES) // store.page_bytes)
    return bool(flags & ~_DIRTY == _OVERFLOW and pages == needed)
