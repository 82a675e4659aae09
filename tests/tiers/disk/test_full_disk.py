"""Each tier with files, on a disk that becomes full during a batch."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.tier import DONE, MIB, MISSING, NO_SPACE, SPACE, content, empty, fetch, full, key

from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import SecondaryTier

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZES = (200_000, 100_000)
DISK = 24 * MIB
PAGE = 4096
Make = Callable[[], SecondaryTier]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a file system in memory that is smaller than the capacity of the tiers."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture(params=[LMDBTier, DiskTier])
def make(request: pytest.FixtureRequest, small_disk: Path) -> Iterator[Make]:
    """Returns a function that opens the tier again, with a capacity beyond the disk."""
    tiers: list[SecondaryTier] = []

    def opened() -> SecondaryTier:
        if tiers:
            tiers.pop().close()
        tiers.append(request.param("tier", small_disk / "store", 128 * MIB, "process"))
        return tiers[0]

    yield opened
    for tier in tiers:
        tier.close()


def store(tier: SecondaryTier, numbers: range) -> tuple[set[int], set[int]]:
    """Stores blocks as one batch; returns the stored ones, and those without space."""
    outcomes = tier.store([full(key(number), content(number, SIZES)) for number in numbers])
    assert set(outcomes) <= {DONE, NO_SPACE}
    pairs = list(zip(numbers, outcomes, strict=True))
    return tuple({number for number, outcome in pairs if outcome is wanted} for wanted in (DONE, NO_SPACE))  # type: ignore[return-value]


def assert_holds(tier: SecondaryTier, there: set[int], gone: set[int]) -> None:
    """Checks that exactly these blocks are in the tier, bit by bit."""
    for number in there:
        assert fetch(tier, key(number), SIZES) == content(number, SIZES)
    assert tier.load([empty(key(number), SIZES) for number in gone]) == [MISSING] * len(gone)


def test_a_batch_on_a_disk_that_becomes_full(make: Make, small_disk: Path) -> None:
    """Stored blocks stay, also after a restart; the others use no space and can be stored later."""
    tier = make()
    assert list(tier.entries()) == []
    before, none = store(tier, range(20))
    assert not none
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        file.write(bytes(6 * MIB))
    some, rest = store(tier, range(100, 200))
    assert rest, "the disk is full"
    assert "cannot store" in tier.last_error
    assert "no space left on device, " in tier.last_error or not isinstance(tier, DiskTier)
    assert_holds(tier, before | some, rest)
    tier = make()
    assert {int.from_bytes(entry.key[:16], "big") for entry in tier.entries()} == before | some
    assert_holds(tier, before | some, rest)
    more, still = store(tier, range(300, 400))
    assert still
    assert_holds(tier, before | some | more, rest | still)
    ballast.unlink()
    assert store(tier, range(900, 901)) == ({900}, set())
    assert tier.last_error is None
    tier.remove([(SPACE, key(number)) for number in before | some | more | {900}])
    for start in range(1000, 1040, 4):
        assert store(tier, range(start, start + 4)) == (set(range(start, start + 4)), set())
    assert tier.last_error is None
    assert_holds(tier, set(range(1000, 1040)), before | some | more)


def test_failed_batches_on_a_full_disk_leak_no_space(make: Make) -> None:
    """After many failed batches the same number of blocks fits."""
    tier = make()
    assert list(tier.entries()) == []
    first, _ = store(tier, range(100))
    for _ in range(10):
        store(tier, range(200, 300))
    tier.remove([(SPACE, key(number)) for number in (*range(100), *range(200, 300))])
    store(tier, range(400, 401))
    again, _ = store(tier, range(500, 500 + max(1, len(first) - 8)))
    assert len(again) >= len(first) - 8 > 10


def fill_up(path: Path) -> None:
    """Writes a file that takes all free bytes of the disk."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(PAGE)):
            pass


def test_a_full_disk_does_not_empty_the_tier(make: Make, small_disk: Path) -> None:
    """Another program takes the last byte.

    Evictions are committed, and each makes room for a block. The tier never holds fewer blocks.
    """
    tier = make()
    assert list(tier.entries()) == []
    names = [random.Random(number).randbytes(36) for number in range(700)]
    parts = content("x", (40_000,))
    there = names[:100]
    assert tier.store([full(name, parts) for name in there]) == [DONE] * 100
    fill_up(small_disk / "ballast")
    for name in names[100:]:
        while tier.store([full(name, parts)]) != [DONE]:
            assert there, f"all blocks are evicted, and the next one finds no space: {tier.last_error}"
            tier.remove([(SPACE, there.pop(0))])
        assert "cannot remove" not in (tier.last_error or "")
        there.append(name)
    assert len(there) >= 98
    assert_same(make(), there, parts)


def assert_same(tier: SecondaryTier, names: list[bytes], parts: tuple[bytes, ...]) -> None:
    """Checks that a reopened tier lists and loads exactly these blocks."""
    assert {entry.key for entry in tier.entries()} == set(names)
    for name in names:
        assert fetch(tier, name, tuple(map(len, parts))) == parts


def test_a_full_disk_is_reported_until_it_has_room(make: Make, small_disk: Path) -> None:
    """Loads, removals and stores in freed space do not clear the message; free space does."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(10 * MIB))
    tier = make()
    assert list(tier.entries()) == []
    parts = content("x", (40_000,))
    number = 0
    while tier.store([full(key(number), parts)]) == [DONE]:
        number += 1
    said = re.fullmatch(r"cannot store: no space left on device, (\d+) of (\d+) bytes free", tier.last_error or "")
    assert said
    assert (int(said[1]) < MIB, int(said[2])) == (True, DISK)
    for _ in range(3):
        assert fetch(tier, key(0), (40_000,)) == parts
        assert tier.last_error
        tier.remove([(SPACE, key(number - 1)), (SPACE, key(number - 2)), (SPACE, key(number - 3))])
        assert tier.last_error
        assert tier.store([full(key(number - 1), parts)]) == [DONE]
        assert "no space left on device" in tier.last_error
        tier.store([full(key(n), parts) for n in (number - 2, number - 3)])
    tier.remove([(SPACE, key(n)) for n in range(number // 2, number)])
    ballast.unlink()
    assert tier.store([full(key(1000), parts)]) == [DONE]
    assert tier.last_error is None


@pytest.mark.parametrize("blocks", [0, 5])
def test_a_tier_opens_on_a_full_disk(make: Make, small_disk: Path, blocks: int) -> None:
    """It serves its blocks, stores nothing, and stores again once the disk has room."""
    tier = make()
    parts = content("x", (200_000,))
    tier.store([full(key(number), parts) for number in range(blocks)])
    fill_up(small_disk / "ballast")
    tier = make()
    assert len(list(tier.entries())) == blocks
    outcomes = tier.store([full(key(number), parts) for number in range(100, 200)])
    assert NO_SPACE in outcomes
    for number in range(blocks):
        assert fetch(tier, key(number), (200_000,)) == parts
    assert "no space left on device" in (tier.last_error or "")
    (small_disk / "ballast").unlink()
    assert tier.store([full(key(300), parts)]) == [DONE]
    assert tier.last_error is None
