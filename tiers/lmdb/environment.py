"""Safe opening of an LMDB environment: a damaged file is moved aside, and the store starts empty.

`probe` checks the file for damage. If the check ends without a result, the file is not opened and
stays unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import lmdb

from ..secondary_tier import TierDamagedError, TierInUseError, TierOpenError
from ..storage.fsck import Finding
from .disk_reserve import FileSpace
from .format import DATA_FILE, DATABASES, FORMAT_VERSION
from .identity import MARKER_FILE, Layout, MarkerFile, is_ours, newer_format_is_damage, read_marker
from .index_digest import Tally, change_tally, count_reachable, read_tally, tally_of, write_tally
from .probe import FileState, examine

__all__ = ["LMDB_STORE", "Durability", "Environment", "check_count", "open_environment", "sync_directory"]

_log = logging.getLogger(__name__)

LOCK_FILE = "lock.mdb"
OWNER_FILE = "owner.lock"
MAX_READERS = 512
"""Limit of concurrent read transactions. Each running load needs one; a load beyond it fails."""
MAX_DAMAGED_FILES = 2
"""Number of damaged files to keep. The limit saves space: each may be as large as the store."""

Durability = Literal["process", "power"]
"""Which failures a stored block survives.

`process`: the end of the server process, including SIGKILL. After a power failure the store may be
empty. `power`: also a power failure. With `power`, every transaction waits for the disk.
"""


LMDB_STORE = Layout("LMDB store", DATABASES, b"format", FORMAT_VERSION)


@dataclass(frozen=True, slots=True)
class Environment:
    """An open environment, owned by this process."""

    directory: Path
    env: lmdb.Environment
    meta: Any
    index: Any
    data: Any
    """None in a layout with two databases."""
    page_bytes: int
    engine: int
    """Major version of LMDB that wrote the file."""
    owner_fd: int
    space: FileSpace
    marker: MarkerFile
    warning: str | None
    """Damage found when the environment was opened, for operators."""

    def records_after(self, name: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """Returns up to `count` index records after `name`; from the start for an empty name."""
        records: list[tuple[bytes, bytes]] = []
        with self.env.begin() as txn:
            cursor = txn.cursor(db=self.index)
            more = cursor.set_range(name + b"\0") if name else cursor.first()
            # In a damaged tree the next name can be smaller: the check must not begin again.
            while more and len(records) < count and cursor.key() > (records[-1][0] if records else name):
                records.append(cursor.item())
                more = cursor.next()
        return records

    def set_tally(self, names: Iterable[bytes]) -> None:
        """Makes `names` the blocks that the index should have. Raises `lmdb.Error`."""
        tally = tally_of(names)
        with self.env.begin() as txn:
            same = read_tally(txn, self.meta) == tally
        if not same:
            with self.env.begin(write=True) as txn:
                write_tally(txn, self.meta, tally)
        self.marker.write(tally.blocks)

    def lost(self, names: Iterable[bytes]) -> str | None:
        """Returns how many blocks are missing in `names`, all names with intact records."""
        with self.env.begin() as txn:
            expected = read_tally(txn, self.meta)
        return lost_text(expected, tally_of(names), self.marker.before)

    def note_removed(self, txn: Any, names: Sequence[bytes]) -> None:
        """Removes names from the tally and writes the lower number to the marker file.

        Call it before the commit, so that the marker file never has too many blocks.
        """
        tally = change_tally(txn, self.meta, (), names)
        if tally is not None:
            self.marker.write(tally.blocks)

    def close(self) -> None:
        """Flushes, and releases the directory."""
        try:
            self.env.sync(True)
        finally:
            self.space.close()
            self.marker.close()
            self.env.close()
            os.close(self.owner_fd)


def check_count(store: Environment, writing: threading.Lock, *, repair: bool) -> Finding | None:
    """Compares index and tally; with `repair`, corrects the tally. `writing`: lock of writers.

    Implements `fsck.Checkable.check_count`. Raises `lmdb.Error`.
    """
    with store.env.begin() as txn:
        text = lost_text(read_tally(txn, store.meta), count_reachable(txn, store.index), store.marker.before)
    if text and repair:
        with writing, store.env.begin() as txn:
            names = list(txn.cursor(store.index).iternext(values=False))
            store.set_tally(names)
    return Finding(b"", 0, text, repair) if text else None


def lost_text(expected: Tally | None, found: Tally, marked_blocks: int) -> str | None:
    """Returns how many blocks are lost, for operators; None if all are found.

    `expected` is the tally, `marked_blocks` is `MarkerFile.before`.
    """
    if expected is None:
        return f"the number of its blocks is damaged; {found.blocks} blocks can be found"
    most = max(expected.blocks, marked_blocks)
    lost = max(expected.lost(found), most - found.blocks)
    return f"{lost} of its {max(most, found.blocks)} blocks are lost" if lost else None


def open_environment(
    directory: Path, size_bytes: int, durability: Durability, layout: Layout = LMDB_STORE, *, repair: bool = True
) -> Environment:
    """Opens or creates the environment in `directory`, whose file may grow to `size_bytes`.

    A file that is already larger keeps its size. With `repair`, a damaged file is moved to
    `damaged-<n>`, and only the newest damaged files are kept; a store of an earlier format is
    emptied, because no lookup finds its blocks. Raises `TierOpenError`, without `repair` also for a
    damaged file and an earlier format. If the call raises, no file was moved.
    """
    owned_before = (directory / OWNER_FILE).exists()
    owner_fd = _own(directory, layout)
    try:
        warning = None
        size_bytes = max(size_bytes, _file_bytes(directory))
        if damage := _check(directory, size_bytes, layout, owned_before=owned_before):
            warning = _move_aside(directory, damage, layout) if repair else _refuse(directory, damage, layout)
        return _open(directory, size_bytes, durability, layout, owner_fd, warning, repair=repair)
    except BaseException as error:
        os.close(owner_fd)
        if isinstance(error, (OSError, lmdb.Error)):
            raise TierOpenError(f"cannot open the {layout.what} in {directory}: {error}") from error
        raise


def _check(directory: Path, size_bytes: int, layout: Layout, *, owned_before: bool) -> str | None:
    """Like `_find_damage`. A file that is not opened must not look like one of kvtier later."""
    try:
        return _find_damage(directory, size_bytes, layout, owned_before=owned_before)
    except BaseException:
        if not owned_before:
            (directory / OWNER_FILE).unlink(missing_ok=True)
        raise


def _find_damage(directory: Path, size_bytes: int, layout: Layout, *, owned_before: bool) -> str | None:
    """Checks the file; returns the damage of a store of kvtier, or None.

    Raises `TierOpenError` if the file belongs to another program or to a newer release, or if the
    check has no result. These files stay unchanged.
    """
    marker = read_marker(directory)
    if not _file_bytes(directory):
        return _explain_empty(directory, layout)
    state, why = examine(directory, size_bytes, layout)
    if state is FileState.SOUND:
        return None
    if state is FileState.OLDER:
        is_current = marker is not None and marker.what == layout.what and marker.format == layout.format_version
        return f"its format is damaged: {why}" if is_current else None
    if state is FileState.NEWER and not newer_format_is_damage(int(why), layout, marker):
        known = f"this release knows formats up to {layout.format_version}"
        raise TierOpenError(f"the {layout.what} in {directory} has format {why}; {known}")
    if marker is None or marker.what == layout.what:
        ours = is_ours(directory, layout)
        if state is FileState.EMPTY and not ours:
            return None
        # The marks of an unreadable file can be lost, but no other program uses these directories.
        if ours or (state is FileState.DAMAGED and (marker is not None or owned_before)):
            return why if state is not FileState.NEWER else f"its format is damaged: {why}"
    raise TierOpenError(f"the LMDB environment in {directory} is not a kvtier {layout.what}: {why}")


def _explain_empty(directory: Path, layout: Layout) -> str | None:
    """Returns why a missing or empty file is damage; None in a new directory."""
    marker = read_marker(directory)
    blocks = marker.blocks if marker is not None and marker.what == layout.what else 0
    files = [path for path in directory.glob(layout.block_files) if path.stat().st_size] if layout.block_files else []
    if blocks or (files and marker is None):
        return f"{DATA_FILE} is missing or empty"
    return None


def _own(directory: Path, layout: Layout) -> int:
    """Locks the directory for this process; returns the file descriptor of the lock."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TierOpenError(f"cannot use {directory}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise TierInUseError(f"the {layout.what} in {directory} is in use by process {owner}") from error
        raise TierOpenError(f"cannot lock {directory}: {error.strerror}") from error
    return fd


