"""The simulation finds planted bugs; `make simulate MUTANTS=1` plants all of them."""

import pytest
from harness.planting import CannotPlantError
from simulation.core_faults import MUTANTS, Mutant
from simulation.model import Invariant
from simulation.mutants import hunt, mutated

QUICK = (
    "a slot is granted twice",
    "a queued block is not pinned",
    "leases outlive their session",
    "a job that has ended ends again",
    "requests outlive their session",
    "an unwritten part is served",
    "pending keys count twice",
    "dropped blocks stay in the eviction queue",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found_by_its_invariant(name: str) -> None:
    """A simulation that finds no planted bug would prove nothing about a correct core."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    assert hunt(mutant, 40) is not None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_bug_can_still_be_planted(mutant: Mutant) -> None:
    """If the replaced text of a mutant is gone, the mutant must be updated."""
    assert mutant.new in mutated(mutant)


def test_a_bug_that_cannot_be_planted_is_an_error() -> None:
    """It is never skipped silently."""
    with pytest.raises(CannotPlantError):
        mutated(Mutant("nothing", Invariant.SLOTS, "core/tier_jobs.py", "no such text", ""))


def test_every_invariant_has_a_bug_planted_for_it() -> None:
    """An invariant that was never seen to fail may be unable to."""
    assert {mutant.invariant for mutant in MUTANTS} == set(Invariant)
