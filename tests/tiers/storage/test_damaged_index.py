"""Damage of the index of each tier on disk: the tier starts, and says how many blocks are lost."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
from contracts.tier import DONE, MIB, SPACE, content, full, key

from kvtier.tiers.disk.format import DISK_STORE
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb import probe
from kvtier.tiers.lmdb.environment import LMDB_STORE, Durability
from kvtier.tiers.lmdb.identity import MARKER_FILE, read_marker
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import TierDamagedError, TierOpenError
from kvtier.tiers.storage.fsck import check

pytestmark = pytest.mark.usefixtures("no_leaks")

Tier = DiskTier | LMDBTier
Kind = type[DiskTier] | type[LMDBTier]
Change = Callable[[bytearray], None]
PAGE = 4096
BLOCKS = 60
SIZE = 32 * MIB
SIZES = (3000,)


def opened(kind: Kind, directory: Path, *, repair: bool = True) -> Tier:
    return kind("tier", directory, SIZE, "process", repair=repair)


@pytest.fixture(params=[DiskTier, LMDBTier])
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


@pytest.fixture
def store(kind: Kind, tmp_path: Path) -> Path:
    """Returns the directory of a closed store with 60 blocks, whose index has several pages."""
    tier = opened(kind, tmp_path / "store")
    list(tier.entries())
    for number in range(BLOCKS):
        assert tier.store([full(name(number), content(number, SIZES))]) == [DONE]
    tier.close()
    return tmp_path / "store"


def name(number: int) -> bytes:
    return key(number) + bytes(300)


def findings(kind: Kind, directory: Path) -> list[str]:
    """Returns what `kvtier fsck` finds; changes no file."""
    try:
        tier = opened(kind, directory, repair=False)
    except TierDamagedError as error:
        return [str(error)]
    try:
        return [str(finding) for step in check(tier, repair=False) for finding in step.findings]
    finally:
        tier.close()


# Opens a changed store as a server does: a crash must not end the test.
USE = """
import logging, re, sys
from pathlib import Path
from contracts.tier import *
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.tier import LMDBTier

logging.disable()
kind = {"DiskTier": DiskTier, "LMDBTier": LMDBTier}[sys.argv[1]]
for line in sys.stdin:
    tier = kind("tier", Path(line.rstrip("\\n")), 32 * MIB, "process")
    listed = len(list(tier.entries()))
    said = tier.last_error or ""
    wrong = lost = 0
    for number in range(60):
        block = empty(key(number) + bytes(300), (3000,))
        outcome = tier.load([block])
        lost += outcome == [MISSING]
        wrong += outcome == [DONE] and held(block) != content(number, (3000,))
    stored = tier.store([full(key(1000), [b"new"])])
    tier.close()
    counts = [int(each) for each in re.findall(r"(\\d+)(?: of its \\d+)? blocks are lost", said)]
    faults = {
        "wrong": wrong,
        "not stored": stored != [DONE],
        "lost blocks that it does not tell of": sum(counts) < lost,  # a damaged counter can tell of more
        "listed but lost, or not listed": listed != 60 - lost,
    }
    print(next((name for name, found in faults.items() if found), "good"), listed, lost, said, flush=True)
"""


@pytest.fixture
def use(kind: Kind) -> Iterator[Callable[[Path], str]]:
    """Returns a function that opens a store in a child process, and uses and describes it."""
    children: list[subprocess.Popen[str]] = []

    def ask(directory: Path) -> str:
        if not children:
            command = [sys.executable, "-c", USE, kind.__name__]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            children.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            )
        pipes = children[0]
        assert pipes.stdin
        assert pipes.stdout
        pipes.stdin.write(f"{directory}\n")
        pipes.stdin.flush()
        answer = pipes.stdout.readline()
        if not answer:
            children.clear()
            pipes.communicate()
            return f"ended with {pipes.returncode}"
        return answer

    yield ask
    for child in children:
        child.communicate()


def changed(store: Path, data: bytes, copy: Path) -> Path:
    """Returns a copy of a store with another index."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    (copy / "data.mdb").write_bytes(data)
    return copy


