from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest
from contracts.secondary_tier import SecondaryTierContract
from contracts.tier import CORRUPT, DONE, FAILED, KIB, MIB, MISSING, NO_SPACE, SPACE, content, empty, fetch, full, held

from kvtier.tiers.disk.format import PAGE_BYTES, PageRun, SlabRecord
from kvtier.tiers.disk.free_space import FreePages
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.format import BlockRecord, DamagedRecordError
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome, SecondaryTier, TierOpenError

pytestmark = pytest.mark.usefixtures("no_leaks")


class TestDiskTier(SecondaryTierContract):
    child_source = """
        from kvtier.tiers.disk.tier import DiskTier

        def make(directory, size_bytes):
            return DiskTier("child", directory, size_bytes, "process")
    """

    def make_tier(self, directory: Path, size_bytes: int) -> DiskTier:
        return DiskTier("disk", directory, size_bytes, "process")

    def swap(self, tier: SecondaryTier) -> None:
        assert isinstance(tier, DiskTier)
        a, b = (record_of(tier, key, SPACE) for key in (b"a", b"b"))
        tier._store.index.put([(SPACE + b"a", b), (SPACE + b"b", a)])

    def corrupt(self, tier: SecondaryTier, namespace: NamespaceId, key: bytes) -> None:
        assert isinstance(tier, DiskTier)
        damage_block(tier, key, namespace)


def record_of(tier: DiskTier, key: bytes, namespace: NamespaceId) -> SlabRecord:
    (packed,) = tier._store.index.get([namespace + key])
    assert packed
    return SlabRecord.unpack(namespace + key, packed)


def damage_block(tier: DiskTier, key: bytes, namespace: NamespaceId) -> None:
    """Changes two stored bytes of a block."""
    run = record_of(tier, key, namespace).runs[0]
    with (tier._store.slabs._directory / "slab-00000").open("r+b") as file:
        file.seek(run.start * PAGE_BYTES + 100)
        file.write(b"\0\xff")


def opened(directory: Path, size_bytes: int = 32 * MIB, **more: Any) -> DiskTier:
    """Opens a store and lists its blocks."""
    tier = DiskTier("disk", directory, size_bytes, more.pop("durability", "process"), **more)
    tier.found = list(tier.entries())  # type: ignore[attr-defined]
    return tier


def names(tier: DiskTier) -> list[bytes]:
    """Returns the keys that the tier held when it was opened, oldest first."""
    return [entry.key for entry in tier.found]  # type: ignore[attr-defined]


def uses_direct_io(tier: DiskTier) -> bool:
    return all(file.direct for file in tier._store.slabs._files.values())


def free_runs(space: FreePages) -> list[PageRun]:
    return sorted(map(PageRun, space._starts.keys(), space._starts.values()))


def free_and_used(tier: DiskTier) -> tuple[int, int]:
    """Returns the free pages and those that records claim; checks that no page occurs twice."""
    assert tier._store._space
    free = {page for run in free_runs(tier._store._space) for page in range(run.start, run.end)}
    claims = [
        page for _, record in tier._store.index.scan() for run in record.runs for page in range(run.start, run.end)
    ]
    assert len(claims) == len(set(claims))
    assert not free & set(claims)
    assert len(free) == tier._store._space.free_pages
    return len(free), len(claims)


def slab_pages(tier: DiskTier) -> int:
    return sum(run.pages for run in tier._store.slabs.extents())


def filled(directory: Path, count: int = 20, sizes: tuple[int, ...] = (70_000,), **more: Any) -> None:
    """Makes a store with blocks "0", "1", … and closes it."""
    tier = opened(directory, **more)
    for number in range(count):
        assert tier.store([full(b"%d" % number, content(number, sizes))]) == [DONE]
    tier.close()


def aligned(nbytes: int) -> memoryview:
    """Returns memory that begins at a page boundary, as the region's slots do."""
    return memoryview(mmap.mmap(-1, nbytes + PAGE_BYTES))[:nbytes]