def _file_bytes(directory: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (directory / DATA_FILE).stat().st_size
    return 0


def _move_aside(directory: Path, damage: str, layout: Layout) -> str:
    earlier = _damaged(directory)
    aside = directory / f"damaged-{_number_of(earlier[-1]) + 1 if earlier else 1}"
    lost = _describe_lost(directory, layout)
    aside.mkdir(mode=0o700)
    for name in (DATA_FILE, LOCK_FILE):
        with contextlib.suppress(FileNotFoundError):
            (directory / name).rename(aside / name)
    moved = f"it was moved to {aside}, and an empty store was created"
    warning = f"the {layout.what} in {directory} was damaged ({damage}{lost}); {moved}"
    _log.error("%s", warning)
    for old in [*earlier, aside][:-MAX_DAMAGED_FILES]:
        _log.warning("removing %s: only the last %d damaged stores are kept", old, MAX_DAMAGED_FILES)
        shutil.rmtree(old, ignore_errors=True)
    return warning


def _damaged(directory: Path) -> list[Path]:
    """Returns the directories of damaged files, oldest first."""
    return sorted(filter(_number_of, directory.iterdir()), key=_number_of)


def _number_of(path: Path) -> int:
    match = re.fullmatch(r"damaged-([1-9]\d*)", path.name, re.ASCII)
    return int(match[1]) if match else 0


def _refuse(directory: Path, damage: str, layout: Layout) -> NoReturn:
    lost = _describe_lost(directory, layout)
    raise TierDamagedError(f"the {layout.what} in {directory} is damaged: {damage}{lost}")


def _describe_lost(directory: Path, layout: Layout) -> str:
    marker = read_marker(directory)
    known = marker is not None and marker.what == layout.what
    return f"; its {marker.blocks} blocks are lost" if known and marker else ""


def _open(
    directory: Path,
    size_bytes: int,
    durability: Durability,
    layout: Layout,
    owner_fd: int,
    warning: str | None,
    *,
    repair: bool,
) -> Environment:
    synchronous = durability == "power"
    env = _open_file(directory, size_bytes, layout, synchronous=synchronous)
    if (version := _format_of(env, layout)) != layout.format_version:
        env.close()
        if not repair:
            raise TierOpenError(
                f"the {layout.what} in {directory} has format {version}; this release finds none of its blocks, "
                "and the server empties it at the next start"
            )
        _remove_old(directory, version, layout)
        env = _open_file(directory, size_bytes, layout, synchronous=synchronous)
    with contextlib.ExitStack() as failed:
        failed.callback(env.close)
        env.reader_check()
        databases = _open_databases(env, layout)
        meta, index, *data = databases
        marked = None if warning else read_marker(directory)
        space = FileSpace(directory, env, databases)
        failed.callback(space.close)
        marker = MarkerFile(directory, layout, marked.blocks if marked else 0, create=repair, sync=synchronous)
        failed.callback(marker.close)
        if warning:
            marker.write(0)
        if synchronous:
            sync_directory(directory)
        environment = Environment(
            directory=directory,
            env=env,
            meta=meta,
            index=index,
            data=data[0] if data else None,
            page_bytes=env.stat()["psize"],
            engine=_engine(env),
            owner_fd=owner_fd,
            space=space,
            marker=marker,
            warning=warning,
        )
        failed.pop_all()
    return environment


def _open_file(directory: Path, size_bytes: int, layout: Layout, *, synchronous: bool) -> lmdb.Environment:
    return lmdb.open(
        str(directory),
        map_size=size_bytes,
        max_dbs=len(layout.databases),
        max_readers=MAX_READERS,
        max_spare_txns=8,
        sync=synchronous,
        metasync=synchronous,
        mode=0o600,
    )


def _format_of(env: lmdb.Environment, layout: Layout) -> int:
    """Returns the format version of a store; a new file has the current one."""
    if not env.stat()["entries"]:
        return layout.format_version
    meta = env.open_db(layout.databases[0], create=False)
    with env.begin() as txn:
        return int.from_bytes(txn.get(layout.format_key, b"", meta), "little")


def _remove_old(directory: Path, version: int, layout: Layout) -> None:
    """Removes the files of a store of an earlier format.

    `data.mdb` is the last one: if the server ends before, the next start removes the rest.
    """
    old = list(directory.glob(layout.block_files)) if layout.block_files else []
    for path in (directory / MARKER_FILE, *old, directory / LOCK_FILE, directory / DATA_FILE):
        path.unlink(missing_ok=True)
    _log.warning(
        "the %s in %s had format %d, whose blocks no lookup finds: it was emptied", layout.what, directory, version
    )


def _open_databases(env: lmdb.Environment, layout: Layout) -> list[Any]:
    """Opens the databases, which it creates in a new file."""
    if env.stat()["entries"]:
        return [env.open_db(name, create=False) for name in layout.databases]
    with env.begin(write=True) as txn:
        databases = [env.open_db(name, txn=txn) for name in layout.databases]
        txn.put(layout.format_key, layout.format_version.to_bytes(4, "little"), db=databases[0])
        write_tally(txn, databases[0], tally_of(()))
    return databases


def _engine(env: lmdb.Environment) -> int:
    # py-lmdb before 2.0 has no `lib_version`, because it contains only one LMDB version.
    version: tuple[int, ...] = env.lib_version() if hasattr(env, "lib_version") else lmdb.version()
    return version[0]


def sync_directory(directory: Path) -> None:
    """Flushes the directory entries of new files to disk. Raises `OSError`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
