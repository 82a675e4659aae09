"""Opening an LMDB environment so that nothing found on the disk can take the server down.

What is damaged (see `lmdb_probe`) is moved aside, and the store starts empty. What could not be looked through is refused
and stays as it is.
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

__all__ = ["LMDB_STORE", "Durability", "Environment", "Layout", "open_environment", "sync_directory"]

_log = logging.getLogger(__name__)

LOCK_FILE = "lock.mdb"
OWNER_FILE = "owner.lock"
MAX_READERS = 512
"""Read transactions open at once: one per load that runs."""
KEPT_DAMAGED = 2
"""Damaged files that are kept, the newest: each may be as large as the store."""


Durability = Literal["process", "power"]
"""What a block that was reported as stored survives.

`process`: the end of the server, SIGKILL included; after a power failure the store may have to start empty.
`power`: a power failure too; every transaction waits for the disk.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """What an environment is for: its name for people, its databases, and the version of its format."""

    what: str
    databases: tuple[bytes, ...]
    """The first is for what is known of the store as a whole, the format's version among it."""
    format_key: bytes
    format_version: int


LMDB_STORE = Layout("LMDB store", DATABASES, b"format", FORMAT_VERSION)


@dataclass(frozen=True, slots=True)
class Environment:
    """An open environment, which this process owns until `close`."""

    directory: Path
    env: lmdb.Environment
    meta: Any
    index: Any
    data: Any
    """None in a layout of two databases."""
    page_bytes: int
    engine: int
    """Major version of the LMDB that the file is for."""
    owner_fd: int
    warning: str | None
    """What was wrong when it was opened, for people."""

    def close(self) -> None:
        """Flushes, and lets go of the directory."""
        try:
            self.env.sync(True)
        finally:
            self.env.close()
            os.close(self.owner_fd)


def open_environment(
    directory: Path, size_bytes: int, durability: Durability, layout: Layout = LMDB_STORE, *, mend: bool = True
) -> Environment:
    """Opens or creates the environment in `directory`, whose file may grow to `size_bytes`.

    A file that is longer already keeps its length. A damaged one is moved to `damaged-<n>` beside it, and the newest
    of these are kept; with `mend` off it stays and is refused. Raises `TierOpenError`, and then has moved nothing.
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
    """Takes the lock that makes this process the only one; returns its file descriptor."""
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
    warning = f"the {layout.what} in {directory} was damaged ({damage}); it was moved to {aside} and a new one begun"
    _log.error("%s", warning)
    for old in [*earlier, aside][:-KEPT_DAMAGED]:
        _log.warning("removing %s: only the last %d damaged stores are kept", old, KEPT_DAMAGED)
        shutil.rmtree(old, ignore_errors=True)
    return warning


def _damaged(directory: Path) -> list[Path]:
    """Returns where damaged files were moved to, the oldest first."""
    return sorted(filter(_number_of, directory.iterdir()), key=_number_of)


def _number_of(path: Path) -> int:
    """Returns the n of `damaged-<n>`; 0 of anything else."""
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
    try:
        env.reader_check()
        _check_format(directory, env, layout)
        meta, index, *data = (env.open_db(name) for name in layout.databases)
        with env.begin(write=True) as txn:
            txn.put(layout.format_key, layout.format_version.to_bytes(4, "little"), db=meta)
        if synchronous:
            sync_directory(directory)
        return Environment(
            directory=directory,
            env=env,
            meta=meta,
            index=index,
            data=data[0] if data else None,
            page_bytes=env.stat()["psize"],
            engine=_engine(env),
            owner_fd=owner_fd,
            warning=warning,
        )
    except BaseException:
        env.close()
        raise


def _check_format(directory: Path, env: lmdb.Environment, layout: Layout) -> None:
    """Refuses what is not ours: a store of a newer release, of another type, or another program's."""
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
    # py-lmdb before 2.0 has no choice of engines
    version: tuple[int, ...] = env.lib_version() if hasattr(env, "lib_version") else lmdb.version()
    return version[0]


def sync_directory(directory: Path) -> None:
    """Waits until the names of new files are on the disk. Raises `OSError`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