# ----- direct I/O


@pytest.mark.parametrize("shift", [0, 1, 512, 4095])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 300_001, 2 * MIB, 5 * MIB + 3, 20 * MIB])
def test_buffers_of_any_size_and_alignment(tmp_path: Path, size: int, shift: int) -> None:
    """Bytes are stored and loaded, and no memory beside them changes."""
    tier = opened(tmp_path, 64 * MIB)
    memory = aligned(size + shift + 100)
    memory[:] = b"." * memory.nbytes
    data = content(size, (size,))[0]
    memory[shift : shift + size] = data
    part = memory[shift : shift + size]
    assert tier.store([BlockBytes(SPACE, b"key", (part,))]) == [DONE]
    part[:] = bytes(size)
    assert tier.load([BlockBytes(SPACE, b"key", (part,))]) == [DONE]
    assert bytes(part) == data
    assert bytes(memory[:shift]) + bytes(memory[shift + size :]) == b"." * (shift + 100)
    tier.close()


def test_pages_are_padded_with_zeros(tmp_path: Path) -> None:
    """The rest of a page on disk has no bytes of other blocks in the buffer."""
    tier = opened(tmp_path)
    tier.store([full(b"secret", [b"S" * 4000]), full(b"short", [b"s" * 10])])
    run = record_of(tier, b"short", SPACE).runs[0]
    page = (tmp_path / "slab-00000").read_bytes()[run.start * PAGE_BYTES : run.end * PAGE_BYTES]
    assert page == b"s" * 10 + bytes(PAGE_BYTES - 10)
    tier.close()


@pytest.fixture
def system_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Records the system system_calls: name, flags of the descriptor, and number of buffers."""
    made = []
    for name in ("preadv", "pwritev"):

        def call(real: Any, name: str, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            made.append((name, fcntl.fcntl(fd, fcntl.F_GETFL), len(buffers)))
            done: int = real(fd, buffers, offset)
            return done

        monkeypatch.setattr(os, name, partial(call, getattr(os, name), name))
    return made


def test_adjacent_blocks_share_a_call(tmp_path: Path, system_calls: list[tuple[str, int, int]]) -> None:
    """Slots are written with direct I/O, and adjacent blocks in one call."""
    tier = opened(tmp_path)
    memory = aligned(16 * 64 * KIB)
    memory[:] = content("memory", (memory.nbytes,))[0]
    parts = [memory[start : start + 64 * KIB] for start in range(0, memory.nbytes, 64 * KIB)]
    blocks = [BlockBytes(SPACE, b"%d" % number, (part,)) for number, part in enumerate(parts)]
    assert tier.store(blocks) == [DONE] * 16
    before = bytes(memory)
    memory[:] = bytes(memory.nbytes)
    assert tier.load(blocks) == [DONE] * 16
    assert bytes(memory) == before
    direct = os.O_DIRECT if uses_direct_io(tier) else 0
    assert [(name, flags & os.O_DIRECT, buffers) for name, flags, buffers in system_calls] == [
        ("pwritev", direct, 16),
        ("preadv", direct, 16),
    ]
    tier.close()


@pytest.mark.parametrize("where", ["open", "call"])
def test_the_page_cache_is_used_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The file system may refuse it at the open or at the first call."""

    def refuse(flags: int) -> None:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")

    real_open, real_pwritev = os.open, os.pwritev

    def open_(path: Any, flags: int, *more: Any) -> int:
        refuse(flags)
        return real_open(path, flags, *more)

    def pwritev(fd: int, *more: Any) -> int:
        refuse(fcntl.fcntl(fd, fcntl.F_GETFL))
        return real_pwritev(fd, *more)

    monkeypatch.setattr(os, *(("open", open_) if where == "open" else ("pwritev", pwritev)))
    tier = opened(tmp_path)
    blocks = {b"%d" % number: content(number, (9 * MIB + number,)) for number in range(2)}
    assert tier.store([full(key, parts) for key, parts in blocks.items()]) == [DONE] * 2
    assert not uses_direct_io(tier)
    for key, parts in blocks.items():
        assert fetch(tier, key, (len(parts[0]),)) == parts
    assert tier.last_error is None
    tier.close()


