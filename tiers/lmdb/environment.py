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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import lmdb

from ..base import TierDamagedError, TierInUseError, TierOpenError
from .format import DATA_FILE, DATABASES, FORMAT_VERSION
from .probe import find_damage
from .space import FileSpace

__all__ = ["LMDB_STORE", "Durability", "Environment", "Layout", "open_environment", "sync_directory"]

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


@dataclass(frozen=True, slots=True)
class Layout:
    """Databases, format and growth of an environment, and the name that messages use for it."""

    what: str
    databases: tuple[bytes, ...]
    """Names of the databases. The first database has the metadata, including the format version."""
    format_key: bytes
    format_version: int
    step_bytes: int
    """How much to reserve at once if the file needs more of the disk; at most the whole file."""


LMDB_STORE = Layout("LMDB store", DATABASES, b"format", FORMAT_VERSION, 64 << 20)


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
    warning: str | None
    """Damage found when the environment was opened, for operators."""

    def records_after(self, name: bytes, count: int) -> list[tuple[bytes, bytes]]:
        """Returns up to `count` index records after `name`; from the start for an empty name."""
        records: list[tuple[bytes, bytes]] = []
        with self.env.begin() as txn:
            cursor = txn.cursor(db=self.index)
            more = cursor.set_range(name + b"\0") if name else cursor.first()
            while more and len(records) < count:
                records.append(cursor.item())
                more = cursor.next()
        return records

    def close(self) -> None:
        """Flushes, and releases the directory."""
        try:
            self.env.sync(True)
        finally:
            self.space.close()
            self.env.close()
            os.close(self.owner_fd)


def open_environment(
    directory: Path, size_bytes: int, durability: Durability, layout: Layout = LMDB_STORE, *, mend: bool = True
) -> Environment:
    """Opens or creates the environment in `directory`, whose file may grow to `size_bytes`.

    A file that is already larger keeps its size. With `mend`, a damaged file is moved to
    `damaged-<n>`, and only the newest damaged files are kept. Raises `TierOpenError`, without
    `mend` also for a damaged file. If the call raises, no file was moved.
    """
    owner_fd = _own(directory, layout)
    try:
        warning = None
        size_bytes = max(size_bytes, _file_bytes(directory))
        if _file_bytes(directory) and (damage := find_damage(directory, size_bytes, layout.databases)):
            warning = _move_aside(directory, damage, layout) if mend else _refuse(directory, damage, layout)
        return _open(directory, size_bytes, durability, layout, owner_fd, warning)
    except BaseException as error:
        os.close(owner_fd)
        if isinstance(error, (OSError, lmdb.Error)):
            raise TierOpenError(f"cannot open the {layout.what} in {directory}: {error}") from error
        raise


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
    aside.mkdir(mode=0o700)
    for name in (DATA_FILE, LOCK_FILE):
        with contextlib.suppress(FileNotFoundError):
            (directory / name).rename(aside / name)
    warning = f"the {layout.what} in {directory} was damaged ({damage}); it was moved to {aside}, and an empty store was created"
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
    raise TierDamagedError(f"the {layout.what} in {directory} is damaged: {damage}")


def _open(
    directory: Path, size_bytes: int, durability: Durability, layout: Layout, owner_fd: int, warning: str | None
) -> Environment:
    synchronous = durability == "power"
    env = lmdb.open(
        str(directory),
        map_size=size_bytes,
        max_dbs=len(layout.databases),
        max_readers=MAX_READERS,
        max_spare_txns=8,
        sync=synchronous,
        metasync=synchronous,
        mode=0o600,
    )
    with contextlib.ExitStack() as failed:
        failed.callback(env.close)
        env.reader_check()
        _check_format(directory, env, layout)
        meta, index, *data = databases = [env.open_db(name) for name in layout.databases]
        space = FileSpace(directory, env, databases, layout.step_bytes)
        failed.callback(space.close)
        with env.begin(write=True) as txn:
            txn.put(layout.format_key, layout.format_version.to_bytes(4, "little"), db=meta)
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
            warning=warning,
        )
        failed.pop_all()
    return environment


def _check_format(directory: Path, env: lmdb.Environment, layout: Layout) -> None:
    """Refuses stores of a newer format, of another type, or of another program."""
    with env.begin() as txn:
        names = set(txn.cursor().iternext(values=False))
    if not names:
        return
    version = None
    if b"meta" in names:
        meta = env.open_db(b"meta", create=False)
        with env.begin() as txn:
            version = txn.get(layout.format_key, db=meta)
    if version is None:
        raise TierOpenError(f"the LMDB environment in {directory} is not a kvtier {layout.what}")
    found = int.from_bytes(version, "little")
    if found > layout.format_version:
        known = f"this release knows formats up to {layout.format_version}"
        raise TierOpenError(f"the {layout.what} in {directory} has format {found}; {known}")


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
