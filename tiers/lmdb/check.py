"""Online check of an LMDB store: verifies blocks against their checksums."""

from __future__ import annotations

import threading

from ..secondary_tier import BlockBytes, NamespaceId, Outcome
from ..storage.fsck import SLICE_BLOCKS, SLICE_BYTES, Finding, Slice
from ..types import NAMESPACE_BYTES
from .blocks import clear_orphans, delete_block, read_block, read_index
from .environment import Environment
from .format import BlockRecord, DamagedRecordError

__all__ = ["check_slice"]


def check_slice(store: Environment, writing: threading.Lock, after: bytes, *, repair: bool) -> Slice:
    """Implements `fsck.Checkable.check_slice`. `writing`: lock of writers. Raises `lmdb.Error`."""
    records = store.records_after(after, SLICE_BLOCKS)
    findings: list[Finding] = []
    checked = nbytes = 0
    file_bytes = store.env.info()["map_size"]
    for name, packed in records:
        if nbytes >= SLICE_BYTES:
            break
        try:
            sizes = BlockRecord.unpack(name, packed).sizes
        except DamagedRecordError:
            sizes, problem = (), "its index record is damaged"
        else:
            if sum(sizes) > file_bytes:
                sizes, problem = (), "its sizes are impossible"
            else:
                problem = _verify(store, name, sizes)
        checked += 1
        nbytes += sum(sizes)
        if problem and _confirm(store, writing, name, packed, damaged=not sizes, repair=repair):
            findings.append(Finding(name, sum(sizes), problem, repair))
    at_end = checked == len(records) < SLICE_BLOCKS
    return Slice(None if at_end else records[checked - 1][0], checked, nbytes, tuple(findings))


def _verify(store: Environment, name: bytes, sizes: tuple[int, ...]) -> str:
    parts = tuple(memoryview(bytearray(size)) for size in sizes)
    block = BlockBytes(NamespaceId(name[:NAMESPACE_BYTES]), name[NAMESPACE_BYTES:], parts)
    with store.env.begin(buffers=True) as txn:
        outcome = read_block(store, txn, name, block)
    return "its bytes are not those that were stored" if outcome is Outcome.CORRUPT else ""


def _confirm(
    store: Environment, writing: threading.Lock, name: bytes, packed: bytes, *, damaged: bool, repair: bool
) -> bool:
    """Returns whether a damaged block is unchanged since the check; removes it if `repair`."""
    with writing:
        with store.env.begin() as txn:
            if txn.get(name, db=store.index) != packed:
                return False
            # The chunks of a damaged record are those that belong to no intact record.
            live = {record_id for record_id, _, _ in read_index(store, txn)[0]} if repair and damaged else set()
        if repair:
            with store.env.begin(write=True, buffers=True) as txn:
                if damaged:
                    clear_orphans(store, txn, live, [name])
                else:
                    delete_block(store, txn, name, txn.cursor(db=store.data))
                store.note_removed(txn, [name])
        return True
