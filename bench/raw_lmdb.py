"""Bare LMDB database, without kvtier: the limit of the LMDB tier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import lmdb
import xxhash

__all__ = ["RawLmdb", "drop_cache"]


WRITE_BYTES = 16 << 20
READ_BYTES = 8 << 20


class RawLmdb:
    """LMDB environment with the settings of kvtier for durability "process"."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._env: Any = lmdb.open(str(directory), map_size=size_bytes, sync=False, metasync=False)

    def put(
        self, keys: Sequence[bytes], values: Sequence[memoryview], old: Sequence[bytes] = (), *, summed: bool = False
    ) -> None:
        """Writes values in large transactions and deletes `old`; `summed`: with checksums."""
        per_transaction = max(1, WRITE_BYTES // values[0].nbytes)
        for start in range(0, len(keys), per_transaction):
            with self._env.begin(write=True) as transaction:
                for index in range(start, min(start + per_transaction, len(keys))):
                    if old:
                        transaction.delete(old[index])
                    if summed:
                        xxhash.xxh3_64_intdigest(values[index])
                    transaction.put(keys[index], values[index])

    def get(self, keys: Sequence[bytes], destinations: Sequence[memoryview], *, summed: bool = False) -> None:
        """Copies values out of the memory map; `summed`: with checksums."""
        per_transaction = max(1, READ_BYTES // destinations[0].nbytes)
        for start in range(0, len(keys), per_transaction):
            with self._env.begin(buffers=True) as transaction:
                for index in range(start, min(start + per_transaction, len(keys))):
                    destinations[index][:] = transaction.get(keys[index])
                    if summed:
                        xxhash.xxh3_64_intdigest(destinations[index])

    def close(self) -> None:
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def drop_cache(directory: Path) -> None:
    """Drops the page cache of the files in a directory, except pages touched through a map."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