def test_partial_reads_and_writes_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that transfers fewer bytes is followed by one for the rest."""
    for name in ("preadv", "pwritev"):

        def call(real: Any, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done: int = real(fd, [buffers[0][: 3 * PAGE_BYTES]], offset)
            return done

        monkeypatch.setattr(os, name, partial(call, getattr(os, name)))
    tier = opened(tmp_path)
    sizes = (100_000, 5000, 1, 64 * KIB)
    tier.store([full(b"key", content(1, sizes))])
    assert fetch(tier, b"key", sizes) == content(1, sizes)
    tier.close()


# ----- space


def test_free_pages_are_joined_and_split() -> None:
    """Neighbours are joined, but not across slabs; a block without a large enough run is split."""
    space = FreePages(100)
    space.give_back([PageRun(0, 100), PageRun(100, 50)])
    assert free_runs(space) == [PageRun(0, 100), PageRun(100, 50)]
    assert space.take(101) is None
    assert space.take(40) == PageRun(100, 40)  # the best fit
    assert space.take(100) == PageRun(0, 100)
    space.give_back([PageRun(10, 10), PageRun(30, 10), PageRun(20, 10)])
    assert free_runs(space) == [PageRun(10, 30), PageRun(140, 10)]
    assert space.gather(41) is None
    assert space.gather(35) == [PageRun(10, 30), PageRun(140, 5)]
    assert space.free_pages == 5


@pytest.mark.parametrize("seed", range(4))
def test_page_allocation_against_a_set(seed: int) -> None:
    """A long run of random requests allocates each page once, and frees all of them."""
    source, space, taken = random.Random(seed), FreePages(64), []
    space.give_back([PageRun(0, 64), PageRun(64, 64), PageRun(128, 20)])
    for _ in range(2000):
        if taken and source.random() < 0.5:
            space.give_back(taken.pop(source.randrange(len(taken))))
        else:
            runs = space.gather(source.choice([1, 1, 3, 16, 40]))
            if runs:
                taken.append(runs)
        pages = [page for runs in [*taken, free_runs(space)] for run in runs for page in range(run.start, run.end)]
        assert sorted(pages) == list(range(148))
    for runs in taken:
        space.give_back(runs)
    assert free_runs(space) == [PageRun(0, 64), PageRun(64, 64), PageRun(128, 20)]


@pytest.mark.parametrize("seed", range(2))
def test_changing_block_sizes_at_capacity(tmp_path: Path, seed: int) -> None:
    """Within the capacity every store finds space, for any mix of sizes, and no page is lost."""
    source = random.Random(seed)
    tier = opened(tmp_path, 32 * MIB)
    kinds = [(64 * KIB,), (2 * MIB,), (16 * KIB,) * 4, (300 * KIB, 300 * KIB)]
    stored: dict[bytes, tuple[int, ...]] = {}
    used = 0
    for step in range(600):
        # Each size dominates for a while, and uses the space of the others.
        sizes = kinds[step // 75 % 4] if source.random() < 0.8 else source.choice(kinds)
        key, gone = b"%d" % step, []
        while used + sum(sizes) > tier.capacity_bytes:
            victim = source.choice(list(stored))
            used -= sum(stored.pop(victim))
            gone.append((SPACE, victim))
        tier.remove(gone)
        assert tier.store([full(key, [bytes(size) for size in sizes])]) == [DONE]
        stored[key] = sizes
        used += sum(sizes)
    free, claimed = free_and_used(tier)
    assert claimed * PAGE_BYTES == used
    assert free + claimed == slab_pages(tier)
    for key, sizes in stored.items():
        assert tier.load([empty(key, sizes)]) == [DONE]
    tier.remove([(SPACE, key) for key in stored])
    assert free_and_used(tier) == (slab_pages(tier), 0)
    tier.close()


def test_failed_stores_leak_no_pages(tmp_path: Path) -> None:
    """Pages of an unfinished store are free again."""
    tier = opened(tmp_path, 8 * MIB)
    outcomes = tier.store([full(b"%d" % number, [bytes(MIB)]) for number in range(10)])
    assert outcomes == [DONE] * 6 + [NO_SPACE] * 4 or outcomes == [DONE] * 7 + [NO_SPACE] * 3
    free, claimed = free_and_used(tier)
    assert free + claimed == slab_pages(tier)
    assert "bytes are in use" in tier.last_error
    tier.close()


def test_slabs_are_made_when_needed(tmp_path: Path) -> None:
    """The files never exceed the size of the tier."""
    tier = opened(tmp_path, 32 * MIB, slab_bytes=8 * MIB)
    assert list(tmp_path.glob("slab-*")) == []
    lengths = []
    for number in range(40):
        tier.store([full(b"%d" % number, [bytes(MIB)])])
        lengths.append(len(list(tmp_path.glob("slab-*"))))
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert lengths[-1] == 4
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= 32 * MIB
    assert tier.store([full(b"3", [bytes(3 * MIB)])]) in ([DONE], [NO_SPACE])
    tier.close()


def test_a_block_may_span_slabs(tmp_path: Path) -> None:
    tier = opened(tmp_path, 32 * MIB, slab_bytes=MIB)
    parts = content("long", (3 * MIB, 2 * MIB + 5))
    assert tier.store([full(b"key", parts)]) == [DONE]
    assert fetch(tier, b"key", (3 * MIB, 2 * MIB + 5)) == parts
    tier.close()
    tier = opened(tmp_path, 32 * MIB)  # existing slabs keep their size
    assert fetch(tier, b"key", (3 * MIB, 2 * MIB + 5)) == parts
    tier.close()


def test_the_size_may_change_at_a_restart(tmp_path: Path) -> None:
    """A larger size gives more space.

    A smaller one applies at once, and blocks beyond it are dropped.
    """
    filled(tmp_path, 24, (MIB,), slab_bytes=8 * MIB)
    tier = opened(tmp_path, 64 * MIB)
    assert len(names(tier)) == 24
    assert tier.store([full(b"more %d" % number, [bytes(MIB)]) for number in range(30)]) == [DONE] * 30
    tier.close()
    tier = opened(tmp_path, 16 * MIB)
    left = names(tier)
    assert 10 < len(left) < 16
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= 16 * MIB
    assert set(left) <= {b"%d" % number for number in range(24)}
    for key in left:
        assert fetch(tier, key, (MIB,)) == content(int(key), (MIB,))
    assert tier.last_error is None
    free, claimed = free_and_used(tier)
    assert free + claimed == slab_pages(tier)
    tier.close()


@pytest.mark.parametrize(
    ("number", "outcome"), [(errno.ENOSPC, NO_SPACE), (errno.EDQUOT, NO_SPACE), (errno.EIO, FAILED)]
)
def test_disk_errors_fail_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Outcome
) -> None:
    """The error is a trouble of the tier until the next success; no space is lost."""
    tier = opened(tmp_path)
    parts = content("x", (300_000,))
    tier.store([full(b"key", parts), full(b"other", parts)])
    before = free_and_used(tier)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        patch.setattr(os, "preadv", fail)
        assert tier.store([full(b"a", parts), full(b"key", parts)]) == [outcome] * 2
        assert tier.load([empty(b"key", (300_000,)), empty(b"none", (1,))]) == [FAILED, MISSING]
        assert "cannot store" in tier.last_error
        assert "cannot load" in tier.last_error
    assert free_and_used(tier) == before
    assert fetch(tier, b"key", (300_000,)) == parts
    assert tier.store([full(b"a", parts)]) == [DONE]
    assert tier.last_error is None
    tier.close()


def test_an_unreadable_block_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adjacent blocks of the job are loaded."""
    tier = opened(tmp_path)
    for number in range(4):
        tier.store([full(b"%d" % number, content(number, (70_000,)))])
    bad = record_of(tier, b"2", SPACE).runs[0].start * PAGE_BYTES
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= bad < offset + sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    into = [empty(b"%d" % number, (70_000,)) for number in range(4)]
    assert tier.load(into) == [DONE, DONE, FAILED, DONE]
    assert all(held(into[number]) == content(number, (70_000,)) for number in (0, 1, 3))
    tier.close()


