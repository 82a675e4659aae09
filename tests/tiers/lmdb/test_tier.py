from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import lmdb
import pytest
from contracts.secondary_tier import SecondaryTierContract
from contracts.tier import CORRUPT, DONE, FAILED, KIB, MIB, MISSING, NO_SPACE, SPACE, content, empty, fetch, full, held
from harness.polling import wait_until

from kvtier.tiers.lmdb import probe as lmdb_probe
from kvtier.tiers.lmdb import tier as tiers_lmdb
from kvtier.tiers.lmdb.environment import LMDB_STORE
from kvtier.tiers.lmdb.format import (
    CHUNK_PAGES,
    FORMAT_VERSION,
    TAILS_BYTES,
    BlockRecord,
    DamagedRecordError,
    chunk_prefix,
    chunk_spans,
    cut,
    record_id_of,
    tail_bytes,
)
from kvtier.tiers.lmdb.probe import UNWRITTEN_PAGES
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import NamespaceId, Outcome, SecondaryTier, TierOpenError

PAGE = 4096

pytestmark = pytest.mark.usefixtures("no_leaks")


class TestLMDBTier(SecondaryTierContract):
    child_source = """
        from kvtier.tiers.lmdb.tier import LMDBTier

        def make(directory, size_bytes):
            return LMDBTier("child", directory, size_bytes, "process")
    """

    def make_tier(self, directory: Path, size_bytes: int) -> LMDBTier:
        return LMDBTier("lmdb", directory, size_bytes, "process")

    def swap(self, tier: SecondaryTier) -> None:
        assert isinstance(tier, LMDBTier)
        with tier._store.env.begin(write=True) as txn:
            keys = [first_chunk(record_of(tier, SPACE, key).record_id) for key in (b"a", b"b")]
            values = [txn.get(key, db=tier._store.data) for key in keys]
            for key, value in zip(keys, reversed(values), strict=True):
                txn.put(key, value, db=tier._store.data)

    def corrupt(self, tier: SecondaryTier, namespace: NamespaceId, key: bytes) -> None:
        assert isinstance(tier, LMDBTier)
        at = chunk_offset(tier, namespace, key)
        patch(data_file(tier), at + 100, b"\0\xff")


def opened(directory: Path, size_bytes: int = 32 * MIB) -> LMDBTier:
    return LMDBTier("lmdb", directory, size_bytes, "process")


def data_file(tier: LMDBTier) -> Path:
    return Path(tier._store.env.path()) / "data.mdb"


def first_chunk(record_id: int) -> bytes:
    """Returns the key of the first chunk of a block."""
    return chunk_prefix(record_id) + bytes(6)


def record_of(tier: LMDBTier, namespace: NamespaceId, key: bytes) -> BlockRecord:
    with tier._store.env.begin() as txn:
        return BlockRecord.unpack(namespace + key, txn.get(namespace + key, db=tier._store.index))


def chunk_offset(tier: LMDBTier, namespace: NamespaceId, key: bytes) -> int:
    """Returns the offset of a block's first chunk in the file."""
    with tier._store.env.begin() as txn:
        chunk = txn.get(first_chunk(record_of(tier, namespace, key).record_id), db=tier._store.data)
    return data_file(tier).read_bytes().rindex(chunk)


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def filled(directory: Path, count: int = 300, sizes: tuple[int, ...] = (5000,)) -> Path:
    """Makes a store with blocks "0", "1", … and closes it; returns its file."""
    tier = opened(directory)
    blocks = [full(b"%d" % number, content(number, sizes)) for number in range(count)]
    assert set(tier.store(blocks)) == {DONE}
    tier.remove([(SPACE, b"%d" % number) for number in range(0, count, 5)])
    path = data_file(tier)
    tier.close()
    return path


