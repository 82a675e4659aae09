"""Wait between attempts: growth, limit, reset."""

from __future__ import annotations

import math

import pytest

from kvtier.protos.backoff import Backoff


def test_the_delay_doubles_up_to_its_limit() -> None:
    backoff = Backoff(1.0, 6.0)
    delays = []
    for _ in range(5):
        delays.append(backoff.delay)
        backoff.grow()
    assert delays == [1.0, 2.0, 4.0, 6.0, 6.0]
    backoff.reset()
    assert backoff.delay == 1.0


@pytest.mark.parametrize("now", [0.0, 1e9, -5.0])
def test_a_wait_ends_after_the_delay(now: float) -> None:
    """Of any clock. Growth changes only the next wait."""
    backoff = Backoff(2.0, 8.0)
    assert backoff.is_over(-math.inf)
    backoff.start(now)
    backoff.grow()
    assert (backoff.is_over(now), backoff.remaining(now)) == (False, 2.0)
    assert (backoff.is_over(now + 2), backoff.remaining(now + 3)) == (True, 0.0)
    backoff.start(now)
    assert backoff.remaining(now) == 4.0
    backoff.reset()
    assert (backoff.is_over(now), backoff.remaining(now)) == (True, 0.0)


def test_attempts_that_fail_have_growing_waits() -> None:
    """The first is immediate, the delay has a limit, and a good attempt resets it."""
    now, backoff, waits = 100.0, Backoff(1.0, 5.0), []
    assert backoff.is_over(now)
    for was_good in (False, False, False, False, True, False):
        backoff.ended(now, was_good=was_good)
        waits.append(backoff.remaining(now))
        now += 100
        assert backoff.is_over(now)
    assert waits == [1, 2, 4, 5, 1, 2]
