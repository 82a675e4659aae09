"""Checks an LMDB file in a child process before it is opened.

LMDB maps its file and does not check the content. Some kinds of damage would end the server with
SIGBUS, SIGSEGV or a failed assertion. So a child process reads the file first. The file counts as
damaged if the child reports damage or crashes while it reads the file. If the child ends in another
way (interrupted, killed, timed out, not started), the check has no result.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import lmdb

from ..secondary_tier import TierOpenError
from .format import CHUNK_KEY_BYTES, CHUNK_PAGES, DATA_FILE
from .identity import Layout

__all__ = ["SILENCE_SECONDS", "UNWRITTEN_PAGES", "FileState", "examine"]

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
# The child first checks the two meta pages, because LMDB trusts them. It then reads the trees, but
# not the long values. Then it begins a write, because LMDB reads the list of free pages for a
# write. The child aborts the write, so the data does not change.
# A file may end before the last page that LMDB has numbered: 1 of 25 files did, by up to 31 pages.
# The reason is that LMDB does not write a page that one transaction both adds and frees. The child
# extends such a file, because reading beyond the end would cause SIGBUS.
_PROBE = rf"""
import ctypes, os, sys
parent, directory, size_bytes, path = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
format_key, known, guarded = sys.argv[5].encode(), int(sys.argv[6]), sys.argv[7].encode()
ours = [name.encode() for name in sys.argv[8:]]
ctypes.CDLL(None).prctl(1, ctypes.c_ulong({signal.SIGKILL:d}))  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    sys.exit("the parent has ended")
import itertools, mmap, resource, struct
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.path.append(path)
import lmdb

META = struct.Struct("=8x2xH4x II QQ IHHQQQQQ IHHQQQQQ QQ")  # page header and MDB_meta of LMDB 0.9
PAGE, NODE = struct.Struct("=Q2xHHH"), struct.Struct("=HHHH")
BRANCH, LEAF, TREE = 1, 2, 2
MAGIC, DATA_VERSION, META_PAGE, INTEGER_KEYS, NO_PAGE = 0xBEEFC0DE, 1, 0x08, 0x08, 2**64 - 1


def say(*words):
    print(*words, flush=True)


def check_meta():
    with open(os.path.join(directory, "{DATA_FILE}"), "rb") as file:
        first = file.read(META.size)
        page = META.unpack(first)[5] if len(first) == META.size else 0
        have = os.fstat(file.fileno()).st_size
        if page.bit_count() != 1 or not 512 <= page <= 65536:
            raise lmdb.InvalidError("the size of its pages is damaged")
        file.seek(page)
        both = [META.unpack(piece) for piece in (first, file.read(META.size)) if len(piece) == META.size]
    if len(both) < 2 or DATA_VERSION not in (meta[2] for meta in both):
        return  # LMDB itself refuses the file
    for meta in both:
        flags, magic, version = meta[:3]
        _, free_flags, _, _, _, _, _, free_root = meta[5:13]
        main_page, main_flags, depth, _, _, _, _, root = meta[13:21]
        last, _ = meta[21:]
        used = (last + 1) * page
        if have < used - {UNWRITTEN_PAGES} * page:
            raise lmdb.CorruptedError(f"the file has only {{have}} of the {{used}} bytes that LMDB uses")
        if (
            flags != META_PAGE or magic != MAGIC or version != DATA_VERSION or meta[5] != page or depth > 32
            or free_flags != INTEGER_KEYS or main_flags
            or any(number != NO_PAGE and number > last for number in (root, free_root))
        ):
            raise lmdb.CorruptedError("a meta page is damaged")


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


def check_names(txn, db, key_bytes):
    # A search that misses a name would find the block never again.
    last, found = None, 0
    for name in txn.cursor(db).iternext(values=False):
        if last is not None and name <= last or key_bytes and len(name) != key_bytes:
            raise lmdb.CorruptedError("its records are out of order")
        last = name
        found += txn.get(name, db=db) is not None
        yield found


def walk(txn, db, key_bytes=None):
    names, found = check_names(txn, db, key_bytes), 0
    have = left = txn.stat(db)["entries"]
    while seen := list(itertools.islice(names, 10_000)):
        left -= len(seen)
        found = seen[-1]
        if left < 0:  # a page refers back to an earlier page
            raise lmdb.CorruptedError("a tree has more records than its header says")
        say("walking")
    if found < have:
        raise lmdb.CorruptedError(f"only {{found}} of {{have}} records can be found")