def adjacent(tier: DiskTier, count: int) -> list[BlockBytes]:
    """Stores blocks "0", "1", … of 64 KiB in adjacent pages; returns blocks to load them."""
    memory = aligned(count * 64 * KIB)
    blocks = [
        BlockBytes(SPACE, b"%d" % number, (memory[number * 64 * KIB : (number + 1) * 64 * KIB],))
        for number in range(count)
    ]
    for number, block in enumerate(blocks):
        block.parts[0][:] = content(number, (64 * KIB,))[0]
    assert tier.store(blocks) == [DONE] * count
    memory[:] = bytes(memory.nbytes)
    return blocks


def right(blocks: Sequence[BlockBytes]) -> list[bool]:
    """Returns whether each block has its content."""
    return [held(block) == content(int(block.key), (64 * KIB,)) for block in blocks]


def test_a_corrupt_block_between_adjacent_blocks_fails_alone(
    tmp_path: Path, system_calls: list[tuple[str, int, int]]
) -> None:
    """One system call reads all of them."""
    tier = opened(tmp_path)
    blocks = adjacent(tier, 8)
    damage_block(tier, b"3", SPACE)
    system_calls.clear()
    assert tier.load(blocks) == [DONE, DONE, DONE, CORRUPT, DONE, DONE, DONE, DONE]
    assert [(name, buffers) for name, _, buffers in system_calls] == [("preadv", 8)]
    assert right(blocks) == [number != 3 for number in range(8)]
    assert tier.load(blocks) == [DONE, DONE, DONE, MISSING, DONE, DONE, DONE, DONE]
    tier.close()


