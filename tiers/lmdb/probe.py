"""Checks an LMDB file in a child process before it is opened.

LMDB maps its file and trusts its content. Some kinds of damage end the process with SIGBUS, SIGSEGV
or a failed assertion. So a child process walks the file first. The file is damaged if the child
says so or crashes during the walk. Any other end of the child (interrupted, killed, timed out, not
started) says nothing about the file.
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
"""An intact file may end this many pages before its last page number."""
SILENCE_SECONDS = 60.0
"""Limit per 10,000 records. A cold disk with 500 pages/s needs less than 1 s."""
END_SECONDS = 5.0
"""How long to wait for the end of the child; a disk may delay it."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)

# The child asks to be killed with its parent (with the thread that started it, which waits for the
# result). It walks the trees without touching long values, then rehearses a write, which reads the
# list of free pages. The write is aborted and takes no lock, so it changes nothing. A file may end
# before its last page number (one in 25 did, by up to 31 pages), because a page that is freed by
# the transaction that added it is never written. Such an end is filled in, so that reading it
# cannot cause SIGBUS.
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
        raise lmdb.CorruptedError(f"the file ends at {{have}} bytes, and {{need}} are in use")
    if have < need:  # never to shrink it
        os.ftruncate(fd, need)
    os.close(fd)


def walk(txn, db):
    records = txn.cursor(db).iternext()
    left = txn.stat(db)["entries"]
    while seen := sum(1 for _ in itertools.islice(records, 10_000)):
        left -= seen
        if left < 0:  # a tree that leads back into itself
            raise lmdb.CorruptedError("a tree has more records than it should")
        say("walking")


def look():
    env = lmdb.open(directory, map_size=size_bytes, max_dbs=len(ours), lock=False, create=False)
    fill_in(env)
    with env.begin() as txn:
        names = set(txn.cursor().iternext(values=False))
    if names and not names & ours:
        return "unfit", "it is another program's"
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

    Called by the owner of the directory before it opens the file. Blocks while the child makes
    progress. Raises `TierOpenError` if there is no result; the file is unchanged.
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
        return f"looking through it ended in {_signal_name(-status)} {_error_text(said)}".strip()
    if status < 0:
        raise _no_result(directory, f"the process that looked through it was ended by {_signal_name(-status)}")
    raise _no_result(directory, _error_text(said) or f"the process that looked through it ended with {status}")


def _run(directory: Path, size_bytes: int, databases: Sequence[bytes]) -> tuple[int, str]:
    packages = str(Path(lmdb.__file__).parent.parent)
    arguments = [str(os.getpid()), str(directory), str(size_bytes), packages, *map(os.fsdecode, databases)]
    child = subprocess.Popen(  # noqa: S603 - our own text
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
        raise _no_result(directory, "the process that looked through it does not end") from None
    finally:
        child.kill()
        if child.stdout is not None:
            child.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_SECONDS)


def _listen(child: subprocess.Popen[bytes], directory: Path) -> str:
    """Returns the child's output. Waits as long as it makes progress."""
    assert child.stdout is not None
    said = bytearray()
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    while poll.poll(SILENCE_SECONDS * 1000):
        piece = os.read(child.stdout.fileno(), 1 << 16)
        if not piece:
            return said.decode(errors="replace")
        said += piece
    raise _no_result(directory, f"looking through it has come no further for {SILENCE_SECONDS:g} s")


def _no_result(directory: Path, why: str) -> TierOpenError:
    return TierOpenError(f"cannot look through the LMDB file in {directory}, which stays as it was: {why}")


def _error_text(said: str) -> str:
    return said.replace("looking\n", "").replace("walking\n", "").strip()[-500:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