def tree_pages(path: Path) -> list[int]:
    """Returns the numbers of all branch and leaf pages, used or not."""
    data = path.read_bytes()
    pages = range(2, len(data) // PAGE)
    return [page for page in pages if data[page * PAGE + 10 : page * PAGE + 12] in {b"\1\0", b"\2\0"}]


# ----- damage


def zero_everything(path: Path) -> None:
    patch(path, 0, bytes(path.stat().st_size))


def overwrite_header(path: Path) -> None:
    """Overwrites the two meta pages of LMDB."""
    patch(path, 0, random.Random(1).randbytes(2 * PAGE))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_less_than_a_page(path: Path) -> None:
    os.truncate(path, 100)


def zero_tree_pages(path: Path) -> None:
    for page in tree_pages(path):
        patch(path, page * PAGE, bytes(PAGE))


def garble_tree_pages(path: Path) -> None:
    """Overwrites every page of the trees, except its header."""
    source = random.Random(2)
    for page in tree_pages(path):
        patch(path, page * PAGE + 16, source.randbytes(PAGE - 16))


@pytest.mark.parametrize(
    "damage",
    [zero_everything, overwrite_header, cut_in_half, cut_to_less_than_a_page, zero_tree_pages, garble_tree_pages],
)
def test_a_damaged_file_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """The tier starts empty, works, and reports it.

    The damaged file is kept in a folder of its own.
    """
    path = filled(tmp_path)
    damage(path)
    size = path.stat().st_size
    with caplog.at_level(logging.ERROR, "kvtier"):
        tier = opened(tmp_path)
    assert list(tier.entries()) == []
    assert "damaged" in tier.last_error
    assert str(tmp_path / "damaged-1") in caplog.text
    assert (tmp_path / "damaged-1" / "data.mdb").stat().st_size >= size
    assert tier.store([full(b"key", [b"data"])]) == [DONE]
    assert "damaged" in tier.last_error
    tier.close()

    again = opened(tmp_path)
    assert again.last_error is None
    assert fetch(again, b"key", (4,)) == (b"data",)
    again.close()


def damaged_stores(directory: Path) -> list[str]:
    """Returns the names of the folders to which damaged files were moved."""
    return sorted(path.name for path in directory.glob("damaged-*"))


def test_at_most_two_damaged_files_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older one is removed, with a line in the log."""
    for _ in range(2):
        zero_everything(filled(tmp_path))
        opened(tmp_path).close()
    assert damaged_stores(tmp_path) == ["damaged-1", "damaged-2"]
    (tmp_path / "damaged-by-me").mkdir()
    for _ in range(10):
        zero_everything(filled(tmp_path, 1))
        opened(tmp_path).close()
    assert damaged_stores(tmp_path) == ["damaged-11", "damaged-12", "damaged-by-me"]
    assert all((tmp_path / f"damaged-{number}" / "data.mdb").exists() for number in (11, 12))
    assert f"removing {tmp_path / 'damaged-1'}:" in caplog.text


# ----- a check of the file that has no result


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """Returns a directory with a sound store of 80 blocks."""
    filled(tmp_path, 100)
    return tmp_path


def during_check(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """Makes the child process do something in the middle of its check."""
    monkeypatch.setattr(lmdb_probe, "_PROBE", lmdb_probe._PROBE.replace('    say("walking")', f"    {action}"))


def assert_untouched(directory: Path, blocks: int = 80) -> None:
    """Checks that the store opens with all of its blocks, and that no file was moved."""
    assert damaged_stores(directory) == []
    tier = opened(directory)
    assert len(list(tier.entries())) == blocks
    assert tier.last_error is None
    tier.close()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL", "SIGHUP", "SIGRTMIN"])
def test_a_killed_check_does_not_count_as_damage(sound: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The store is refused and stays unchanged; systemd or the OOM killer may kill the child."""
    with monkeypatch.context() as patched:
        # A background job inherits an ignored SIGINT, one under nohup also an ignored SIGHUP.
        number = int(getattr(signal, name))
        default = "" if name == "SIGKILL" else f"signal.signal({number}, signal.SIG_DFL); "
        during_check(patched, f"import signal; {default}os.kill(os.getpid(), {number})")
        with pytest.raises(TierOpenError, match=f"{sound}, which is unchanged.* ended by .*{signal_text(name)}"):
            opened(sound)
    assert_untouched(sound)


def signal_text(name: str) -> str:
    return name if name != "SIGRTMIN" else "SIGRTMIN|signal"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT"])
def test_a_crash_during_the_check_means_damage(sound: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A crash before the check begins says nothing about the file."""
    crash = f"import os; os.kill(os.getpid(), {int(getattr(signal, name))})\n"
    with monkeypatch.context() as patched:
        patched.setattr(lmdb_probe, "_PROBE", crash + lmdb_probe._PROBE)
        with pytest.raises(TierOpenError, match=name):
            opened(sound)
    assert_untouched(sound)
    during_check(monkeypatch, crash.partition("; ")[2].strip())
    tier = opened(sound)
    assert list(tier.entries()) == []
    assert name in (tier.last_error or "")
    tier.close()
    assert damaged_stores(sound) == ["damaged-1"]


@pytest.mark.slow
def test_a_stalled_check_does_not_count_as_damage(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging disk is refused.

    A slow one gets as much time as it needs while the check proceeds.
    """
    monkeypatch.setattr(lmdb_probe, "SILENCE_SECONDS", 1.0)
    with monkeypatch.context() as patched:
        during_check(patched, "import signal; signal.pause()")
        with pytest.raises(TierOpenError, match="no progress for 1 s"):
            opened(sound)
    with monkeypatch.context() as patched:
        during_check(patched, 'import time; [(time.sleep(0.3), say("walking")) for _ in range(5)]')
        began = time.monotonic()
        assert_untouched(sound)
        assert time.monotonic() - began > 1.5


@pytest.mark.parametrize(
    ("executable", "probe"),
    [
        ("/nowhere/python", None),
        (None, "raise SystemExit(3)"),
        (None, "raise ImportError('lmdb')"),
        (None, ""),
        (None, lmdb_probe._PROBE.replace("def look():", "def look():\n    raise OSError(5, 'I/O error')")),
        (None, lmdb_probe._PROBE.replace("def look():", "def look():\n    raise lmdb.MemoryError('no memory')")),
    ],
    ids=["no python", "exit code", "traceback", "silence", "I/O error", "no memory"],
)
def test_a_check_that_cannot_start_does_not_count_as_damage(
    sound: Path, monkeypatch: pytest.MonkeyPatch, executable: str | None, probe: str | None
) -> None:
    """A child that cannot start or work says nothing about the file."""
    with monkeypatch.context() as patched:
        if executable is not None:
            patched.setattr(sys, "executable", executable)
        if probe is not None:
            patched.setattr(lmdb_probe, "_PROBE", probe)
        with pytest.raises(TierOpenError, match=str(sound)):
            opened(sound)
    assert_untouched(sound)


# Opens a store with a child that prints its id and then sleeps.
OPEN_SLOWLY = """
import asyncio, os, signal, sys
from pathlib import Path
from kvtier.tiers.lmdb import probe as lmdb_probe
from kvtier.tiers.lmdb.tier import LMDBTier

pause = f'say("walking"); import time; print(os.getpid(), file=open({sys.argv[2]!r}, "w")); time.sleep({sys.argv[3]})'
lmdb_probe._PROBE = lmdb_probe._PROBE.replace('    say("walking")', "    " + pause, 1)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)  # as a server does
    tier = LMDBTier("lmdb", Path(sys.argv[1]), 32 << 20, "process")
    print(len(list(tier.entries())), tier.last_error)
    tier.close()

asyncio.run(main())
"""


@contextlib.contextmanager
def opening(store: Path, note: Path, seconds: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yields a process in its own group that opens a store, and the pid of its child."""
    command = [sys.executable, "-c", OPEN_SLOWLY, str(store), str(note), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            wait_until(lambda: note.exists() and note.read_text().endswith("\n"))
            yield process, int(note.read_text())
        finally:
            process.kill()


def test_ctrl_c_does_not_reach_the_check(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole process group; the store still opens with all its blocks."""
    filled(tmp_path / "store", 100)
    with opening(tmp_path / "store", tmp_path / "note", 0.3) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "80 None\n"
    assert_untouched(tmp_path / "store")


def test_the_check_ends_with_its_server(tmp_path: Path) -> None:
    """No child of a killed server reads the file beside the next server."""
    filled(tmp_path / "store", 100)
    with opening(tmp_path / "store", tmp_path / "note", 60) as (process, child):
        assert Path(f"/proc/{child}").exists()
        process.kill()
        process.wait()
        wait_until(lambda: not is_running(child))
    assert_untouched(tmp_path / "store")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_orphaned_check_ends_at_once(sound: Path) -> None:
    """The parent ended before the child could ask to be killed with it."""
    arguments = ["0", str(sound), str(32 * MIB), str(Path(lmdb.__file__).parent.parent)]
    command = [sys.executable, "-I", "-S", "-c", lmdb_probe._PROBE, *arguments]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (1, "")


def test_the_check_never_shortens_the_file(sound: Path) -> None:
    """A file that is longer than its pages keeps its length."""
    path = sound / "data.mdb"
    os.truncate(path, path.stat().st_size + 40 * PAGE)
    size = path.stat().st_size
    assert_untouched(sound)
    assert path.stat().st_size == size


# Opens a damaged store, uses all of it, and prints the results.
USE_A_DAMAGED_STORE = """
import sys
from pathlib import Path
from contracts.tier import *
from kvtier.tiers.lmdb.tier import LMDBTier

tier = LMDBTier("lmdb", Path(sys.argv[1]), 32 * MIB, "process")
names = [entry.key for entry in tier.entries()]
for name in names:
    block = empty(name, (5000,))
    if tier.load([block]) == [DONE]:
        assert held(block) == content(int(name), (5000,)), name
for name in names[::2]:
    tier.remove([(SPACE, name)])
for number in range(50):
    outcomes = tier.store([full(b"new %d" % number, content(number, (70_000,)))])
    if outcomes == [DONE]:
        block = empty(b"new %d" % number, (70_000,))
        assert tier.load([block]) != [DONE] or held(block) == content(number, (70_000,))
tier.close()
print("fine" if not tier.last_error else "trouble")
"""


@pytest.mark.parametrize("seed", range(8))
def test_random_zeroed_pages_cause_no_crash_and_no_wrong_bytes(tmp_path: Path, seed: int) -> None:
    """The pages are anywhere in the file."""
    path = filled(tmp_path)
    source = random.Random(seed)
    pages = path.stat().st_size // PAGE
    for page in source.sample(range(pages), source.choice([1, 3, 30])):
        patch(path, page * PAGE, bytes(PAGE))
    child = subprocess.run(
        [sys.executable, "-c", USE_A_DAMAGED_STORE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])},
    )
    assert child.returncode == 0, child.stderr


def test_a_damaged_index_record_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record with a wrong checksum is not listed; it and its chunks are removed."""
    tier = opened(tmp_path)
    tier.store([full(b"%d" % number, content(number, (70_000,))) for number in range(3)])
    lost = record_of(tier, SPACE, b"1").record_id
    with tier._store.env.begin(write=True) as txn:
        packed = bytearray(txn.get(SPACE + b"1", db=tier._store.index))
        packed[6] ^= 1
        txn.put(SPACE + b"1", packed, db=tier._store.index)
        txn.put(SPACE + b"short", b"short", db=tier._store.index)
    tier.close()
    again = opened(tmp_path)
    assert [entry.key for entry in again.entries()] == [b"0", b"2"]
    assert "2 index records are damaged" in caplog.text
    with again._store.env.begin() as txn:
        assert txn.stat(again._store.index)["entries"] == 2
        assert txn.get(first_chunk(lost), db=again._store.data) is None
    assert again.load([empty(b"1", (70_000,)), empty(b"2", (70_000,))]) == [MISSING, DONE]
    again.close()


def test_a_check_allocates_no_impossible_size(tmp_path: Path) -> None:
    """A record with a valid checksum can announce any size; a repair removes it."""
    tier = opened(tmp_path)
    tier.store([full(b"0", content(0, (70_000,)))])
    name = SPACE + b"1"
    with tier._store.env.begin(write=True) as txn:
        txn.put(name, BlockRecord(7, 0, ((1 << 64) - 1,)).pack(name), db=tier._store.index)
    for repair in (True, False):
        found = tier.check_slice(b"", repair=repair)
        assert [finding.name for finding in found.findings] == [name] * repair
    tier.close()


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("pages", [0, 1, 150, 1000, 0xFFFFFFFF])
def test_a_damaged_page_header_frees_no_pages_of_other_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, *, bounded: bool
) -> None:
    """A wrong page count before a chunk does not affect other blocks when the chunk is removed.

    LMDB itself may or may not check it. Blocks that are removed in the same batch are removed.
    """
    monkeypatch.setattr(tiers_lmdb, "HEADERS_ARE_BOUNDED", bounded)
    tier = opened(tmp_path)
    tier.store([full(b"%d" % number, content(number, (300_000,))) for number in range(20)])
    patch(data_file(tier), chunk_offset(tier, SPACE, b"7") - 4, pages.to_bytes(4, "little"))
    tier.remove([(SPACE, key) for key in (b"6", b"7", b"unknown", b"8")])
    assert tier.last_error is None
    for number in range(100, 110):
        assert tier.store([full(b"%d" % number, content(number, (300_000,)))]) == [DONE]
    for number in [*range(6), *range(9, 20), *range(100, 110)]:
        assert fetch(tier, b"%d" % number, (300_000,)) == content(number, (300_000,))
    assert tier.load([empty(key, (300_000,)) for key in (b"6", b"7", b"8")]) == [MISSING] * 3
    tier.close()


@pytest.mark.parametrize("found", ["nothing", "a shorter chunk"])
def test_a_block_without_a_whole_chunk_is_corrupt(tmp_path: Path, found: str) -> None:
    """Its removal, beside others, leaves none of its chunks."""
    tier = opened(tmp_path)
    sizes = (600_000,)  # four chunks
    tier.store([full(b"%d" % number, content(number, sizes)) for number in range(4)])
    with tier._store.env.begin(write=True) as txn:
        for key in (b"1", b"2"):
            chunk = chunk_prefix(record_of(tier, SPACE, key).record_id) + bytes([0, 0, 0, 0, 0, 1])
            text = txn.get(chunk, db=tier._store.data)
            assert txn.delete(chunk, db=tier._store.data)
            if found != "nothing":
                assert txn.put(chunk, text[:-PAGE], db=tier._store.data)
    assert tier.load([empty(b"1", sizes)]) == [CORRUPT]
    tier.remove([(SPACE, b"%d" % number) for number in range(3)])
    assert fetch(tier, b"3", sizes) == content(3, sizes)
    with tier._store.env.begin() as txn:
        assert txn.stat(tier._store.data)["entries"] == len(chunk_spans(*sizes, PAGE))
        assert txn.stat(tier._store.index)["entries"] == 1
    tier.close()


def test_a_batch_may_replace_some_blocks(tmp_path: Path) -> None:
    """The others are new; sizes may differ, and no chunk of the old blocks is left."""
    tier = opened(tmp_path)
    sizes = [(300_000,), (70_000, 5000), (65536,), (16,)]
    assert (
        tier.store([full(b"%d" % number, content(number, sizes[number % 4])) for number in range(0, 12, 2)])
        == [DONE] * 6
    )
    again = [full(b"%d" % number, content(number + 100, sizes[number // 3])) for number in range(12)]
    assert tier.store(again) == [DONE] * 12
    for number in range(12):
        assert fetch(tier, b"%d" % number, sizes[number // 3]) == content(number + 100, sizes[number // 3])
    assert len(list(tier.entries())) == 12
    tier.remove([(SPACE, b"%d" % number) for number in range(12)])
    with tier._store.env.begin() as txn:
        assert txn.stat(tier._store.data)["entries"] == 0
    tier.close()


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_short_file_is_not_damage(tmp_path: Path, seed: int) -> None:
    """Pages that one transaction added and freed are never written at the end of the file."""
    source = random.Random(seed)
    tier, names, reopened = opened(tmp_path), [], 0
    for _ in range(60):
        if not names or source.random() < 0.6:
            new = [source.getrandbits(64) for _ in range(source.choice([5, 200]))]
            size = source.choice([1, 300, 3000, 5000])
            assert set(tier.store([full(b"%d" % name, [bytes(size)]) for name in new])) == {DONE}
            names += new
        source.shuffle(names)
        gone = [names.pop() for _ in range(source.randint(1, len(names)))]
        tier.remove([(SPACE, b"%d" % name) for name in gone])
        missing = tier._store.env.info()["last_pgno"] + 1 - data_file(tier).stat().st_size // PAGE
        assert missing < UNWRITTEN_PAGES / 4
        if missing > 0 and reopened < 3:
            tier.close()
            tier = opened(tmp_path)
            reopened += 1
            assert tier.last_error is None
            assert {int(entry.key) for entry in tier.entries()} == set(names)
    assert reopened
    tier.close()


# ----- access


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    """The error names the directory and the process that uses it; afterwards it is free."""
    tier = opened(tmp_path)
    with pytest.raises(TierOpenError, match=f"{tmp_path} is in use by process {os.getpid()}"):
        opened(tmp_path)
    assert tier.store([full(b"key", [b"data"])]) == [DONE]
    tier.close()
    opened(tmp_path).close()


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/kvtier"])
def test_an_unusable_directory_is_named(tmp_path: Path, name: str) -> None:
    """A directory that cannot be written is refused."""
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(TierOpenError, match=name):
        opened(tmp_path / name)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """A store of a newer release stays unchanged."""
    tier = opened(tmp_path)
    tier.store([full(b"key", [b"data"])])
    with tier._store.env.begin(write=True) as txn:
        # A version that differs in one bit would count as damage.
        txn.put(b"format", (FORMAT_VERSION + 3).to_bytes(4, "little"), db=tier._store.meta)
    tier.close()
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(TierOpenError, match=f"format {FORMAT_VERSION + 3}"):
        opened(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == before
    assert not (tmp_path / "damaged-1").exists()


@pytest.mark.parametrize("database", [None, b"theirs", b"index"])
def test_a_foreign_lmdb_environment_is_refused(tmp_path: Path, database: bytes | None) -> None:
    """The files of another program stay unchanged."""
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        theirs = env.open_db(database)
        with env.begin(write=True) as txn:
            txn.put(b"key", b"value", db=theirs)
    with pytest.raises(TierOpenError, match=str(tmp_path)):
        opened(tmp_path)
    assert not (tmp_path / "damaged-1").exists()


def test_files_are_private(tmp_path: Path) -> None:
    """Other users cannot read cached blocks."""
    tier = opened(tmp_path / "new" / "store")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "store").iterdir()}
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700
    tier.close()


# ----- space


def test_the_size_may_change_at_a_restart(tmp_path: Path) -> None:
    """A larger size gives more space; a smaller one keeps the blocks until the core evicts them."""
    block = content("x", (MIB,))

    def store_until_full(tier: LMDBTier) -> int:
        count = 0
        while tier.store([full(b"%d" % count, block)]) == [DONE]:
            count += 1
        return count

    tier = opened(tmp_path, 16 * MIB)
    first = store_until_full(tier)
    tier.close()

    tier = opened(tmp_path, 32 * MIB)
    assert len(list(tier.entries())) == first
    assert store_until_full(tier) > 1.8 * first
    tier.close()
    size = (tmp_path / "data.mdb").stat().st_size

    tier = opened(tmp_path, 16 * MIB)
    entries = list(tier.entries())
    assert sum(entry.nbytes for entry in entries) > 16 * MIB > tier.capacity_bytes
    while sum(entry.nbytes for entry in entries) > tier.capacity_bytes:
        tier.remove([(entries[0].namespace, entries.pop(0).key)])
    assert tier.store([full(b"new", block)]) == [DONE]
    assert fetch(tier, entries[0].key, (MIB,)) == block
    tier.close()
    # A file may lack a page that LMDB has numbered; the check at the next start adds it.
    assert (tmp_path / "data.mdb").stat().st_size <= size + PAGE


@pytest.mark.parametrize("size", [1, 64 * KIB, MIB])
def test_the_file_is_bounded(tmp_path: Path, size: int) -> None:
    """The file never exceeds the size of the tier."""
    tier = opened(tmp_path, 8 * MIB)
    outcomes: list[Outcome] = []
    for number in range(400):
        outcomes += tier.store(
            [full(b"%d %d" % (number, i), content(i, (size,))) for i in range(200 if size == 1 else 1)]
        )
    assert set(outcomes) == {DONE, NO_SPACE}
    assert data_file(tier).stat().st_size <= 8 * MIB
    tier.close()


@pytest.mark.parametrize("size", [64 * KIB, 2 * MIB])
def test_space_overhead_is_below_one_percent(tmp_path: Path, size: int) -> None:
    """Blocks use less than one percent more than their bytes."""
    tier = opened(tmp_path, 64 * MIB)
    count = 32 * MIB // size
    tier.store([full(b"%d" % number, content(0, (size,))) for number in range(count)])
    used = (tier._store.env.info()["last_pgno"] + 1) * PAGE
    assert 32 * MIB < used < 1.01 * 32 * MIB
    tier.close()


# ----- errors of LMDB


def quota_error() -> lmdb.Error:
    """Returns the error of a disk quota."""
    error = lmdb.Error("quota")
    error.code = errno.EDQUOT
    return error


class FailingEnvironment:
    def __init__(self, env: lmdb.Environment, error: lmdb.Error) -> None:
        self._env, self._error = env, error

    def begin(self, **_: object) -> None:
        raise self._error

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (lmdb.CorruptedError("page"), FAILED),
        (lmdb.Error("Input/output error"), FAILED),
        (lmdb.DiskError("no space"), NO_SPACE),
        (lmdb.MapFullError("full"), NO_SPACE),
        (quota_error(), NO_SPACE),
    ],
    ids=repr,
)
def test_errors_of_lmdb_fail_the_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: lmdb.Error,
    outcome: Outcome,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error is logged once, and is a trouble until the next success of that kind."""
    tier = opened(tmp_path)
    tier.store([full(b"key", [b"data"])])
    whole, broken = tier._store, FailingEnvironment(tier._store.env, error)
    fields = {name: getattr(whole, name) for name in whole.__slots__}
    monkeypatch.setattr(tier, "_store", type(whole)(**(fields | {"env": broken})))
    for _ in range(3):
        assert tier.store([full(b"a", [b"a"]), full(b"b", [b"b"])]) == [outcome, outcome]
        assert tier.load([empty(b"key", (4,))]) == [FAILED]
        tier.remove([(SPACE, b"key")])
    assert [what in tier.last_error for what in ("cannot store", "cannot load", "cannot remove")] == [True] * 3
    assert len(caplog.records) == 3
    monkeypatch.setattr(tier, "_store", whole)
    assert fetch(tier, b"key", (4,)) == (b"data",)
    assert "cannot load" not in tier.last_error
    assert tier.store([full(b"a", [b"a"])]) == [DONE]
    tier.remove([(SPACE, b"key")])
    assert tier.last_error is None
    tier.close()


class _Recorded:
    """Environment whose transactions are counted, and in which reads of one key fail."""

    def __init__(self, env: lmdb.Environment, bad: bytes, kind: type[_Transaction] | None = None) -> None:
        self._env, self._bad, self.kind = env, bad, kind or _Transaction
        self.transactions = 0

    def begin(self, **more: Any) -> Any:
        self.transactions += 1
        return self.kind(self._env.begin(**more), self._bad)

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)


