import pytest
from simulation import run

SEEDS = 300
STEPS = 250


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_invariants_hold_through_random_lives(first: int) -> None:
    """B3.8 B4.5 B4.9: whatever clients, tiers and time do, no slot has two owners, no pinned block goes, no bytes are wrong."""
    for seed in range(first, first + 50):
        try:
            run(seed, STEPS)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