def test_only_blocks_of_a_failed_call_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read once more, on its own; a block that was alone in the call is not."""
    tier = opened(tmp_path)
    blocks = adjacent(tier, 8)
    bad = [record_of(tier, key, SPACE).runs[0].start * PAGE_BYTES for key in (b"1", b"7")]
    made, real = [], os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        made.append(len(buffers))
        if any(offset <= at < stop for at in bad):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    wanted = [*blocks[:3], *blocks[4:6], blocks[7]]
    assert tier.load(wanted) == [DONE, FAILED, DONE, DONE, DONE, FAILED]
    assert sorted(made) == [1, 1, 1, 1, 2, 3]
    assert right(wanted) == [True, False, True, True, True, False]
    assert "Input/output error" in str(tier.last_error)
    tier.close()


def test_a_file_that_became_shorter_fails_only_its_last_blocks(tmp_path: Path) -> None:
    """A combined read that ends in the file is not a success."""
    tier = opened(tmp_path)
    blocks = adjacent(tier, 8)
    os.truncate(tmp_path / "slab-00000", record_of(tier, b"5", SPACE).runs[0].end * PAGE_BYTES - PAGE_BYTES)
    assert tier.load(blocks) == [DONE] * 5 + [FAILED] * 3
    assert right(blocks[:5]) == [True] * 5
    assert "shorter than expected" in str(tier.last_error)
    tier.close()


def test_a_block_in_a_missing_slab_fails_alone(tmp_path: Path) -> None:
    """A record with a valid checksum can name any pages."""
    tier = opened(tmp_path)
    blocks = adjacent(tier, 3)
    record = record_of(tier, b"1", SPACE)
    far = PageRun(1 << 30, record.runs[0].pages)
    tier._store.index.put([(SPACE + b"1", record._replace(runs=(far,)))])
    assert tier.load(blocks) == [DONE, FAILED, DONE]
    tier.close()


def test_a_block_twice_in_a_load_is_read_twice(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    first, *_ = adjacent(tier, 2)
    again = BlockBytes(SPACE, b"0", (aligned(64 * KIB),))
    assert tier.load([first, again]) == [DONE, DONE]
    assert right([first, again]) == [True, True]
    tier.close()


# ----- damage


def test_pages_of_corrupt_blocks_are_quarantined(tmp_path: Path) -> None:
    """They are not reused before a restart."""
    tier = opened(tmp_path, 8 * MIB)
    tier.store([full(b"%d" % number, content(number, (MIB,))) for number in range(3)])
    place = record_of(tier, b"1", SPACE).runs
    damage_block(tier, b"1", SPACE)
    assert tier.load([empty(b"1", (MIB,))]) == [CORRUPT]
    assert tier._store.quarantined_bytes == MIB
    stored = 0
    while tier.store([full(b"new %d" % stored, [bytes(64 * KIB)])]) == [DONE]:
        stored += 1
    pages = {run for _, record in tier._store.index.scan() for run in record.runs}
    assert not pages & set(place)
    free, claimed = free_and_used(tier)
    assert free + claimed == slab_pages(tier) - MIB // PAGE_BYTES
    tier.close()
    tier = opened(tmp_path, 8 * MIB)
    assert tier.store([full(b"back", [bytes(MIB)])]) == [DONE]
    tier.close()


def test_a_block_that_was_replaced_meanwhile_is_not_dropped(tmp_path: Path) -> None:
    """A load that found the earlier content corrupt ends after a store of the same key."""
    tier = opened(tmp_path)
    name = SPACE + b"key"
    tier.store([full(b"key", [b"old"])])
    (earlier,) = tier._store.index.get([name])
    tier.store([full(b"key", [b"new"])])
    with tier._store.writing:
        assert earlier is not None
        assert not tier._store.drop(name, earlier, quarantine=True)
    assert tier._store.quarantined_bytes == 0
    assert fetch(tier, b"key", (3,)) == (b"new",)
    tier.close()


@pytest.mark.parametrize("damage", ["missing", "emptied", "halved", "odd"])
def test_blocks_of_a_damaged_slab_are_dropped(tmp_path: Path, damage: str) -> None:
    """The slab is missing or too short: the tier reports it and keeps other blocks."""
    filled(tmp_path, 20, (MIB,), slab_bytes=8 * MIB)
    path = tmp_path / "slab-00001"
    length = path.stat().st_size
    match damage:
        case "missing":
            path.unlink()
        case "emptied":
            os.truncate(path, 0)
        case "halved":
            os.truncate(path, length // 2)
        case "odd":
            os.truncate(path, length - 1)
    tier = opened(tmp_path)
    assert "missing or too short" in tier.last_error
    lost = 20 - len(names(tier))
    assert f"{lost} blocks" in tier.last_error
    assert lost == {"missing": 8, "emptied": 8, "halved": 4, "odd": 1}[damage]
    for key in names(tier):
        assert fetch(tier, key, (MIB,)) == content(int(key), (MIB,))
    assert tier.store([full(b"new %d" % number, content(number, (MIB,))) for number in range(lost)]) == [DONE] * lost
    for number in range(lost):
        assert fetch(tier, b"new %d" % number, (MIB,)) == content(number, (MIB,))
    free, claimed = free_and_used(tier)
    assert free + claimed == slab_pages(tier)
    tier.close()
    tier = opened(tmp_path)
    assert len(names(tier)) == 20
    assert tier.last_error is None
    tier.close()


def test_a_damaged_index_is_moved_aside(tmp_path: Path) -> None:
    """The tier starts empty, reports it, keeps the damaged index, and uses the existing slabs."""
    filled(tmp_path)
    with (tmp_path / "data.mdb").open("r+b") as file:
        file.write(random.Random(1).randbytes(8192))
    tier = opened(tmp_path)
    assert names(tier) == []
    assert "damaged" in tier.last_error
    assert (tmp_path / "damaged-1" / "data.mdb").exists()
    assert free_and_used(tier) == (slab_pages(tier), 0)
    assert tier.store([full(b"key", [b"data"])]) == [DONE]
    assert len(list(tmp_path.glob("slab-*"))) == 1
    tier.close()


def test_damaged_index_records_are_dropped(tmp_path: Path) -> None:
    """A wrong checksum or pages of a younger block make a record invalid; its pages are free."""
    tier = opened(tmp_path)
    tier.store([full(b"%d" % number, content(number, (70_000,))) for number in range(4)])
    index = tier._store.index
    one, two = (record_of(tier, key, SPACE) for key in (b"1", b"2"))
    with index._env.begin(write=True) as txn:
        packed = bytearray(txn.get(SPACE + b"0", db=index._blocks))
        packed[6] ^= 1
        txn.put(SPACE + b"0", packed, db=index._blocks)
        txn.put(SPACE + b"short", b"short", db=index._blocks)
        txn.put(SPACE + b"1", one._replace(runs=two.runs).pack(SPACE + b"1"), db=index._blocks)
    tier.close()
    tier = opened(tmp_path)
    assert names(tier) == [b"2", b"3"]
    assert len(tier._store.index) == 2
    free, claimed = free_and_used(tier)
    assert (free + claimed, claimed) == (slab_pages(tier), 36)
    assert fetch(tier, b"2", (70_000,)) == content(2, (70_000,))
    tier.close()


def test_a_failed_removal_frees_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are free only once the index no longer names them."""
    tier = opened(tmp_path)
    tier.store([full(b"key", [bytes(MIB)])])
    before = free_and_used(tier)

    def fail(*_: object) -> None:
        raise lmdb.Error("no")

    with monkeypatch.context() as patch:
        patch.setattr(tier._store.index, "remove", fail)
        tier.remove([(SPACE, b"key")])
        assert "cannot remove" in tier.last_error
        assert free_and_used(tier) == before
    assert fetch(tier, b"key", (MIB,)) == (bytes(MIB),)
    with monkeypatch.context() as patch:
        patch.setattr(tier._store.index, "put", fail)
        assert tier.store([full(b"new", [bytes(MIB)])]) == [FAILED]
    # It is unknown whether that record is on disk: its pages wait for the next start.
    free, claimed = free_and_used(tier)
    assert free + claimed == slab_pages(tier) - MIB // PAGE_BYTES
    tier.close()


