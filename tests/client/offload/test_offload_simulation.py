from __future__ import annotations

import pytest
from offload_world import refill, run

from kvtier.client.offload import OffloadMode

SEEDS = 80
STEPS = 500


@pytest.mark.parametrize("first", range(0, SEEDS, 40))
@pytest.mark.parametrize("mode", OffloadMode)
def test_invariants_hold_in_random_runs(mode: OffloadMode, first: int) -> None:
    """B4.3-B4.5 B4.8 B4.10 B4.12-B4.14 B5.1-B5.3 B5.6 B5.7: no wrong KV, no early reuse, no leak.

    For a long run: `PYTHONPATH=src python tests/client/offload/long_run.py FIRST LAST`.
    """
    for seed in range(first, first + 40):
        try:
            run(seed, STEPS, mode)
        except AssertionError as error:
            pytest.fail(f"seed {seed}, {mode}: {error}")


@pytest.mark.parametrize("mode", OffloadMode)
def test_lost_blocks_are_stored_again_after_random_runs(mode: OffloadMode) -> None:
    """B4.15: blocks missing in the server are stored when they are computed or hit."""
    for seed in range(30):
        try:
            refill(seed, STEPS, mode)
        except AssertionError as error:
            pytest.fail(f"seed {seed}, {mode}: {error}")
