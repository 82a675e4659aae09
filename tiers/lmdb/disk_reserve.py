"""Disk space of an LMDB file: reserved before a store, so that removals always have room.

LMDB never overwrites a page that a reader may use. So a removal also writes new pages, and would
fail on a full disk. The reserve also turns a full disk into a clear error before a transaction,
instead of "Input/output error" at its end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb

from ..storage.disk_space import FULL, ROOM_BYTES, DiskRefusal, reserve_blocks
from .format import DATA_FILE

__all__ = ["RESERVE_PAGES", "FileSpace"]

STEP_BYTES = 16 << 20
"""How much to reserve at once if the file needs more of the disk; at most the whole file."""
RESERVE_PAGES = 32
"""Stores leave this many pages free for removals. A removal needs about a dozen pages (copies of
tree paths) before it frees pages."""
_META_PAGES = 2
_UNRESERVED_PAGES = 16
"""Pages at the end of the file that are not reserved: the lock files count against the size too."""


class FileSpace:
    """Blocks of the disk that belong to an LMDB file. Calls must not overlap."""

    def __init__(self, directory: Path, env: lmdb.Environment, databases: Sequence[Any]) -> None:
        """Reserves what the file uses and one step; a full disk is no error. Raises `OSError`."""
        self.refusal = DiskRefusal(directory)
        self._env = env
        self._databases = databases
        self._page_bytes: int = env.stat()["psize"]
        self._step_pages = STEP_BYTES // self._page_bytes
        self._limit_pages: int = env.info()["map_size"] // self._page_bytes - _UNRESERVED_PAGES
        self._pages = 0
        self._fd = os.open(directory / DATA_FILE, os.O_RDWR | os.O_CLOEXEC)
        used: int = env.info()["last_pgno"] + 1
        self._extend(used + 2 * RESERVE_PAGES, used + self._step_pages)

    def ensure(self, pages: int) -> None:
        """Reserves room for a transaction that adds `pages`, and for removals after it.

        Raises `OSError` if the disk is full; then the transaction could take the removals' room.
        """
        if self._pages >= self._limit_pages and self.refusal.error is None:
            return
        missing = self._used_pages() + pages + 2 * RESERVE_PAGES - self._pages
        if missing > 0 or (self.refusal.error is not None and self.refusal.retry_due()):
            least = max(missing, ROOM_BYTES // self._page_bytes if self.refusal.error else 1)
            self._extend(self._pages + least, self._pages + self._step_pages)
            missing = self._used_pages() + pages + 2 * RESERVE_PAGES - self._pages
        if missing > 0 and self._pages < self._limit_pages and self.refusal.error is not None:
            raise self.refusal.error

    def close(self) -> None:
        os.close(self._fd)

    def _used_pages(self) -> int:
        with self._env.begin() as txn:
            stats = [self._env.stat(), *(txn.stat(db) for db in self._databases)]
        return _META_PAGES + sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)

    def _extend(self, least: int, wanted: int) -> None:
        """Reserves up to `wanted` pages in all, on a full disk fewer, but at least `least`."""
        least = min(least, self._limit_pages)
        wanted = min(max(least, wanted), self._limit_pages)
        while True:
            try:
                reserve_blocks(self._fd, wanted * self._page_bytes)
            except OSError as error:
                if error.errno in FULL and wanted > least:
                    wanted = least + (wanted - least) // 2
                    continue
                self.refusal.record(error)
            else:
                self._pages = max(self._pages, wanted)
                self.refusal.record(None)
            return