def metadata(data: bytes) -> list[int]:
    """Returns the offsets of the bytes that describe the store.

    They are in LMDB's two meta pages, in its list of databases, and in the database `meta`.
    """
    newest = max((0, 1), key=lambda page: data[page * PAGE + 144 : page * PAGE + 152][::-1])
    root = int.from_bytes(data[newest * PAGE + 128 : newest * PAGE + 136], "little")
    at = data.index(b"meta", root * PAGE) + len(b"meta")
    pages = [root, int.from_bytes(data[at + 40 : at + 48], "little")]
    offsets = [page * PAGE + at for page in (0, 1) for at in range(152)]
    for start in (page * PAGE for page in pages):
        offsets += [start + at for at in range(PAGE) if at < 16 or data[start + at]]
    return offsets


def check_flips(store: Path, use: Callable[[Path], str], offsets: list[int], seed: int) -> None:
    source, data = random.Random(seed), (store / "data.mdb").read_bytes()
    for at in offsets:
        bit = source.randrange(8)
        other = bytearray(data)
        other[at] ^= 1 << bit
        answer = use(changed(store, bytes(other), store.with_name("changed")))
        assert answer.startswith("good"), f"page {at // PAGE}, byte {at % PAGE}, bit {bit}: {answer}"


def test_a_flipped_bit_in_the_metadata_never_stops_the_server(store: Path, use: Callable[[Path], str]) -> None:
    """For any bit, the tier starts, and no block is lost without a message."""
    offsets = metadata((store / "data.mdb").read_bytes())
    check_flips(store, use, random.Random(2).sample(offsets, 10), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_flipped_byte_of_the_metadata(store: Path, use: Callable[[Path], str], part: int) -> None:
    check_flips(store, use, metadata((store / "data.mdb").read_bytes())[part::4], seed=part)


def lost_in(text: str) -> int:
    """Returns how many blocks are lost according to a message."""
    return sum(int(each) for each in re.findall(r"(\d+)(?: of its \d+)? blocks are lost", text))


def check_swaps(kind: Kind, store: Path, use: Callable[[Path], str], pairs: list[tuple[int, int]]) -> None:
    data = (store / "data.mdb").read_bytes()
    for a, b in pairs:
        other = bytearray(data)
        other[a * PAGE : (a + 1) * PAGE] = data[b * PAGE : (b + 1) * PAGE]
        other[b * PAGE : (b + 1) * PAGE] = data[a * PAGE : (a + 1) * PAGE]
        copy = changed(store, bytes(other), store.with_name("changed"))
        found = findings(kind, copy)
        answer = use(copy)
        assert answer.startswith("good"), f"pages {a} and {b}: {answer}"
        lost = int(answer.split()[2])
        told = lost_in("; ".join(found))
        assert told == lost, f"pages {a} and {b}: fsck tells of {told} lost blocks, and {lost} are lost: {found}"


def tree_pairs(store: Path) -> list[tuple[int, int]]:
    """Returns the pairs of different pages of trees. Other pages have blocks, or are unused."""
    data = (store / "data.mdb").read_bytes()
    pages = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
    trees = [number for number, page in enumerate(pages) if number < 2 or page[10:12] in (b"\1\0", b"\2\0")]
    return [(a, b) for a, b in itertools.combinations(trees, 2) if pages[a] != pages[b]]


def test_swapped_pages_never_stop_the_server(kind: Kind, store: Path, use: Callable[[Path], str]) -> None:
    """The server says that blocks are lost, and so does `fsck` before."""
    check_swaps(kind, store, use, random.Random(3).sample(tree_pairs(store), 8))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_swapped_pages(kind: Kind, store: Path, use: Callable[[Path], str], part: int) -> None:
    check_swaps(kind, store, use, tree_pairs(store)[part::4])


def flip(directory: Path, wanted: bytes) -> None:
    """Flips a bit in all copies of a text in the index."""
    path = directory / "data.mdb"
    data = path.read_bytes()
    assert wanted in data
    path.write_bytes(data.replace(wanted, bytes([wanted[0] ^ 1]) + wanted[1:]))


@pytest.mark.parametrize("what", ["meta", "format key", "database"])
def test_a_damaged_name_is_ours(kind: Kind, store: Path, what: str) -> None:
    """The store is moved aside, and `fsck` reports it before; both say how many blocks are lost."""
    layout = DISK_STORE if kind is DiskTier else LMDB_STORE
    flip(store, {"meta": b"meta", "format key": layout.format_key, "database": layout.databases[1]}[what])
    [found] = findings(kind, store)
    assert f"its {BLOCKS} blocks are lost" in found
    tier = opened(kind, store)
    assert list(tier.entries()) == []
    assert f"its {BLOCKS} blocks are lost); it was moved to {store / 'damaged-1'}" in (tier.last_error or "")
    tier.close()


def test_files_of_another_program_stay_untouched(kind: Kind, tmp_path: Path) -> None:
    """The directory has the same files with the same content afterwards."""
    for database in (None, b"meta", b"index", b"blocks", b"data"):
        with lmdb.open(str(tmp_path), max_dbs=8) as env:
            theirs = env.open_db(database)
            with env.begin(write=True) as txn:
                txn.put(b"key", b"value", db=theirs)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock.mdb"}
        for _ in range(2):
            with pytest.raises(TierOpenError, match=f"{tmp_path} is not a kvtier "):
                opened(kind, tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "lock.mdb"} == before


def test_a_damaged_file_of_another_program_stays_untouched(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(random.Random(1).randbytes(5 * PAGE))
    with pytest.raises(TierOpenError, match="is not a kvtier "):
        opened(kind, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data.mdb"]


def test_a_check_without_a_result_does_not_make_a_file_ours(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next check refuses a damaged file of another program, as without the first."""
    (tmp_path / "data.mdb").write_bytes(random.Random(1).randbytes(5 * PAGE))
    with monkeypatch.context() as patched:
        patched.setattr(probe, "_PROBE", "raise SystemExit(3)")
        with pytest.raises(TierOpenError, match="cannot check"):
            opened(kind, tmp_path)
    with pytest.raises(TierOpenError, match="is not a kvtier "):
        opened(kind, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data.mdb"]


@pytest.mark.parametrize("length", [0, None])
def test_an_empty_index_is_a_loss(kind: Kind, store: Path, length: int | None) -> None:
    """`data.mdb` is empty or missing: `fsck` and the server say how many blocks are lost."""
    (store / "data.mdb").unlink()
    if length is not None:
        (store / "data.mdb").touch()
    [found] = findings(kind, store)
    assert f"data.mdb is missing or empty; its {BLOCKS} blocks are lost" in found
    tier = opened(kind, store)
    assert list(tier.entries()) == []
    assert f"its {BLOCKS} blocks are lost" in (tier.last_error or "")
    assert tier.store([full(key(1), [b"new"])]) == [DONE]
    tier.close()
    assert findings(kind, store) == []


def drop_records(kind: Kind, store: Path, count: int) -> None:
    """Removes records from the index in a transaction that is not the tier's."""
    layout = DISK_STORE if kind is DiskTier else LMDB_STORE
    with lmdb.open(str(store), max_dbs=3, map_size=SIZE) as env:
        index = env.open_db(layout.databases[1])
        with env.begin(write=True) as txn:
            for number in range(count):
                assert txn.delete(SPACE + name(number), db=index)


def test_vanished_blocks_are_counted(kind: Kind, store: Path) -> None:
    """`fsck` and the next start report them; the start corrects the number."""
    drop_records(kind, store, 19)
    assert findings(kind, store) == [f"19 of its {BLOCKS} blocks are lost"]
    tier = opened(kind, store)
    assert len(list(tier.entries())) == BLOCKS - 19
    assert f"19 of its {BLOCKS} blocks are lost" in (tier.last_error or "")
    tier.close()
    assert findings(kind, store) == []


def test_a_repair_corrects_the_number_of_blocks(kind: Kind, store: Path) -> None:
    drop_records(kind, store, 7)
    for expected in ([f"7 of its {BLOCKS} blocks are lost"], []):
        tier = opened(kind, store, repair=False)
        assert [str(finding) for step in check(tier, repair=True) for finding in step.findings] == expected
        tier.close()


def test_an_older_copy_of_the_index_is_a_loss(kind: Kind, store: Path) -> None:
    """The file was restored from a backup: the marker file knows of more blocks."""
    before = (store / "data.mdb").read_bytes()
    tier = opened(kind, store)
    list(tier.entries())
    assert tier.store([full(key(2000 + number), [b"new"]) for number in range(5)]) == [DONE] * 5
    tier.close()
    (store / "data.mdb").write_bytes(before)
    assert findings(kind, store) == [f"5 of its {BLOCKS + 5} blocks are lost"]


def test_changes_keep_the_number_of_blocks_correct(kind: Kind, store: Path) -> None:
    """Stores, replacements, removals, and removals of unknown blocks."""
    source = random.Random(5)
    tier = opened(kind, store)
    list(tier.entries())
    for _ in range(60):
        some = source.sample(range(BLOCKS * 2), 8)
        tier.store([full(name(number), content(number, SIZES)) for number in some])
        tier.remove([(SPACE, name(number)) for number in source.sample(range(BLOCKS * 2), 8)])
        assert tier.check_count(repair=False) is None
    blocks = tier.blocks_to_check()
    tier.close()
    assert (store / MARKER_FILE).read_text().split() == f"kvtier {marker_of(kind)} {blocks} blocks".split()
    assert findings(kind, store) == []


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_lower_number_is_synced_before_a_removal_commits(
    kind: Kind, tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "power" the marker file never has too many blocks on the disk. Stores sync nothing."""
    tier = kind("tier", tmp_path, SIZE, durability)
    assert tier.store([full(name(number), [b"part"]) for number in range(3)]) == [DONE] * 3
    synced: list[tuple[int, int]] = []
    real_fdatasync = os.fdatasync

    def fdatasync(fd: int) -> None:
        real_fdatasync(fd)
        if os.path.samestat(os.fstat(fd), (tmp_path / MARKER_FILE).stat()):
            marker = read_marker(tmp_path)
            assert marker is not None
            synced.append((marker.blocks, tier.blocks_to_check()))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    tier.remove([(SPACE, name(0))])
    assert synced == ([(2, 3)] if durability == "power" else []), "(marked blocks, committed blocks)"
    synced.clear()
    tier.store([full(name(3), [b"part"])])
    assert synced == []
    tier.close()


def marker_of(kind: Kind) -> str:
    layout = DISK_STORE if kind is DiskTier else LMDB_STORE
    return f"{layout.what}, format {layout.format_version},"


def make_old(kind: Kind, store: Path, marked: int) -> None:
    """Sets the format before the current one in the store, and `marked` in the marker file."""
    layout = DISK_STORE if kind is DiskTier else LMDB_STORE
    with lmdb.open(str(store), max_dbs=3, map_size=SIZE) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(layout.format_key, (layout.format_version - 1).to_bytes(4, "little"), db=meta)
    marker = store / MARKER_FILE
    marker.write_text(marker.read_text().replace(f"format {layout.format_version}", f"format {marked}"))


def test_a_store_of_an_earlier_format_is_emptied(kind: Kind, store: Path) -> None:
    """No lookup finds its blocks, so they would only use space; `fsck` leaves it as it is."""
    layout = DISK_STORE if kind is DiskTier else LMDB_STORE
    make_old(kind, store, layout.format_version - 1)
    with pytest.raises(TierOpenError, match=f"has format {layout.format_version - 1}; this release finds none"):
        opened(kind, store, repair=False)
    tier = opened(kind, store)
    assert (list(tier.entries()), tier.last_error) == ([], None)
    assert not list(store.glob("damaged-*"))
    tier.store([full(name(7), [b"part"])])
    tier.close()
    assert marker_of(kind) in (store / MARKER_FILE).read_text()
    tier = opened(kind, store)
    assert len(list(tier.entries())) == 1
    tier.close()


def test_a_damaged_format_is_not_an_earlier_one(kind: Kind, store: Path) -> None:
    """The marker file has the current format, so the store is moved aside like other damage."""
    layout = DISK_STORE if kind is DiskTier else LMDB_STORE
    make_old(kind, store, layout.format_version)
    tier = opened(kind, store)
    assert f"its format is damaged: {layout.format_version - 1}" in (tier.last_error or "")
    tier.close()
    assert list(store.glob("damaged-*"))


def test_a_newer_format_is_refused(kind: Kind, store: Path) -> None:
    """The release that wrote the format also wrote it in the marker file."""
    layout = DISK_STORE if kind is DiskTier else LMDB_STORE
    newer = layout.format_version + 1
    with lmdb.open(str(store), max_dbs=3, map_size=SIZE) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(layout.format_key, newer.to_bytes(4, "little"), db=meta)
    marker = store / MARKER_FILE
    marker.write_text(marker.read_text().replace(f"format {layout.format_version}", f"format {newer}"))
    with pytest.raises(TierOpenError, match=f"has format {newer}; this release knows formats up to"):
        opened(kind, store)
    assert not list(store.glob("damaged-*"))
