"""Collections of the oldest garbage: in quiet moments, and at the latest after an hour."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvtier.server.process.gc_tuning import FullCollector


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
