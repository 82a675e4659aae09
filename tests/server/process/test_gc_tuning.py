"""Collections of the oldest garbage: in quiet moments, and at the latest after an hour."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from kvtier.server.process.gc_tuning import FullCollector, HeapTrimmer

MIB = 1 << 20


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize(("calls_per_second", "expected"), [(0, 60), (1, 3600)])
def test_old_garbage_is_collected(calls_per_second: int, expected: int) -> None:
    """A quiet server collects after a minute, a busy one after an hour."""
    garbage = FullCollector(0.0)
    cycle = Cycle()
    gc.collect()  # moves the object to the oldest generation
    gone = weakref.ref(cycle)
    del cycle
    for second in range(1, expected):
        assert not garbage.tick(second, second * calls_per_second)
    assert gone() is not None
    assert garbage.tick(expected, expected * calls_per_second)
    assert gone() is None
    assert not garbage.tick(expected + 1, (expected + 1) * calls_per_second)


def test_long_collections_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their share of the time is limited, also without calls."""
    clock = iter([0.0, 0.5] * 3)
    monkeypatch.setattr("kvtier.server.process.gc_tuning.time.perf_counter", lambda: next(clock))
    garbage = FullCollector(0.0)
    assert [second for second in range(1, 2200) if garbage.tick(second, 0)] == [60, 1060, 2060]


def test_the_first_quiet_second_is_used() -> None:
    """The collection starts in the first second without a call, if a minute is over."""
    garbage = FullCollector(0.0)
    assert not any(garbage.tick(second, second) for second in range(1, 100))
    assert garbage.tick(100, 99)


def test_a_busy_server_collects_if_its_objects_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled calls leave garbage in the old generation, also while other calls are served."""
    blocks = 1_000_000
    monkeypatch.setattr("kvtier.server.process.gc_tuning.sys.getallocatedblocks", lambda: blocks)
    garbage = FullCollector(0.0)
    assert not any(garbage.tick(second, second) for second in range(1, 100))
    blocks += 300_000
    assert garbage.tick(100, 100)
    assert not any(garbage.tick(second, second) for second in range(101, 300)), "these blocks are in use"


def test_memory_of_a_burst_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process has grown in two checks in a row, also after many trims."""
    resident, trimmed = 0, 0

    def trim() -> None:
        nonlocal resident, trimmed
        resident, trimmed = 40 * MIB, trimmed + 1

    monkeypatch.setattr("kvtier.server.process.gc_tuning.own_bytes", lambda: resident)
    monkeypatch.setattr("kvtier.server.process.gc_tuning.trim_heap", trim)
    resident = 40 * MIB

    async def run() -> None:
        nonlocal resident
        trimmer = HeapTrimmer(0.0)
        for burst in range(4):
            resident = 80 * MIB
            assert [await trimmer.tick(20 * burst + second) for second in (5, 6, 9, 10)] == [False, False, False, True]
            resident = 60 * MIB
            assert [await trimmer.tick(20 * burst + second) for second in (15, 20)] == [False, False]

    asyncio.run(run())
    assert trimmed == 4


async def test_memory_that_is_freed_after_a_trim_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trim is repeated while much memory was in use, at longer and longer intervals."""
    in_use, resident = 0, 40 * MIB

    def trim() -> None:
        nonlocal resident
        resident = 40 * MIB + in_use

    monkeypatch.setattr("kvtier.server.process.gc_tuning.trim_heap", trim)
    monkeypatch.setattr("kvtier.server.process.gc_tuning.own_bytes", lambda: resident)
    trimmer = HeapTrimmer(0.0)
    in_use, resident = 800 * MIB, 1300 * MIB
    ticks = [second for second in range(5, 105, 5) if await trimmer.tick(second)]
    assert ticks == [10, 20, 40, 80]
    in_use = 0
    ticks = [second for second in range(105, 1000, 5) if await trimmer.tick(second)]
    assert ticks == [160]
    assert resident == 40 * MIB
