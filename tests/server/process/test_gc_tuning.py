"""When the server collects old garbage: when that disturbs nobody, and in the end in any case."""

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
def test_the_old_are_collected(calls_per_second: int, expected: int) -> None:
    """In a quiet server after a minute, in a busy one after an hour; and what is collected is gone."""
    garbage = FullCollector(0.0)
    cycle = Cycle()
    gc.collect()  # it is old now
    gone = weakref.ref(cycle)
    del cycle
    for second in range(1, expected):
        assert not garbage.tick(second, second * calls_per_second)
    assert gone() is not None
    assert garbage.tick(expected, expected * calls_per_second)
    assert gone() is None
    assert not garbage.tick(expected + 1, (expected + 1) * calls_per_second)


def test_collections_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made as seldom as their share of the time asks for, also where nobody calls."""
    clock = iter([0.0, 0.5] * 3)
    monkeypatch.setattr("kvtier.server.process.gc_tuning.time.perf_counter", lambda: next(clock))
    garbage = FullCollector(0.0)
    assert [second for second in range(1, 2200) if garbage.tick(second, 0)] == [60, 1060, 2060]


def test_a_busy_server_that_becomes_quiet() -> None:
    """The first second without a call is taken, if a minute is over."""
    garbage = FullCollector(0.0)
    assert not any(garbage.tick(second, second) for second in range(1, 100))
    assert garbage.tick(100, 99)
