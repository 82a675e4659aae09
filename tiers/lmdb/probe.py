"""Checks an LMDB file in a child process before it is opened.

LMDB maps its file and does not check the content. Some kinds of damage would end the server with
SIGBUS, SIGSEGV or a failed assertion. So a child process reads the file first. The file counts as
damaged if the child reports damage or crashes while it reads the file. If the child ends in another
way (interrupted, killed, timed out, not started), the check has no result.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lmdb

from ..base import TierOpenError
from .format import CHUNK_PAGES, DATA_FILE, DATABASES

__all__ = ["SILENCE_SECONDS", "UNWRITTEN_PAGES", "find_damage"]

UNWRITTEN_PAGES = 2048
"""An intact file may lack up to this many pages at the end (see the comment below)."""
SILENCE_SECONDS = 60.0
"""Time limit for the check of 10,000 records; after it, the check has no result. A cold disk with
500 pages/s needs less than 1 s."""
END_SECONDS = 5.0
"""Time limit for the end of the child, which a slow disk may delay. After it, the check has
no result."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)

# The kernel kills the child when the thread that started the child ends. This thread waits for the
# result, so it does not end before the child.
# The child reads the trees, but not the long values. Then the child begins a write, because LMDB
# reads the list of free pages for a write. The child aborts the write, so the data does not change.
# A file may end before the last page that LMDB has numbered: 1 of 25 files did, by up to 31 pages.
# The reason is that LMDB does not write a page that one transaction both adds and frees. The child
# extends such a file, because reading beyond the end would cause SIGBUS.
_PROBE = rf"""
import ctypes, os, sys
parent, directory, size_bytes, path = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
ours = {{name.encode() for name in sys.argv[5:]}}
ctypes.CDLL(None).prctl(1, ctypes.c_ulong({signal.SIGKILL:d}))  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    sys.exit("the parent has ended")
import itertools, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path.append(path)
import lmdb


def say(*words):
    print(*words, flush=True)


def fill_in(env):
    page = env.stat()["psize"]
    need = (env.info()["last_pgno"] + 1) * page
    fd = os.open(os.path.join(directory, "{DATA_FILE}"), os.O_RDWR)
    have = os.fstat(fd).st_size
    if have < need - {UNWRITTEN_PAGES} * page:
        raise lmdb.CorruptedError(f"the file has only {{have}} of the {{need}} bytes that LMDB uses")
    if have < need:  # never shrink the file
        os.ftruncate(fd, need)
    os.close(fd)


def walk(txn, db):
    records = txn.cursor(db).iternext()
    left = txn.stat(db)["entries"]
    while seen := sum(1 for _ in itertools.islice(records, 10_000)):
        left -= seen
        if left < 0:  # a page refers back to an earlier page
            raise lmdb.CorruptedError("a tree has more records than its header says")
        say("walking")


def look():
    env = lmdb.open(directory, map_size=size_bytes, max_dbs=len(ours), lock=False, create=False)
    fill_in(env)
    with env.begin() as txn:
        names = set(txn.cursor().iternext(values=False))
    if names and not names & ours:
        return "unfit", "it has no database of kvtier"
    dbs = [env.open_db(name, create=False) for name in names & ours]
    with env.begin(buffers=True) as txn:
        for db in dbs:
            walk(txn, db)
    txn = env.begin(write=True)
    try:
        for db in dbs:
            txn.put(b"\xff" * 14, bytes({CHUNK_PAGES} * env.stat()["psize"] - 16), db=db)
    except lmdb.MapFullError:
        pass
    txn.abort()
    return ("sound",)


DAMAGE = (
    lmdb.BadTxnError, lmdb.BadValsizeError, lmdb.CorruptedError, lmdb.CursorFullError, lmdb.IncompatibleError,
    lmdb.InvalidError, lmdb.NotFoundError, lmdb.PageFullError, lmdb.PageNotFoundError, lmdb.PanicError,
)
say("looking")
try:
    say(*look())
except DAMAGE as error:
    say("damaged", error)
except (lmdb.Error, OSError) as error:
    say("unfit", error)
"""


def find_damage(directory: Path, size_bytes: int, databases: Sequence[bytes] = DATABASES) -> str | None:
    """Checks the file in `directory` in a child process; returns the damage, or None.

    The caller must own the directory, and must not have opened the file. Blocks while the child
    makes progress. Raises `TierOpenError` if the check has no result; the file is then unchanged.
    """
    status, said = _run(directory, size_bytes, databases)
    outcome, _, why = (said.splitlines() or [""])[-1].partition(" ")
    if outcome == "sound":
        return None
    if outcome == "damaged":
        return why
    if outcome == "unfit":
        raise _no_result(directory, why)
    if -status in _CRASHES and said.startswith("looking\n"):
        return f"the check of the file crashed with {_signal_name(-status)} {_error_text(said)}".strip()
    if status < 0:
        raise _no_result(directory, f"the checking process was ended by {_signal_name(-status)}")
    raise _no_result(directory, _error_text(said) or f"the checking process ended with exit status {status}")


def _run(directory: Path, size_bytes: int, databases: Sequence[bytes]) -> tuple[int, str]:
    packages = str(Path(lmdb.__file__).parent.parent)
    arguments = [str(os.getpid()), str(directory), str(size_bytes), packages, *map(os.fsdecode, databases)]
    child = subprocess.Popen(  # noqa: S603 - the program text is a constant
        [sys.executable, "-I", "-S", "-c", _PROBE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C must not reach the child
    )
    try:
        said = _listen(child, directory)
        return child.wait(END_SECONDS), said
    except subprocess.TimeoutExpired:
        raise _no_result(directory, "the checking process does not end") from None
    finally:
        child.kill()
        if child.stdout is not None:
            child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_SECONDS)


def _listen(child: subprocess.Popen[bytes], directory: Path) -> str:
    """Returns the child's output. Waits as long as the child makes progress."""
    assert child.stdout is not None
    said = bytearray()
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    while poll.poll(SILENCE_SECONDS * 1000):
        piece = os.read(child.stdout.fileno(), 1 << 16)
        if not piece:
            return said.decode(errors="replace")
        said += piece
    raise _no_result(directory, f"the check made no progress for {SILENCE_SECONDS:g} s")


def _no_result(directory: Path, why: str) -> TierOpenError:
    return TierOpenError(f"cannot check the LMDB file in {directory}, which is unchanged: {why}")


def _error_text(said: str) -> str:
    return said.replace("looking\n", "").replace("walking\n", "").strip()[-500:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
