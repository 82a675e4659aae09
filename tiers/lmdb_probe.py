"""Looks through an LMDB file before this process trusts it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lmdb

from .base import TierOpenError
from .lmdb_format import CHUNK_PAGES

__all__ = ["DATA_FILE", "UNWRITTEN_PAGES", "file_bytes", "find_damage"]

DATA_FILE = "data.mdb"
PROBE_SECONDS = 60.0
UNWRITTEN_PAGES = 2048
"""How many pages before its last page number a sound file may end."""

# Walks the trees (long values are not touched), then rehearses a write, which reads the list of free pages; aborted and
# without a lock, it leaves nothing behind. A file may end before its last page number says (one in 25 did, by up to 31
# pages): a page that is freed by the transaction which added it is never written. Such an end is filled in, so that
# nothing that is read there can be a SIGBUS.
_PROBE = rf"""
import collections, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
directory, size_bytes, path, *ours = sys.argv[1:]
ours = {{name.encode() for name in ours}}
sys.path.append(path)
import lmdb
try:
    env = lmdb.open(directory, map_size=int(size_bytes), max_dbs=len(ours), lock=False, create=False)
    page = env.stat()["psize"]
    file = os.path.join(directory, "{DATA_FILE}")
    have, need = os.path.getsize(file), (env.info()["last_pgno"] + 1) * page
    if have < need - {UNWRITTEN_PAGES} * page:
        raise lmdb.CorruptedError(f"the file ends at {{have}} bytes, and {{need}} are in use")
    if have < need:
        os.truncate(file, need)
    with env.begin() as txn:
        names = set(txn.cursor().iternext(values=False))
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


def file_bytes(directory: Path) -> int:
    """Returns the length of an environment's file; 0 where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return (directory / DATA_FILE).stat().st_size
    return 0


def find_damage(directory: Path, size_bytes: int, databases: Sequence[bytes]) -> str | None:
    """Looks through an existing file in a child process; returns what is wrong with it, or None.

    Raises `TierOpenError` for a file that is not ours to judge.
    """
    if not file_bytes(directory):
        return None
    packages = str(Path(lmdb.__file__).parent.parent)
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(directory), str(size_bytes), packages]
    command += [name.decode() for name in databases]
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
    raise TierOpenError(
        f"cannot look through the LMDB environment in {directory}: {why or child.stderr.strip()[-500:]}"
    )