# ----- order of writes


def test_the_index_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With durability "power" the data is synced before the index.

    With "process" there is no sync.
    """
    for durability in ("process", "power"):
        tier = opened(tmp_path / durability, durability=durability)
        order: list[str] = []
        for where, name in ((tier._store.slabs, "write"), (tier._store.slabs, "sync"), (tier._store.index, "put")):

            def call(real: Any, name: str, order: list[str], *args: Any, **more: Any) -> Any:
                order.append(name)
                return real(*args, **more)

            monkeypatch.setattr(where, name, partial(call, getattr(where, name), name, order))
        assert tier.store([full(b"key", [b"data"])]) == [DONE]
        assert order == (["write", "put"] if durability == "process" else ["write", "sync", "put"])
        assert tier._store.index._env.flags()["sync"] == (durability == "power")
        tier.close()


def test_a_crash_before_the_index_write_loses_only_new_blocks(tmp_path: Path) -> None:
    """Unpublished bytes are not listed after a restart, and their pages are free."""
    filled(tmp_path, 3)
    child = (
        "import os, sys; from pathlib import Path; from contracts.tier import *;"
        "from kvtier.tiers.disk.tier import DiskTier; tier = DiskTier('disk', Path(sys.argv[1]), 32 * MIB, 'process');"
        "tier._store.index.put = lambda records: os._exit(7);"
        "tier.store([full(b'0', [bytes(70_000)]), full(b'new', [bytes(70_000)])])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], env=environment, check=False, timeout=60)
    assert done.returncode == 7
    tier = opened(tmp_path)
    assert names(tier) == [b"0", b"1", b"2"]
    for number in range(3):
        assert fetch(tier, b"%d" % number, (70_000,)) == content(number, (70_000,))
    assert free_and_used(tier) == (slab_pages(tier) - 3 * 18, 3 * 18)
    tier.close()


# ----- access


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    """The error names the directory and the process that uses it."""
    tier = opened(tmp_path)
    child = (
        "import sys; from pathlib import Path; from kvtier.tiers.disk.tier import DiskTier;"
        "DiskTier('disk', Path(sys.argv[1]), 1 << 25, 'process')"
    )
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path)], check=False, capture_output=True, text=True)
    assert f"the disk store in {tmp_path} is in use by process {os.getpid()}" in done.stderr
    assert "TierInUseError" in done.stderr
    assert tier.store([full(b"key", [b"data"])]) == [DONE]
    tier.close()
    opened(tmp_path).close()


def test_directories_of_other_tier_types_are_refused(tmp_path: Path) -> None:
    """Either way, and the files stay unchanged."""
    LMDBTier("lmdb", tmp_path / "lmdb", 8 * MIB, "process").close()
    opened(tmp_path / "disk").close()
    with pytest.raises(TierOpenError, match="is not a kvtier disk store"):
        opened(tmp_path / "lmdb")
    with pytest.raises(TierOpenError, match="is not a kvtier LMDB store"):
        LMDBTier("lmdb", tmp_path / "disk", 8 * MIB, "process")
    assert list(tmp_path.rglob("damaged-*")) == []


def test_files_are_private(tmp_path: Path) -> None:
    """Other users cannot read cached blocks."""
    filled(tmp_path / "store")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "store").iterdir()}
    assert modes == {0o600}


def test_an_unusable_slab_is_named(tmp_path: Path) -> None:
    """The slab is not a file; afterwards the directory is free again."""
    opened(tmp_path).close()
    (tmp_path / "slab-00000").mkdir()
    for _ in range(2):
        with pytest.raises(TierOpenError, match="slab-00000"):
            opened(tmp_path)


# ----- cost and format


def test_stores_make_no_copy(tmp_path: Path) -> None:
    """Blocks are written from their own memory."""
    tier = opened(tmp_path, 128 * MIB)
    part = aligned(8 * MIB)
    blocks = [BlockBytes(SPACE, b"%d" % number, (part,)) for number in range(4)]
    tracemalloc.start()
    assert tier.store(blocks) == [DONE] * 4
    assert tier.load(blocks) == [DONE] * 4
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tier.close()
    assert peak < 500_000


@pytest.mark.parametrize(
    "record",
    [
        SlabRecord(2**40, 2**64 - 1, (1, 8192, 0), (PageRun(2**40, 1), PageRun(7, 2))),
        BlockRecord(2**40, 2**64 - 1, (1, 2**33, 0)),
    ],
)
def test_records_are_checked(record: SlabRecord | BlockRecord) -> None:
    """A record of either tier reads back as written.

    A change of one byte of it or of its name makes it invalid.
    """
    packed, unpack = record.pack(b"name"), type(record).unpack
    assert unpack(b"name", packed) == record
    changed = [bytearray(packed) for _ in packed]
    for at, other in enumerate(changed):
        other[at] ^= 0x10
    for wrong in (*map(bytes, changed), b"", packed[:-1], packed + b"\0", packed[8:]):
        with pytest.raises(DamagedRecordError):
            unpack(b"name", wrong)
    with pytest.raises(DamagedRecordError):
        unpack(b"other", packed)
