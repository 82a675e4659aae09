"""Index of a disk store: which pages hold which block. Every change is one transaction."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import lmdb

from ..lmdb.environment import Durability, check_count, open_environment
from ..lmdb.format import DamagedRecordError
from ..lmdb.identity import guarded
from ..lmdb.index_digest import change_tally
from ..storage.fsck import Finding
from .format import DISK_STORE, SLAB_PAGES_KEY, SlabRecord

__all__ = ["Index"]

INDEX_SHARE = 64
"""The index gets 1/64 of the store's size. For blocks of 64 KiB a quarter of this is enough."""
MIN_BYTES = 1 << 20
FILL = 0.5
"""Fraction of the file that the tree may use; beyond it, `put` raises `MapFullError`. The rest is
for copies of pages that change."""


class Index:
    """An open index. Reads are thread-safe, even during a change; changes must not overlap."""

    def __init__(self, directory: Path, size_bytes: int, durability: Durability, *, repair: bool) -> None:
        """Opens or creates the index of a store of `size_bytes`. Raises `TierOpenError`."""
        wanted = max(size_bytes // INDEX_SHARE, min(MIN_BYTES, size_bytes // 4))
        self._store = open_environment(directory, wanted, durability, DISK_STORE, repair=repair)
        self._env = self._store.env
        self._blocks = self._store.index
        self.space = self._store.space
        self.warning = self._store.warning
        self.size_bytes: int = self._env.info()["map_size"]
        self._max_pages = int(self.size_bytes / self._store.page_bytes * FILL)

    def __len__(self) -> int:
        with self._env.begin() as txn:
            count: int = txn.stat(self._blocks)["entries"]
        return count

    def slab_pages(self, default: int) -> int:
        """Returns the number of pages per slab. A new store records and returns `default`."""
        with self._env.begin() as txn:
            packed = txn.get(SLAB_PAGES_KEY, db=self._store.meta)
        if packed is None:
            packed = guarded(default)
            with self._env.begin(write=True) as txn:
                txn.put(SLAB_PAGES_KEY, packed, db=self._store.meta)
        return int.from_bytes(packed[:8], "little")

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Returns packed records; None for missing names. Raises `lmdb.Error`."""
        with self._env.begin() as txn:
            return [txn.get(name, None, self._blocks) for name in names]

    def put(self, records: Sequence[tuple[bytes, SlabRecord]]) -> list[SlabRecord]:
        """Adds blocks; returns replaced records. Raises `lmdb.Error`; then nothing changed."""
        packed = [(name, record.pack(name)) for name, record in records]
        try:
            return self._put(packed)
        except lmdb.MapFullError:
            self._reclaim_freed_pages()
            return self._put(packed)

    def remove(self, names: Sequence[bytes]) -> list[SlabRecord]:
        """Removes blocks; returns their records. Raises `lmdb.Error`; then nothing changed."""
        try:
            return self._remove(names)
        except lmdb.MapFullError:
            self._reclaim_freed_pages()
            return self._remove(names)

    def scan(self) -> Iterator[tuple[bytes, SlabRecord | None]]:
        """Yields all blocks in the order of their names; None for a damaged record."""
        with self._env.begin() as txn:
            for name, packed in txn.cursor(db=self._blocks):
                try:
                    yield name, SlabRecord.unpack(name, packed)
                except DamagedRecordError:
                    yield name, None

    def lost(self, names: Iterable[bytes]) -> str | None:
        """Returns how many blocks are missing in `names`, all names with intact records."""
        return self._store.lost(names)

    def set_tally(self, names: Iterable[bytes]) -> None:
        self._store.set_tally(names)

    def check_count(self, writing: threading.Lock, *, repair: bool) -> Finding | None:
        return check_count(self._store, writing, repair=repair)

    def records_after(self, name: bytes, count: int) -> list[tuple[bytes, bytes]]:
        return self._store.records_after(name, count)

    def _put(self, packed: Sequence[tuple[bytes, bytes]]) -> list[SlabRecord]:
        replaced, added = [], []
        with self._env.begin(write=True) as txn:
            for name, record in packed:
                before = txn.replace(name, record, db=self._blocks)
                if before is None:
                    added.append(name)
                else:
                    replaced += _whole(name, before)
            tally = change_tally(txn, self._store.meta, added, ())
            stat = txn.stat(self._blocks)
            if stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] > self._max_pages:
                raise lmdb.MapFullError("the index is full")
        if tally is not None:
            self._store.marker.write(tally.blocks)
        return replaced

    def _remove(self, names: Sequence[bytes]) -> list[SlabRecord]:
        removed, there = [], []
        with self._env.begin(write=True) as txn:
            for name in names:
                packed = txn.pop(name, db=self._blocks)
                if packed is not None:
                    there.append(name)
                removed += _whole(name, packed)
            self._store.note_removed(txn, there)
        return removed

    def _reclaim_freed_pages(self) -> None:
        """Commits two tiny transactions, so that LMDB can reuse all freed pages."""
        for turn in (b"0", b"1"):
            with self._env.begin(write=True) as txn:
                txn.put(b"turn", turn, db=self._store.meta)

    def close(self) -> None:
        self._store.close()


def _whole(name: bytes, packed: bytes | None) -> list[SlabRecord]:
    """Returns the record, or [] if it is damaged. Then only a restart frees the block's pages."""
    if packed is None:
        return []
    try:
        return [SlabRecord.unpack(name, packed)]
    except DamagedRecordError:
        return []
