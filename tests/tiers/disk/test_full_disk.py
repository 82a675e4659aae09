"""Each tier with files, on a disk that becomes full during a batch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.tier import DONE, MIB, MISSING, NO_SPACE, SPACE, content, empty, fetch, full, key

from kvtier.tiers.base import SecondaryTier
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.tier import LMDBTier

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZES = (200_000, 100_000)
DISK = 24 * MIB
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
    tiers.pop().close()


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
    assert tier.last_error
    assert "cannot store" in tier.last_error
    assert_holds(tier, before | some, rest)
    tier = make()
    assert {int.from_bytes(entry.key[:16], "big") for entry in tier.entries()} == before | some
    assert_holds(tier, before | some, rest)
    more, still = store(tier, range(300, 400))
    assert still
    assert_holds(tier, before | some | more, rest | still)
    ballast.unlink()
    tier.remove([(SPACE, key(number)) for number in before | some | more])
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
