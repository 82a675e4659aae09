"""The index of a disk store: which block is where. Every change is one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb

from ..lmdb.environment import Durability, open_environment
from ..lmdb.format import DamagedRecordError
from .format import DISK_STORE, SLAB_PAGES_KEY, SlabRecord

__all__ = ["Index"]

INDEX_SHARE = 64
"""One in so many bytes of the store's size is for the index: blocks of 64 KiB use a quarter of that."""
MIN_BYTES = 1 << 20
FILL = 0.5
"""How much of the file its tree may use: each change copies the pages that it touches, a removal too."""


class Index:
    """An open index. Reads may run on any threads, beside one change at a time."""

    def __init__(self, directory: Path, size_bytes: int, durability: Durability, *, mend: bool) -> None:
        """Opens or creates the index of a store of `size_bytes`. Raises `TierOpenError`."""
        wanted = max(size_bytes // INDEX_SHARE, min(MIN_BYTES, size_bytes // 4))
        self._store = open_environment(directory, wanted, durability, DISK_STORE, mend=mend)
        self._env = self._store.env
        self._blocks = self._store.index
        self.size_bytes: int = self._env.info()["map_size"]
        """What its file may grow to."""
        self._max_pages = int(self.size_bytes / self._store.page_bytes * FILL)

    @property
    def warning(self) -> str | None:
        """What was wrong when it was opened, for people."""
        return self._store.warning

    def __len__(self) -> int:
        with self._env.begin() as txn:
            count: int = txn.stat(self._blocks)["entries"]
        return count

    def slab_pages(self, default: int) -> int:
        """Returns how many pages a slab of this store has; the first to ask decides."""
        with self._env.begin() as txn:
            packed = txn.get(SLAB_PAGES_KEY, db=self._store.meta)
        if packed is None:
            packed = default.to_bytes(8, "little")
            with self._env.begin(write=True) as txn:
                txn.put(SLAB_PAGES_KEY, packed, db=self._store.meta)
        return int.from_bytes(packed, "little")

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Returns packed records, None for names that are not there. Raises `lmdb.Error`."""
        with self._env.begin() as txn:
            return [txn.get(name, db=self._blocks) for name in names]

    def put(self, records: Sequence[tuple[bytes, SlabRecord]]) -> list[SlabRecord]:
        """Adds blocks and returns the records that they replace. Raises `lmdb.Error`, and then nothing has changed."""
        packed = [(name, record.pack(name)) for name, record in records]
        try:
            return self._put(packed)
        except lmdb.MapFullError:
            self._take_in_pages()
            return self._put(packed)

    def remove(self, names: Sequence[bytes]) -> list[SlabRecord]:
        """Removes blocks and returns their records. Raises `lmdb.Error`, and then nothing has changed."""
        try:
            return self._remove(names)
        except lmdb.MapFullError:
            self._take_in_pages()
            return self._remove(names)

    def scan(self) -> Iterator[tuple[bytes, SlabRecord | None]]:
        """Yields all blocks, in the order of their names; None for a record that is damaged."""
        with self._env.begin() as txn:
            for name, packed in txn.cursor(db=self._blocks):
                try:
                    yield name, SlabRecord.unpack(name, packed)
                except DamagedRecordError:
                    yield name, None

    def names_after(self, name: bytes, count: int) -> list[bytes]:
        """Returns up to `count` names that follow a name."""
        names: list[bytes] = []
        with self._env.begin() as txn:
            cursor = txn.cursor(db=self._blocks)
            more = cursor.set_range(name + b"\0") if name else cursor.first()
            while more and len(names) < count:
                names.append(cursor.key())
                more = cursor.next()
        return names

    def _put(self, packed: Sequence[tuple[bytes, bytes]]) -> list[SlabRecord]:
        replaced = []
        with self._env.begin(write=True) as txn:
            for name, record in packed:
                replaced += _whole(name, txn.replace(name, record, db=self._blocks))
            stat = txn.stat(self._blocks)
            if stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] > self._max_pages:
                raise lmdb.MapFullError("the index is full")
        return replaced

    def _remove(self, names: Sequence[bytes]) -> list[SlabRecord]:
        removed = []
        with self._env.begin(write=True) as txn:
            for name in names:
                removed += _whole(name, txn.pop(name, db=self._blocks))
        return removed

    def _take_in_pages(self) -> None:
        """Commits next to nothing, twice: what the last two changes freed can be used by the one after these."""
        for turn in (b"0", b"1"):
            with self._env.begin(write=True) as txn:
                txn.put(b"turn", turn, db=self._store.meta)

    def close(self) -> None:
        """Flushes, and lets go of the directory."""
        self._store.close()


def _whole(name: bytes, packed: bytes | None) -> list[SlabRecord]:
    """Returns the record, unless there is none or it is damaged: the pages of that one are free at the next start."""
    if packed is None:
        return []
    try:
        return [SlabRecord.unpack(name, packed)]
    except DamagedRecordError:
        return []