def check_pages():
    # LMDB trusts the bounds of the free space of a page, and fails at the first store on the page.
    with open(os.path.join(directory, "{DATA_FILE}"), "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    page = META.unpack_from(data)[5]
    meta = max((META.unpack_from(data, place) for place in (0, page)), key=lambda one: one[-1])
    left = [number for number in (meta[12], meta[20]) if number != NO_PAGE]
    seen = set()
    while left:
        number = left.pop()
        start = number * page
        if number in seen or start + page > len(data):
            raise lmdb.CorruptedError("a tree refers to a wrong page")
        seen.add(number)
        own, flags, lower, upper = PAGE.unpack_from(data, start)
        nodes = memoryview(data)[start + PAGE.size : start + min(lower, page)].cast("H") if not lower % 2 else ()
        if (
            own != number or not flags & (BRANCH | LEAF) or not PAGE.size < lower <= upper < page
            or min(nodes) != upper or max(nodes) + NODE.size > page
        ):
            raise lmdb.CorruptedError(f"page {{number}} is damaged")
        for place in nodes:
            low, high, kind, key_bytes = NODE.unpack_from(data, start + place)
            if flags & BRANCH:
                left.append(low | high << 16 | kind << 32)
            elif kind & TREE and place + NODE.size + key_bytes + 48 <= page:
                root = int.from_bytes(data[(end := start + place + NODE.size + key_bytes + 48) - 8 : end], "little")
                left += [root] if root != NO_PAGE else []
        if not len(seen) % 10_000:
            say("walking")


def check_metadata(txn, meta, index):
    version = txn.get(format_key, db=meta)
    if version is None or len(version) != 4:
        return "strange", "it has no format"
    version = int.from_bytes(version, "little")
    if version > known:
        return "newer", version
    if 0 < version < known:
        return "older", version
    value = txn.get(guarded, db=meta) if guarded else None
    half = 2**64 - 1
    good = value is None
    if value is not None and len(value) == 16:
        good = int.from_bytes(value[:8], "little") + int.from_bytes(value[8:], "little") == half
    if not version or not good or (guarded and value is None and txn.stat(index)["entries"]):
        raise lmdb.CorruptedError("its metadata is damaged")
    return None


def look():
    check_meta()
    env = lmdb.open(directory, map_size=size_bytes, max_dbs=len(ours), lock=False, create=False)
    with env.begin() as txn:
        names = set(txn.cursor().iternext(values=False))
    if not names:
        return "empty", "it has no database"
    if missing := [name.decode() for name in ours if name not in names]:
        return "strange", "it has no database", missing[0]
    dbs = [env.open_db(name, create=False) for name in ours]
    with env.begin() as txn:
        if problem := check_metadata(txn, *dbs[:2]):
            return problem
        fill_in(env)
        check_pages()
        for db in dbs[:2]:
            walk(txn, db)
        for db in dbs[2:]:
            walk(txn, db, {CHUNK_KEY_BYTES})
    txn = env.begin(write=True)
    try:
        for db in dbs:
            txn.put(b"\xff" * 14, bytes({CHUNK_PAGES} * env.stat()["psize"] - 16), db=db)
    except lmdb.MapFullError:
        pass
    txn.abort()
    return ("sound",)


DAMAGE = (
    lmdb.BadDbiError, lmdb.BadTxnError, lmdb.BadValsizeError, lmdb.CorruptedError, lmdb.CursorFullError,
    lmdb.IncompatibleError, lmdb.InvalidError, lmdb.NotFoundError, lmdb.PageFullError, lmdb.PageNotFoundError,
    lmdb.PanicError,
)
say("looking")
try:
    say(*look())
except DAMAGE as error:
    say("damaged", error)
except (lmdb.Error, OSError) as error:
    say("unfit", error)
"""


class FileState(enum.Enum):
    """Result of a check."""

    SOUND = "sound"
    EMPTY = "empty"
    """A database without tables: new, or its list of tables is damaged."""
    STRANGE = "strange"
    """Readable, but not a complete store: of another program, or damaged."""
    NEWER = "newer"
    """A format that this release does not know; the text is its version."""
    OLDER = "older"
    """A format of an earlier release, whose blocks no lookup finds; the text is its version."""
    DAMAGED = "damaged"


def examine(directory: Path, size_bytes: int, layout: Layout) -> tuple[FileState, str]:
    """Checks the file in `directory` in a child process; returns the result and its reason.

    The caller must own the directory, and must not have opened the file. Blocks while the child
    makes progress. Raises `TierOpenError` if the check has no result; the file is then unchanged.
    """
    status, said = _run(directory, size_bytes, layout)
    outcome, _, why = (said.splitlines() or [""])[-1].partition(" ")
    if outcome == "unfit":
        raise _no_result(directory, why)
    if outcome in [one.value for one in FileState]:
        return FileState(outcome), why
    if -status in _CRASHES and said.startswith("looking\n"):
        return (
            FileState.DAMAGED,
            f"the check of the file crashed with {_signal_name(-status)} {_error_text(said)}".strip(),
        )
    if status < 0:
        raise _no_result(directory, f"the checking process was ended by {_signal_name(-status)}")
    raise _no_result(directory, _error_text(said) or f"the checking process ended with exit status {status}")


def _run(directory: Path, size_bytes: int, layout: Layout) -> tuple[int, str]:
    packages = str(Path(lmdb.__file__).parent.parent)
    names = map(os.fsdecode, (layout.guarded_key, *layout.databases))
    formats = [os.fsdecode(layout.format_key), str(layout.format_version)]
    arguments = [str(os.getpid()), str(directory), str(size_bytes), packages, *formats, *names]
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
