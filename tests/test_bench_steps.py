"""Comparison of the counts of steps (`bench/steps.py`)."""

from __future__ import annotations

import json

import pytest

from bench.steps import RESULTS, Figures, grown

BEFORE: Figures = {
    "round trips": 2,
    "client: system calls": 6,
    "client: function calls": 300,
    "server: function calls": 1000,
    "memory at the peak, KiB": 50,
}


@pytest.mark.parametrize(
    ("name", "within", "beyond"),
    [
        ("round trips", 2, 3),
        ("client: system calls", 6, 7),
        ("client: function calls", 313, 314),
        ("server: function calls", 1154, 1155),
        ("memory at the peak, KiB", 64, 65),
    ],
)
def test_a_larger_figure_is_named(name: str, within: int, beyond: int) -> None:
    assert grown({"store": BEFORE}, {"store": BEFORE | {name: within}}) == []
    [line] = grown({"store": BEFORE}, {"store": BEFORE | {name: beyond}})
    assert line == f"store, {name}: {BEFORE[name]} before, {beyond} now"


def test_a_lost_figure_and_a_new_one_are_named() -> None:
    now = {name: value for name, value in BEFORE.items() if name != "round trips"} | {"new": 1}
    assert len(grown({"store": BEFORE}, {"store": now})) == 2
    assert len(grown({"store": BEFORE}, {})) == len(BEFORE)


def test_the_committed_figures_have_both_sides_of_each_operation() -> None:
    """A count of zero would mean that the profile did not reach a thread."""
    for figures in json.loads(RESULTS.read_text())["operations"].values():
        assert all(value > 0 for value in figures.values())
        assert {"client: function calls", "server: function calls", "round trips"} <= figures.keys()
