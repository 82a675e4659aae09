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
