"""The memory check detects leaks and accepts noise."""

from __future__ import annotations

import random

import pytest

from stress.flatness import TOLERANCE, trend_of
from stress.shape import MIB

SECONDS = 400


def series(
    leak_per_second: float = 0.0, *, noise: float = 2 * MIB, warm_up: float = 30 * MIB
) -> list[tuple[float, float]]:
    """A series with a warm-up, a slope and noise."""
    rng = random.Random(1)
    return [
        (at, 50 * MIB + warm_up * min(at, 20) / 20 + leak_per_second * at + rng.uniform(0, noise))
        for at in range(SECONDS)
    ]


def test_a_process_that_leaks_is_found() -> None:
    """A leak of twice the tolerance is found beneath larger noise."""
    trend = trend_of("memory", series(2 * TOLERANCE["memory"].per_minute / 60, noise=6 * MIB))
    assert trend.flat is False
    assert trend.per_minute == pytest.approx(2 * TOLERANCE["memory"].per_minute, rel=0.4)


def test_warming_up_and_noise_are_no_leak() -> None:
    assert trend_of("memory", series()).flat is True


def test_a_spike_and_a_step_at_the_end_are_no_leak() -> None:
    """A single event is not a slope."""
    points = series()
    points[260] = (260, 500 * MIB)
    points[-5:] = [(at, figure + 20 * MIB) for at, figure in points[-5:]]
    assert trend_of("memory", points).flat is True


def test_steps_that_come_again_and_again_are_a_leak() -> None:
    """One descriptor per lost session is a leak."""
    assert trend_of("descriptors", [(at, 20 + at // 20) for at in range(SECONDS)]).flat is False
    assert trend_of("descriptors", [(at, 20 + at // 20 % 2) for at in range(SECONDS)]).flat is True


def test_a_pool_that_grows_by_a_few_threads_is_no_leak() -> None:
    """In two minutes, two threads more are above the growth per minute that a long run may show."""
    for grown, flat in ((2, True), (8, False)):
        points = [(at, 23 + grown * min(1.0, max(0.0, (at - 190) / 160))) for at in range(350)]
        assert trend_of("threads", points).flat is flat


def test_a_short_series_is_not_judged() -> None:
    """After four minutes, three of them warm-up, there is no verdict."""
    assert trend_of("memory", series(MIB)[:230]).flat is None
    assert trend_of("memory", []).flat is None
