"""Cost of the jobs of storage tiers, as numbers of Python functions per block."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.tier import DONE, KIB, MIB, SPACE
from harness.function_counts import FunctionCounter

from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import BlockBytes, Outcome, SecondaryTier

pytestmark = pytest.mark.usefixtures("no_leaks")

SIZE = 64 * KIB
BLOCKS = 64


def blocks_from(first: int, step: int) -> list[BlockBytes]:
    """Returns blocks whose memory begins at a page boundary, as the region's slots do."""
    memory = memoryview(mmap.mmap(-1, BLOCKS * SIZE))
    return [
        BlockBytes(SPACE, b"%d" % (first + number * step), (memory[number * SIZE : (number + 1) * SIZE],))
        for number in range(BLOCKS)
    ]


def per_block(
    functions: FunctionCounter, move: Callable[[list[BlockBytes]], list[Outcome]], blocks: list[BlockBytes]
) -> float:
    outcomes: list[Outcome] = []
    count = functions.of(lambda: outcomes.extend(move(blocks)))
    assert outcomes == [DONE] * len(blocks)
    return count / len(blocks)


@pytest.fixture
def functions() -> Iterator[FunctionCounter]:
    counter = FunctionCounter()
    threading.setprofile(counter)
    yield counter
    threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "stores", "loads"), [(DiskTier, 12, 6), (LMDBTier, 14, 7)])
def test_a_block_costs_few_functions(
    tmp_path: Path,
    functions: FunctionCounter,
    make: Callable[..., SecondaryTier],
    stores: int,
    loads: int,
) -> None:
    """The store and the load of adjacent blocks in one job."""
    tier = make("tier", tmp_path, 64 * MIB, "process")
    assert list(tier.entries()) == []
    tier.store(blocks_from(0, 1))  # makes files and threads
    stored = per_block(functions, tier.store, blocks_from(BLOCKS, 1))
    loaded = per_block(functions, tier.load, blocks_from(0, 1))
    tier.close()
    assert stored <= stores
    assert loaded <= loads


def test_a_scattered_block_of_the_disk_tier_costs_few_functions(tmp_path: Path, functions: FunctionCounter) -> None:
    """Each block has a system call of its own."""
    tier = DiskTier("tier", tmp_path, 64 * MIB, "process")
    assert list(tier.entries()) == []
    tier.store(blocks_from(0, 1))
    tier.store(blocks_from(BLOCKS, 1))
    loaded = per_block(functions, tier.load, blocks_from(0, 2))
    tier.close()
    assert loaded <= 12
