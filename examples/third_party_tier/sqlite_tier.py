"""Example of a third-party secondary tier: blocks in one SQLite file.

    PYTHONPATH=examples/third_party_tier kvtier serve --config examples/third_party_tier/kvtier.toml

Uses only `kvtier.tiers` and the standard library. See README.md beside this file.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.tiers import (
    BlockBytes,
    Entry,
    NamespaceId,
    Outcome,
    RequestInfo,
    SecondaryTier,
    TierDamagedError,
    TierHealth,
    TierInUseError,
    TierOpenError,
    Vote,
    block_checksum,
    vote,
)
from kvtier.tiers.storage.fsck import Finding, Slice

__all__ = ["SQLiteTier"]

CAPACITY_SHARE = 0.75
"""Fraction of the file for blocks. The index and half-full pages need the rest: a row of 64 KiB
needs four or five pages of 16 KiB."""
NAMESPACE_BYTES = 32
MAX_KEY_BYTES = 1024
SLICE_BLOCKS = 64

# `content` is the last column, because SQLite reads a row's pages in order. A query for the other
# columns then reads no pages of `content`.
SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused, so that an id always means the same content
    name BLOB NOT NULL UNIQUE,             -- namespace (32 bytes) and key
    nbytes INTEGER NOT NULL,
    sizes BLOB NOT NULL,                   -- of the parts, 8 bytes each
    checksum BLOB NOT NULL,
    content BLOB NOT NULL
)
"""


