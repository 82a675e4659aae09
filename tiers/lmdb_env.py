"""Opening an LMDB environment so that nothing found on the disk can take the server down.

LMDB maps its file and trusts it: some kinds of damage end in SIGBUS, SIGSEGV or a failed assertion, and with them the
process. So a child process walks the file first. What it does not survive is moved aside, and the store starts empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lmdb

from .base import TierOpenError
from .lmdb_format import CHUNK_PAGES, FORMAT_VERSION

__all__ = ["Durability", "Environment", "open_environment"]

_log = logging.getLogger(__name__)

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
OWNER_FILE = "owner.lock"
FORMAT_KEY = b"format"
DATABASES = (b"meta", b"index", b"data")
MAX_READERS = 512
"""Read transactions open at once: one per load that runs."""
PROBE_SECONDS = 60.0
UNWRITTEN_PAGES = 2048
"""How many pages before its last page number a sound file may end."""


Durability = Literal["process", "power"]
"""What a block that was reported as stored survives.

`process`: the end of the server, SIGKILL included; after a power failure the store may have to start empty.
`power`: a power failure too; every transaction waits for the disk.
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """An open environment, which this process owns until `close`."""

    directory: Path
    env: lmdb.Environment
    meta: Any
    index: Any
    data: Any
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


def open_environment(directory: Path, size_bytes: int, durability: Durability) -> Environment:
    """Opens or creates the environment in `directory`, whose file may grow to `size_bytes`.

    A file that is longer already keeps its length. A damaged one is moved to `damaged-<n>` beside it and
    kept. Raises `TierOpenError`.
    """
    owner_fd = _own(directory)
    try:
        warning = None
        size_bytes = max(size_bytes, _file_bytes(directory))
        if damage := _find_damage(directory, size_bytes):
            warning = _move_aside(directory, damage)
        return _open(directory, size_bytes, durability, owner_fd, warning)
    except BaseException as error:
        os.close(owner_fd)
        if isinstance(error, (OSError, lmdb.Error)):
            raise TierOpenError(f"cannot open the LMDB store in {directory}: {error}") from error
        raise


def _own(directory: Path) -> int:
    """Takes the lock that makes this process the only one; returns its file descriptor."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TierOpenError(f"cannot use {directory} for an LMDB store: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise TierOpenError(f"the LMDB store in {directory} is in use by process {owner}") from error
        raise TierOpenError(f"cannot lock {directory}: {error.strerror}") from error
    return fd


def _file_bytes(directory: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (directory / DATA_FILE).stat().st_size
    return 0


# Walks the trees (long values are not touched), then rehearses a write, which reads the list of free pages; aborted and
# without a lock, it leaves nothing behind. A file may end before its last page number says (one in 25 did, by up to 31
# pages): a page that is freed by the transaction which added it is never written. Such an end is filled in, so that
# nothing that is read there can be a SIGBUS.
_PROBE = rf"""
import collections, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
directory, size_bytes, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path.append(path)
import lmdb
try:
    env = lmdb.open(directory, map_size=size_bytes, max_dbs={len(DATABASES)}, lock=False, create=False)
    page = env.stat()["psize"]
    file = os.path.join(directory, "{DATA_FILE}")
    have, need = os.path.getsize(file), (env.info()["last_pgno"] + 1) * page
    if have < need - {UNWRITTEN_PAGES} * page:
        raise lmdb.CorruptedError(f"the file ends at {{have}} bytes, and {{need}} are in use")
    if have < need:
        os.truncate(file, need)
    with env.begin() as txn:
        names = set(txn.cursor().iternext(values=False))
    ours = {set(DATABASES)!r}
    if names and not names & ours:
        sys.exit("it is another program's")
    dbs = [env.open_db(name, create=False) for name in names & ours]
    with env.begin(buffers=True) as txn:
        for db in dbs:
            collections.deque(txn.cursor(db).iternext(), maxlen=0)
    txn = env.begin(write=True)
    try:
        for db in dbs:
            txn.put(b"\xff" * 14, bytes({CHUNK_PAGES} * page - 16), db=db)
    except lmdb.MapFullError:
        pass
    txn.abort()
except lmdb.VersionMismatchError as error:
    print("foreign", error)
except lmdb.Error as error:
    print("damaged", error)
else:
    print("sound")
"""


def _find_damage(directory: Path, size_bytes: int) -> str | None:
    """Looks through an existing file in a child process; returns what is wrong with it, or None."""
    if not _file_bytes(directory):
        return None
    packages = str(Path(lmdb.__file__).parent.parent)
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(directory), str(size_bytes), packages]
    try:
        child = subprocess.run(  # noqa: S603 - our own text
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"looking through it took longer than {PROBE_SECONDS:.0f} s"
    verdict, _, why = child.stdout.strip().partition(" ")
    if verdict == "sound":
        return None
    if child.returncode < 0:
        return f"looking through it ended in signal {-child.returncode} {child.stderr.strip()[-200:]}".strip()
    if verdict == "damaged":
        return why
    raise TierOpenError(f"cannot look through the LMDB store in {directory}: {why or child.stderr.strip()[-500:]}")


def _move_aside(directory: Path, damage: str) -> str:
    number = 1
    while (aside := directory / f"damaged-{number}").exists():
        number += 1
    aside.mkdir(mode=0o700)
    for name in (DATA_FILE, LOCK_FILE):
        with contextlib.suppress(FileNotFoundError):
            (directory / name).rename(aside / name)
    warning = f"the LMDB store in {directory} was damaged ({damage}); it was moved to {aside} and a new one begun"
    _log.error("%s", warning)
    return warning


def _open(directory: Path, size_bytes: int, durability: Durability, owner_fd: int, warning: str | None) -> Environment:
    synchronous = durability == "power"
    env = lmdb.open(
        str(directory),
        map_size=size_bytes,
        max_dbs=len(DATABASES),
        max_readers=MAX_READERS,
        max_spare_txns=8,
        sync=synchronous,
        metasync=synchronous,
        mode=0o600,
    )
    try:
        env.reader_check()
        _check_format(directory, env)
        meta, index, data = (env.open_db(name) for name in DATABASES)
        with env.begin(write=True) as txn:
            txn.put(FORMAT_KEY, FORMAT_VERSION.to_bytes(4, "little"), db=meta)
        if synchronous:
            _sync_directory(directory)
        return Environment(
            directory=directory,
            env=env,
            meta=meta,
            index=index,
            data=data,
            page_bytes=env.stat()["psize"],
            engine=_engine(env),
            owner_fd=owner_fd,
            warning=warning,
        )
    except BaseException:
        env.close()
        raise


def _check_format(directory: Path, env: lmdb.Environment) -> None:
    """Refuses what is not ours: a store of a newer release, or another program's."""
    with env.begin() as txn:
        names = set(txn.cursor().iternext(values=False))
    if not names:
        return
    version = None
    if b"meta" in names:
        meta = env.open_db(b"meta", create=False)
        with env.begin() as txn:
            version = txn.get(FORMAT_KEY, db=meta)
    if version is None:
        raise TierOpenError(f"the LMDB environment in {directory} is not a kvtier store")
    found = int.from_bytes(version, "little")
    if found > FORMAT_VERSION:
        raise TierOpenError(
            f"the LMDB store in {directory} has format {found}; this release knows formats up to {FORMAT_VERSION}"
        )


def _engine(env: lmdb.Environment) -> int:
    # py-lmdb before 2.0 has no choice of engines
    version: tuple[int, ...] = env.lib_version() if hasattr(env, "lib_version") else lmdb.version()
    return version[0]


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
