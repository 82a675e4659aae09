"""Runs thousands of simulations on all cores; prints coverage, and a command to replay a failure.

    make simulate SEEDS=10000 [SEED_BASE=0] [STEPS=400]

The exit code is 1 if an invariant failed, or if an event of `EXERCISED` never occurred in a
thousand runs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from .life import STEPS, Failure, run
from .model import EXERCISED, Invariant

__all__ = ["Tally", "main", "replay_command", "run_seeds"]

ENOUGH_SEEDS = 1000
"""From this number of runs on, each event of `EXERCISED` must have occurred."""
MAX_FAILURES = 5
PROGRESS_SECONDS = 5.0


@dataclass(slots=True)
class Tally:
    """Summary of many runs."""

    seeds: int = 0
    steps: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Adds the runs of a worker."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.coverage.update(other.coverage)
        self.failures += other.failures

    def never(self) -> list[str]:
        """Returns the events that never occurred, if there were enough runs."""
        return [what for what in EXERCISED if not self.coverage[what]] if self.seeds >= ENOUGH_SEEDS else []


def run_seeds(seeds: Sequence[int], steps: int = STEPS, only: Invariant | None = None, most_failures: int = 1) -> Tally:
    """Simulates runs in this process, in order, until `most_failures` have failed."""
    tally = Tally()
    for seed in seeds:
        result = run(seed, steps, only=only)
        tally.seeds += 1
        tally.steps += result.steps
        tally.coverage.update(result.coverage)
        if result.failure is not None:
            tally.failures.append(result.failure)
            if len(tally.failures) >= most_failures:
                break
    return tally


def run_in_parallel(seeds: range, steps: int, workers: int) -> Iterator[Tally]:
    """Yields summaries of parts of the runs, in any order."""
    chunk = max(1, min(50, len(seeds) // (4 * workers)))
    pieces = [seeds[start : start + chunk] for start in range(0, len(seeds), chunk)]
    if workers == 1 or len(pieces) == 1:
        yield from (run_seeds(piece, steps) for piece in pieces)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(run_seeds, piece, steps) for piece in pieces]
        try:
            yield from (task.result() for task in as_completed(tasks))
        finally:
            pool.shutdown(cancel_futures=True)


def replay_command(failure: Failure, steps: int) -> str:
    """Returns the command that repeats a run."""
    return f"make simulate SEEDS=1 SEED_BASE={failure.seed}" + (f" STEPS={steps}" if steps != STEPS else "")


def main() -> int:
    """Simulates, prints progress and a summary; returns the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # workers end with this process
    seeds = range(options.seed_base, options.seed_base + options.seeds)
    tally, started = Tally(), time.monotonic()
    said = started
    for part in run_in_parallel(seeds, options.steps, options.workers):
        tally.add(part)
        if len(tally.failures) >= MAX_FAILURES:
            break
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            failed = ", ".join(str(failure.seed) for failure in tally.failures) or "none"
            text = f"{tally.seeds:,} of {len(seeds):,} seeds, {said - started:.0f} s, failed: {failed}"
            print(text, file=sys.stderr, flush=True)
    _sum_up(tally, time.monotonic() - started)
    for failure in sorted(tally.failures, key=lambda failure: failure.seed):
        _explain(failure, options)
    return 1 if tally.failures or tally.never() else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulates many runs of a server, each from its seed.")
    parser.add_argument("--seeds", type=int, default=1000, help="number of runs (%(default)s)")
    parser.add_argument("--seed-base", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="events per run (%(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    return parser.parse_args()


def _sum_up(tally: Tally, seconds: float) -> None:
    for what in EXERCISED:
        print(f"{tally.coverage[what]:>12,}  {what}")
    print(f"{tally.seeds:,} seeds, {tally.steps:,} steps, {seconds:.0f} s; {len(tally.failures)} failed")
    if tally.never():
        print(f"NEVER EXERCISED: {', '.join(tally.never())}")


def _explain(failure: Failure, options: argparse.Namespace) -> None:
    print(f"\nFAILED: seed {failure.seed}, step {failure.step} ({failure.action})")
    print(f"        {failure.invariant}: {failure.text}")
    print(f"        {replay_command(failure, options.steps)}")
    if options.seeds == 1:
        print(failure.trace)


if __name__ == "__main__":
    sys.exit(main())