class SQLiteTier(SecondaryTier):
    """Blocks as rows of one table.

    A store is one transaction, so after a crash either all of its blocks exist or none.
    """

    type: ClassVar[str] = "sqlite"
    durable: ClassVar[bool] = True

    def __init__(
        self, name: str, directory: Path, size_bytes: int, durability: str = "process", *, page_bytes: int = 16384
    ) -> None:
        """Opens or creates `blocks.sqlite` in `directory`. The file has at most `size_bytes` bytes.

        `page_bytes` is an option in the configuration: a power of two from 512 to 65536. An
        existing file keeps its page size.

        Raises:
            TierOpenError: the file cannot be opened; `TierInUseError` if another process has it,
                `TierDamagedError` if it is not an SQLite file.
        """
        super().__init__(name, int(size_bytes * CAPACITY_SHARE))
        self._path = directory / "blocks.sqlite"
        self._health = TierHealth(self)
        self._connections: list[sqlite3.Connection] = []
        self._connecting = threading.Lock()
        self._mine = threading.local()
        self._limit = ""
        self._writing = threading.Lock()
        """Serializes writers: a load that drops a corrupt block also writes."""
        # With FULL, a commit survives a power failure; with NORMAL, only a crash of the process.
        self._synchronous = "FULL" if durability == "power" else "NORMAL"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _claim(directory)
        try:
            self._prepare(size_bytes, page_bytes)
        except sqlite3.Error as error:
            self.close()
            kind = TierDamagedError if _is_damage(error) else TierOpenError
            raise kind(f"cannot open {self._path}: {error}") from error

    def on_new_request(self, request: RequestInfo) -> Vote:
        """Votes by the rules of the configuration. Called on the event loop: no I/O here."""
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        """Yields the stored blocks in the order in which they were stored."""
        for name, nbytes in self._connection().execute("SELECT name, nbytes FROM blocks ORDER BY id"):
            yield Entry(NamespaceId(name[:NAMESPACE_BYTES]), name[NAMESPACE_BYTES:], nbytes)

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Writes the valid blocks in one transaction. Invalid blocks have the outcome FAILED."""
        storable = [
            len(block.namespace) == NAMESPACE_BYTES and len(block.key) <= MAX_KEY_BYTES and block.nbytes > 0
            for block in blocks
        ]
        rows = [_row_of(block) for block, good in zip(blocks, storable, strict=True) if good]
        written = self._write(
            "store",
            "INSERT OR REPLACE INTO blocks (name, nbytes, sizes, checksum, content) VALUES (?, ?, ?, ?, ?)",
            rows,
        )
        return [written if good else Outcome.FAILED for good in storable]

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        """Fills blocks and verifies them in place."""
        try:
            outcomes = [self._load(block) for block in blocks]
        except sqlite3.Error as error:
            self._health.report("load", f"cannot load: {error}")
            return [Outcome.FAILED] * len(blocks)
        self._health.report("load", None)
        return outcomes

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Removes blocks. If SQLite fails, `last_error` reports the failure."""
        self._write("remove", "DELETE FROM blocks WHERE name = ?", [(namespace + key,) for namespace, key in keys])

    def blocks_to_check(self) -> int:
        """Returns the number of blocks for `kvtier fsck`.

        With this method and `check_slice`, `kvtier fsck` can check the tier. Both are optional.
        """
        (count,) = self._connection().execute("SELECT count(*) FROM blocks").fetchone()
        return int(count)

    def check_slice(self, after: bytes, *, repair: bool) -> Slice:
        """Verifies the next blocks by name; see `kvtier.tiers.storage.fsck.Checkable`."""
        rows = self._connection().execute(
            "SELECT id, name, nbytes, sizes, checksum, content FROM blocks WHERE name > ? ORDER BY name LIMIT ?",
            (after, SLICE_BLOCKS),
        )
        last, checked, total = None, 0, 0
        damaged: list[tuple[int, bytes, int]] = []
        for number, name, nbytes, sizes, checksum, content in rows:
            last, checked, total = name, checked + 1, total + nbytes
            if _checksum(name, sizes, content) != checksum:
                damaged.append((number, name, nbytes))
        if repair and damaged:
            self._write("check", "DELETE FROM blocks WHERE id = ?", [(number,) for number, _, _ in damaged])
        problem = "its bytes are not those that were stored"
        findings = tuple(Finding(name, nbytes, problem, repair) for _, name, nbytes in damaged)
        return Slice(last if checked == SLICE_BLOCKS else None, checked, total, findings)

    def close(self) -> None:
        """Closes the file. Any thread may call this."""
        for connection in self._connections:
            connection.close()
        os.close(self._lock)

    def _prepare(self, size_bytes: int, page_bytes: int) -> None:
        connection = self._connection()
        connection.execute(f"PRAGMA page_size = {page_bytes:d}")
        connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer run concurrently
        connection.execute(SCHEMA)
        (used,) = connection.execute("PRAGMA page_size").fetchone()
        self._limit = f"PRAGMA max_page_count = {size_bytes // used:d}"
        connection.execute(self._limit)

    def _connection(self) -> sqlite3.Connection:
        """Returns this thread's connection, because a transaction belongs to one connection."""
        connection: sqlite3.Connection | None = getattr(self._mine, "connection", None)
        if connection is None:
            # Another thread may close the connection, but only this thread uses it.
            connection = sqlite3.connect(self._path, timeout=60, isolation_level=None, check_same_thread=False)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute(self._limit)  # a property of the connection, not of the file
            with self._connecting:
                self._connections.append(connection)
            self._mine.connection = connection
        return connection

    def _write(self, work: str, statement: str, rows: Sequence[tuple[object, ...]]) -> Outcome:
        """Changes rows in one transaction. Returns one outcome for all rows."""
        connection = self._connection()
        try:
            with self._writing:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    connection.executemany(statement, rows)
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:  # on a full disk SQLite has rolled back already
                        connection.execute("ROLLBACK")
                    raise
        except sqlite3.Error as error:
            self._health.report(work, f"cannot {work}: {error}")
            return Outcome.NO_SPACE if error.sqlite_errorcode == sqlite3.SQLITE_FULL else Outcome.FAILED
        self._health.report(work, None)
        return Outcome.DONE

    def _load(self, block: BlockBytes) -> Outcome:
        row = (
            self._connection()
            .execute("SELECT id, sizes, checksum, content FROM blocks WHERE name = ?", (block.namespace + block.key,))
            .fetchone()
        )
        if row is None:
            return Outcome.MISSING
        number, sizes, checksum, content = row
        if sizes == _sizes_of(block) and len(content) == block.nbytes:
            view = memoryview(content)
            for part in block.parts:
                part[:] = view[: part.nbytes]
                view = view[part.nbytes :]
            if block_checksum(block.namespace, block.key, block.parts).to_bytes(8, "little") == checksum:
                return Outcome.DONE
        # Deleted by row id, because a new block may have been stored under this name meanwhile.
        dropped = self._write("drop", "DELETE FROM blocks WHERE id = ?", [(number,)])
        return Outcome.CORRUPT if dropped is Outcome.DONE else Outcome.FAILED


def _claim(directory: Path) -> int:
    """Locks the directory for this process; the lock ends with the process."""
    lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise TierInUseError(f"{directory} is in use by another process") from None
    return lock


def _is_damage(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _row_of(block: BlockBytes) -> tuple[object, ...]:
    checksum = block_checksum(block.namespace, block.key, block.parts).to_bytes(8, "little")
    return block.namespace + block.key, block.nbytes, _sizes_of(block), checksum, b"".join(block.parts)


def _sizes_of(block: BlockBytes) -> bytes:
    return struct.pack(f"<{len(block.parts)}Q", *(part.nbytes for part in block.parts))


def _checksum(name: bytes, sizes: bytes, content: bytes) -> bytes | None:
    """Returns the checksum of a row, or None if its parts cannot be separated."""
    if len(sizes) % 8:
        return None
    lengths = [size for (size,) in struct.iter_unpack("<Q", sizes)]
    if sum(lengths) != len(content):
        return None
    view, parts = memoryview(content), []
    for size in lengths:
        parts.append(view[:size])
        view = view[size:]
    return block_checksum(NamespaceId(name[:NAMESPACE_BYTES]), name[NAMESPACE_BYTES:], tuple(parts)).to_bytes(
        8, "little"
    )
