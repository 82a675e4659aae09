"""LMDB tier: blocks in an embedded database on a local disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import lmdb

from ..negotiation import vote
from ..secondary_tier import BlockBytes, Entry, NamespaceId, Outcome, RequestInfo, SecondaryTier, TierOpenError, Vote
from ..storage.batching import BATCH_BLOCKS, batches
from ..storage.disk_space import FULL
from ..storage.fsck import Finding, Slice
from ..storage.health import TierHealth
from ..types import NAMESPACE_BYTES
from .blocks import (
    WrongPagesError,
    clear_orphans,
    delete_block,
    delete_blocks,
    last_record_id,
    put_blocks,
    read_block,
    read_index,
)
from .check import check_slice
from .disk_reserve import RESERVE_PAGES
from .environment import Durability, check_count, open_environment
from .format import PAGE_HEADER_BYTES, DamagedRecordError, entries_of, is_name, is_storable, names_of
from .index_digest import change_tally

__all__ = ["LMDBTier"]

_log = logging.getLogger(__name__)

_MIB = 1 << 20
PAYLOAD_SHARE = 0.8
"""Fraction of the file that blocks may use. The rest is for trees, for gaps, and for pages that the
last two transactions freed and that LMDB cannot reuse yet."""
WRITE_BYTES = 16 * _MIB
"""Largest payload of one write transaction. The limit is lower for a small file, because LMDB
reuses freed pages only two transactions later."""
READ_BYTES = 2 * _MIB
"""Payload after which a read transaction ends. LMDB does not reuse pages that are freed meanwhile.
A transaction costs a microsecond, a tenth of the load of 64 KiB."""
READER_CHECK_EVERY = 1024

HEADERS_ARE_BOUNDED = int(lmdb.__version__.partition(".")[0]) >= 3
"""Whether py-lmdb (3.0 or later) ensures that LMDB never frees more pages than the file has."""


class LMDBTier(SecondaryTier):
    """Blocks in one LMDB environment; see `format`.

    A batch is one transaction of up to 16 MiB, so a partial block is never visible. LMDB maps its
    file, so an unreadable disk sector ends the process with SIGBUS.
    """

    type: ClassVar[str] = "lmdb"
    durable: ClassVar[bool] = True

    def __init__(
        self, name: str, directory: Path, size_bytes: int, durability: Durability, *, repair: bool = True
    ) -> None:
        """Opens or creates the store in `directory`; its file never grows beyond `size_bytes`.

        A file that is already larger keeps its size. With `repair`, a damaged file is moved aside
        and reported in `last_error`. Raises `TierOpenError`, without `repair` also for a damaged
        file.
        """
        super().__init__(name, int(size_bytes * PAYLOAD_SHARE))
        self._store = open_environment(directory, size_bytes, durability, repair=repair)
        self._write_bytes = min(WRITE_BYTES, size_bytes // 32)
        self._writer = threading.Lock()
        """Lock of all writers: stores, and loads that drop a corrupt block."""
        self._writes = 0
        self._has_freed_pages = True
        """Whether freed pages may exist that the next transaction cannot use yet."""
        self._health = TierHealth(self)
        self._health.report("open", self._store.warning)
        try:
            with self._store.env.begin() as txn:
                self._record_id = last_record_id(self._store, txn)
        except (lmdb.Error, DamagedRecordError) as error:
            self._store.close()
            raise TierOpenError(f"cannot read the LMDB store in {directory}: {error!r}") from error

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        """Yields the blocks in store order. Removes damaged index records."""
        with self._store.env.begin() as txn:
            records, damaged = read_index(self._store, txn)
        names = [name for _, name, _ in records]
        self._health.report("lost", self._store.lost(names))
        if damaged:
            self._clear(damaged, {record_id for record_id, _, _ in records})
        self._set_tally(names)
        yield from entries_of(records)

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for batch in batches(blocks, self._write_bytes):
            storable = list(map(is_storable, batch))
            fit = [block for block, good in zip(batch, storable, strict=True) if good]
            written = self._write(fit) if fit else Outcome.DONE
            outcomes += [written if good else Outcome.FAILED for good in storable]
            if not all(storable):
                self._health.report("store", "was given a block without bytes, or with a key that is too long")
        return outcomes

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Copies blocks from the mapped file and verifies the copies. Drops corrupt blocks."""
        outcomes = [Outcome.MISSING] * len(blocks)
        names = list(names_of(blocks).items())
        done = 0
        while done < len(names):
            done = self._load_some(blocks, names, done, outcomes)
        if Outcome.CORRUPT in outcomes:
            for number, name in names:
                if outcomes[number] is Outcome.CORRUPT:
                    outcomes[number] = self._drop(name)
        if Outcome.FAILED not in outcomes:
            self._health.report("load", None)
        return outcomes

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        index_keys = [namespace + key for namespace, key in keys if is_name(namespace, key)]
        for start in range(0, len(index_keys), BATCH_BLOCKS):
            self._remove(index_keys[start : start + BATCH_BLOCKS])

    def blocks_to_check(self) -> int:
        with self._store.env.begin() as txn:
            count: int = txn.stat(self._store.index)["entries"]
        return count

    def free_disk_bytes(self) -> int:
        return shutil.disk_usage(self._store.directory).free

    def check_slice(self, after: bytes, *, repair: bool) -> Slice:
        return check_slice(self._store, self._writer, after, repair=repair)

    def check_count(self, *, repair: bool) -> Finding | None:
        return check_count(self._store, self._writer, repair=repair)

    def close(self) -> None:
        self._store.close()

    def _write(self, blocks: Sequence[BlockBytes]) -> Outcome:
        space = self._store.space
        try:
            with self._writer:
                # Each block may need a new leaf page, for its record and short rests.
                space.ensure(sum(block.nbytes for block in blocks) // self._store.page_bytes + len(blocks))
                self._put_or_reclaim(blocks)
        except (lmdb.Error, OSError) as error:
            full = self._is_full(error)
            self._health.report("store", f"cannot store: {self._describe(error, full=full)}")
            return Outcome.NO_SPACE if full else Outcome.FAILED
        # The disk can be full although the store succeeded, in space that a removal had freed.
        self._health.report("store", space.refusal.text and f"cannot store: {space.refusal.text}")
        return Outcome.DONE

    def _put_or_reclaim(self, blocks: Sequence[BlockBytes]) -> None:
        try:
            self._put(blocks)
        except lmdb.Error as error:
            if not self._has_freed_pages or not self._is_full(error):
                raise
            self._reclaim_freed_pages()
            self._put(blocks)

    def _put(self, blocks: Sequence[BlockBytes]) -> None:
        with self._store.env.begin(write=True, buffers=True) as txn:
            added = put_blocks(self._store, txn, blocks, self._record_id + 1)
            self._record_id += len(blocks)
            tally = change_tally(txn, self._store.meta, added, ())
            self._keep_reserve(txn)
        if tally is not None:
            self._store.marker.write(tally.blocks)
        self._has_freed_pages = True
        self._writes += 1
        if self._writes % READER_CHECK_EVERY == 0:
            self._store.env.reader_check()

    def _reclaim_freed_pages(self) -> None:
        """Commits a tiny transaction, so that LMDB can reuse pages that earlier ones freed."""
        with self._store.env.begin(write=True) as txn:
            txn.put(b"turn", self._record_id.to_bytes(8, "little"), db=self._store.meta)
        self._has_freed_pages = False

    def _is_full(self, error: lmdb.Error | OSError) -> bool:
        """Returns whether the storage is full. LMDB reports a short write as an I/O error."""
        if isinstance(error, OSError):
            return error.errno in FULL
        if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) or getattr(error, "code", 0) in FULL:
            return True
        return shutil.disk_usage(self._store.directory).free < self._write_bytes

    def _describe(self, error: lmdb.Error | OSError, *, full: bool) -> str:
        """Returns the text of an error. If the disk is full, the text has the free bytes."""
        if isinstance(error, lmdb.Error):
            if isinstance(error, lmdb.MapFullError) or not full:
                return str(error)
            code = getattr(error, "code", 0)
            error = OSError(code if code in FULL else errno.ENOSPC, "")
        return self._store.space.refusal.describe(error)

    def _keep_reserve(self, txn: Any) -> None:
        """Raises `MapFullError` if fewer than `RESERVE_PAGES` pages would be left for removals.

        Allocates and frees these pages to find out, if the file is nearly full.
        """
        info, page_bytes = self._store.env.info(), self._store.page_bytes
        if info["map_size"] - info["last_pgno"] * page_bytes > 4 * self._write_bytes + RESERVE_PAGES * page_bytes:
            return
        page = bytes(page_bytes - PAGE_HEADER_BYTES)
        for put in (True, False):
            for number in range(RESERVE_PAGES):
                key = b"reserve-%d" % number
                txn.put(key, page, db=self._store.meta) if put else txn.delete(key, db=self._store.meta)

    def _load_some(
        self, blocks: Sequence[BlockBytes], names: Sequence[tuple[int, bytes]], at: int, outcomes: list[Outcome]
    ) -> int:
        """Loads blocks in one transaction, from position `at` of `names` (number of a block, name).

        Returns the position after the last block. After an error this is the next block, as the
        transaction may be unusable.
        """
        nbytes, is_read = 0, False
        try:
            with self._store.env.begin(buffers=True) as txn:
                while at < len(names) and nbytes < READ_BYTES:
                    number, name = names[at]
                    outcomes[number] = read_block(self._store, txn, name, blocks[number])
                    nbytes += blocks[number].nbytes
                    at += 1
                is_read = True
        except lmdb.Error as error:
            self._health.report("load", f"cannot load: {error}")
            if not is_read:
                outcomes[names[at][0]] = Outcome.FAILED
                at += 1
        return at

    def _drop(self, name: bytes) -> Outcome:
        _log.warning("tier %s: block %s is corrupt and is dropped", self.name, name[NAMESPACE_BYTES:].hex())
        return Outcome.CORRUPT if self._remove([name]) else Outcome.FAILED

    def _remove(self, index_keys: Sequence[bytes]) -> bool:
        """Removes blocks, in halves if the file is nearly full; returns whether all are removed."""
        try:
            with self._writer:
                self._delete(index_keys)
            self._has_freed_pages = True
        except lmdb.Error as error:
            middle, full = len(index_keys) // 2, self._is_full(error)
            if full and middle:
                first, second = self._remove(index_keys[:middle]), self._remove(index_keys[middle:])
                return first and second
            self._health.report("remove", f"cannot remove: {self._describe(error, full=full)}")
            return False
        self._health.report("remove", None)
        return True

    def _delete(self, index_keys: Sequence[bytes]) -> None:
        """Removes blocks in one transaction. If one is damaged, uses `delete_block` for each."""
        if HEADERS_ARE_BOUNDED:
            with contextlib.suppress(WrongPagesError, lmdb.CorruptedError):
                with self._store.env.begin(write=True, buffers=True) as txn:
                    self._store.note_removed(txn, delete_blocks(self._store, txn, index_keys))
                return
        with self._store.env.begin(write=True, buffers=True) as txn:
            cursor = txn.cursor(db=self._store.data)
            removed = [key for key in index_keys if delete_block(self._store, txn, key, cursor)]
            self._store.note_removed(txn, removed)

    def _set_tally(self, names: Sequence[bytes]) -> None:
        try:
            with self._writer:
                self._store.set_tally(names)
        except lmdb.Error as error:
            self._health.report("lost", f"cannot correct the number of blocks: {error}")

    def _clear(self, damaged: Sequence[bytes], live: set[int]) -> None:
        _log.warning("tier %s: %d index records are damaged and are dropped", self.name, len(damaged))
        try:
            with self._writer, self._store.env.begin(write=True, buffers=True) as txn:
                clear_orphans(self._store, txn, live, damaged)
        except (lmdb.Error, DamagedRecordError) as error:
            self._health.report("clear", f"cannot remove damaged records: {error!r}")
