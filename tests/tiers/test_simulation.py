"""The core in random simulated runs; `make simulate` runs more of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation import run
from simulation.model import EXERCISED
from simulation.runner import Tally, run_seeds

HERE = Path(__file__).parent
SEEDS = 200


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] if first >= 100 else []) for first in range(0, SEEDS, 50)]
)
def test_invariants_hold_in_random_runs(first: int) -> None:
    """B3.8 B4.5 B4.9: each `simulation.model.Invariant` holds for random clients and tiers."""
    tally = run_seeds(range(first, first + 50))
    assert tally.failures == []
    assert tally.steps > 50 * 300


def digests(seeds: range, hash_seed: str) -> list[str]:
    """Returns the digests of some runs in a process of their own."""
    script = f"from simulation import run\nfor seed in {seeds!r}: print(run(seed).digest)"
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, check=True, text=True).stdout.split()


@pytest.mark.slow
def test_a_seed_gives_the_same_run() -> None:
    """Hash seeds and addresses of objects do not matter, so a failing seed can be replayed."""
    seeds = range(1000, 1030)
    here = [run(seed).digest for seed in seeds]
    assert len(set(here)) == len(seeds)
    assert digests(seeds, "1") == here
    assert digests(seeds, "4711") == here


def test_an_event_that_never_occurs_is_an_error() -> None:
    """A simulation proves nothing about events that do not occur in it."""
    tally = Tally(seeds=1000)
    tally.coverage.update(EXERCISED[1:])
    assert tally.never() == [EXERCISED[0]]
    assert Tally(seeds=10).never() == [], "too few runs to decide"