class _Transaction:
    """After an error, LMDB refuses every further read of a transaction."""

    def __init__(self, txn: lmdb.Transaction, bad: bytes) -> None:
        self._txn, self._bad, self._broken = txn, bad, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._txn.abort()

    def get(self, key: bytes, *more: Any) -> Any:
        self._broken |= key == self._bad
        if self._broken:
            raise lmdb.PageNotFoundError("page")
        return self._txn.get(key, *more)


class _BadEnd(_Transaction):
    """A transaction whose end fails."""

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        raise lmdb.Error("end")


def test_an_error_at_the_end_of_a_read_fails_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of the transaction are read and verified by then. The next block is loaded too."""
    tier = opened(tmp_path)
    sizes = (64 * KIB,)
    tier.store([full(b"%d" % number, content(number, sizes)) for number in range(40)])
    whole, recorded = tier._store, _Recorded(tier._store.env, b"", _BadEnd)
    fields = {name: getattr(whole, name) for name in whole.__slots__}
    monkeypatch.setattr(tier, "_store", type(whole)(**(fields | {"env": recorded})))
    into = [empty(b"%d" % number, sizes) for number in range(40)]
    assert tier.load(into) == [DONE] * 40
    assert recorded.transactions == 2
    monkeypatch.setattr(tier, "_store", whole)
    tier.close()


@pytest.mark.parametrize("bad", [0, 20, 63])
def test_an_unreadable_block_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """Other blocks of its transaction are loaded, with another transaction."""
    tier = opened(tmp_path)
    sizes = (64 * KIB,)
    tier.store([full(b"%d" % number, content(number, sizes)) for number in range(64)])
    whole, recorded = tier._store, _Recorded(tier._store.env, SPACE + b"%d" % bad)
    fields = {name: getattr(whole, name) for name in whole.__slots__}
    monkeypatch.setattr(tier, "_store", type(whole)(**(fields | {"env": recorded})))
    into = [empty(b"%d" % number, sizes) for number in range(64)]
    assert tier.load(into) == [FAILED if number == bad else DONE for number in range(64)]
    assert all(held(block) == content(number, sizes) for number, block in enumerate(into) if number != bad)
    assert "cannot load" in str(tier.last_error)
    # One per 2 MiB, and one more after the error if blocks are left.
    assert recorded.transactions == (2 if bad == 63 else 3)
    monkeypatch.setattr(tier, "_store", whole)
    tier.close()


def test_ambiguous_names_are_refused(tmp_path: Path) -> None:
    """Namespaces and keys must have a unique encoding."""
    tier = opened(tmp_path)
    for namespace, key in [(NamespaceId(b"short"), b"key"), (SPACE, b"k" * 480)]:
        assert tier.store([full(key, [b"x"], namespace), full(b"other", [b"x"])]) == [FAILED, DONE]
        assert tier.load([empty(key, (1,), namespace)]) == [MISSING]
        tier.remove([(namespace, key)])
    assert tier.store([full(b"k" * 479, [b"x"])]) == [DONE]
    tier.close()


# ----- cost


def test_durability_decides_when_to_sync(tmp_path: Path) -> None:
    """With "power" each transaction is synced to disk; with "process" only the close is."""
    for durability, flushed in (("process", False), ("power", True)):
        tier = LMDBTier("lmdb", tmp_path, 32 * MIB, durability)  # type: ignore[arg-type]
        flags = tier._store.env.flags()
        assert (flags["sync"], flags["metasync"]) == (flushed, flushed)
        assert tier.store([full(durability.encode(), [b"data"])]) == [DONE]
        tier.close()
    tier = opened(tmp_path)
    assert [entry.key for entry in tier.entries()] == [b"process", b"power"]
    tier.close()


def test_stores_make_no_copy(tmp_path: Path) -> None:
    """LMDB reads blocks from their own memory."""
    tier = opened(tmp_path, 128 * MIB)
    part = memoryview(bytearray(8 * MIB))
    tracemalloc.start()
    tier.store([full(b"%d" % number, [part]) for number in range(4)])
    assert tier.load([full(b"%d" % number, [part]) for number in range(4)]) == [DONE] * 4
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tier.close()
    assert peak < 500_000


def test_a_restart_lists_many_blocks(tmp_path: Path) -> None:
    """Every block of a sound store is listed once."""
    tier = opened(tmp_path, 64 * MIB)
    parts = [b"x" * 600]
    for start in range(0, 30_000, 1000):
        tier.store([full(b"%d" % number, parts) for number in range(start, start + 1000)])
    tier.close()
    tier = opened(tmp_path, 64 * MIB)
    keys = [entry.key for entry in tier.entries()]
    tier.close()
    assert len(keys) == len(set(keys)) == 30_000


# ----- format


@pytest.mark.parametrize("nbytes", [0, 1, 4079, 4080, 4081, 65536, 262128, 262129, 2 * MIB, 2 * MIB + 5000])
def test_chunks_cover_the_block(nbytes: int) -> None:
    """They follow each other from the first byte to the last; all but the last fill whole pages."""
    spans = list(chunk_spans(nbytes, PAGE))
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    assert (spans[-1][1] if spans else 0) == nbytes
    sizes = [stop - start for start, stop in spans]
    assert all((size + 16) % PAGE == 0 for size in sizes[:-1])
    assert all(0 < size < CHUNK_PAGES * PAGE for size in sizes)
    assert len(sizes) <= nbytes // (CHUNK_PAGES * PAGE - 16) + 2


@pytest.mark.parametrize(
    "sizes", [(65536,), (262144, 65536), (2 * MIB, 2 * MIB), (1, 5000, 65536), (65536,) * 40, (16,)]
)
def test_short_ends_of_parts_are_in_the_record(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """All bytes read back, and a removal leaves none."""
    tier = opened(tmp_path)
    assert tier.store([full(b"key", content(1, sizes))]) == [DONE]
    tails = record_of(tier, SPACE, b"key").tails
    expected = [tail_bytes(size, PAGE) for size in sizes]
    assert len(tails) == (sum(expected) if sum(expected) <= TAILS_BYTES else 0)
    with tier._store.env.begin() as txn:
        assert txn.stat(tier._store.data)["entries"] == sum(len(chunk_spans(size, PAGE)) for size in sizes) - (
            sum(map(bool, expected)) if tails else 0
        )
    assert fetch(tier, b"key", sizes) == content(1, sizes)
    tier.remove([(SPACE, b"key")])
    with tier._store.env.begin() as txn:
        assert txn.stat(tier._store.data)["entries"] == 0
    tier.close()


def test_chunk_keys_sort_by_record_part_and_number() -> None:
    suffixes = [suffix for suffix, *_ in cut((300 * CHUNK_PAGES * PAGE, PAGE), PAGE, tails=False).chunks]
    keys = [chunk_prefix(record_id) + suffix for record_id in (1, 2, 256) for suffix in suffixes]
    assert keys == sorted(keys)
    assert [record_id_of(key) for key in keys[:: len(suffixes)]] == [1, 2, 256]
    with pytest.raises(DamagedRecordError):
        record_id_of(b"not a key")


def test_damaged_bounds_of_free_space_are_found(tmp_path: Path) -> None:
    """LMDB itself does not notice them before the first store on the page."""
    store = tmp_path / "store"
    filled(store, 100)
    with lmdb.open(os.fspath(store), max_dbs=8, readonly=True, lock=False) as env, env.begin() as txn:
        names = list(txn.cursor().iternext(values=False))
        stats = [txn.stat(), *(txn.stat(env.open_db(name, txn, create=False)) for name in names)]
        page, pages = env.stat()["psize"], env.info()["last_pgno"] + 1
    data = store / "data.mdb"
    intact = data.read_bytes()
    damaged = 0
    for number in range(2, pages):
        header = struct.unpack_from("=Q2xHHH", intact, number * page)
        if header[0] != number or header[1] not in (1, 2):
            continue
        changed = bytearray(intact)
        changed[number * page + 14] ^= 0x10
        data.write_bytes(changed)
        damaged += lmdb_probe.examine(store, 32 * MIB, LMDB_STORE)[0] is lmdb_probe.FileState.DAMAGED
    data.write_bytes(intact)
    assert damaged >= sum(each["branch_pages"] + each["leaf_pages"] for each in stats) >= 2
    assert lmdb_probe.examine(store, 32 * MIB, LMDB_STORE)[0] is lmdb_probe.FileState.SOUND
