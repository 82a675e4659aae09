"""One simulated run of a server, from a seed."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass

from . import inspect as inside
from .invariants import check, check_settled
from .model import EXTENT, Invariant, ModelTier, Violation
from .restarts import Restarts
from .world import World

__all__ = ["EXTENT", "STEPS", "Failure", "ModelTier", "RunResult", "run"]

STEPS = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a run failed: the step and the event."""

    seed: int
    step: int
    action: str
    invariant: Invariant
    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of one run. Two runs of one seed have the same digest of all events and answers."""

    steps: int
    coverage: Counter[str]
    digest: str
    failure: Failure | None


def run(seed: int, steps: int = STEPS, *, only: Invariant | None = None) -> RunResult:
    """Simulates one run until an invariant fails; with `only` the others are not checked."""
    world, failure = World(seed, only), None
    with inside.small_jobs(4 * EXTENT // 5):
        try:
            _live(world, steps, Restarts(world, seed))
        except Exception as error:  # noqa: BLE001 - any exception is a failure of this run
            invariant = error.invariant if isinstance(error, Violation) else Invariant.RAISED
            text = str(error) if isinstance(error, Violation) else repr(error)
            failure = Failure(seed, world.steps, world.doing, invariant, text, traceback.format_exc())
    return RunResult(world.steps, world.coverage, world.digest.hexdigest(), failure)


def _live(world: World, steps: int, restarts: Restarts) -> None:
    world.start_core()
    for _ in range(steps):
        world.step()
        check(world)
        restarts.check()
    for _ in world.settle():
        check(world)
        restarts.check()
    check_settled(world)
    restarts.check(always=True)
