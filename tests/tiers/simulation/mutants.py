"""Mutation test of the simulation: plants bugs in copies of the core, one at a time.

    make simulate MUTANTS=1

First the unchanged core runs the same seeds. The exit code is 1 if it fails, if a bug is not found
or cannot be planted, or if an invariant has no bug that it finds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.planting import CannotPlantError, with_fault

from .core_faults import MUTANTS, Mutant
from .model import Invariant

__all__ = ["Found", "hunt", "main", "mutated"]

HERE = Path(__file__).resolve().parents[1]
PACKAGE = HERE.parents[1] / "src" / "kvtier"
MAX_SEEDS = 800
LONG_TIMEOUT_SECONDS = 1800.0

_SCRIPT = """
import json, sys
from simulation.life import run
from simulation.model import Invariant
seeds, only = int(sys.argv[1]), Invariant[sys.argv[2]] if len(sys.argv) > 2 else None
for seed in range(seeds):
    failure = run(seed, only=only).failure
    if failure is not None and (only is None or failure.invariant is only):
        print(json.dumps([failure.seed, failure.step, failure.text]))
        break
"""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a bug was found."""

    seed: int
    step: int
    text: str


def mutated(mutant: Mutant) -> str:
    """Returns the text of a mutant's file with the bug.

    Raises: CannotPlantError if the replaced text is missing or not unique.
    """
    return with_fault(PACKAGE / "tiers" / mutant.file, mutant.old, mutant.new)


def planted(mutant: Mutant | None, folder: Path) -> Path:
    """Copies the core, with the bug if there is one, and its imports; returns the path."""
    package = folder / "kvtier"
    package.mkdir()
    shutil.copy(PACKAGE / "__init__.py", package)
    for part in ("protos", "tiers"):
        shutil.copytree(PACKAGE / part, package / part, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        (package / "tiers" / mutant.file).write_text(mutated(mutant))
    return folder


def hunt(mutant: Mutant | None, seeds: int = MAX_SEEDS) -> Found | None:
    """Simulates runs with a bug until its invariant finds it; None if it does not.

    Each mutant has a process of its own. Without a mutant any invariant counts, and the expected
    result is None.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-mutant-") as name:
        path = os.pathsep.join([str(planted(mutant, Path(name))), str(HERE)])
        arguments = [str(seeds), *([mutant.invariant.name] if mutant is not None else [])]
        said = subprocess.run(
            [sys.executable, "-c", _SCRIPT, *arguments],
            env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=name,
            capture_output=True,
            timeout=LONG_TIMEOUT_SECONDS,
            text=True,
            check=False,
        )
    if said.returncode:
        raise RuntimeError(said.stderr)
    return Found(*json.loads(said.stdout)) if said.stdout else None


def main() -> int:
    """Prints the table; returns the exit code."""
    options = _options()
    if shown := hunt(None, options.seeds):
        print(f"the unchanged core fails seed {shown.seed} at step {shown.step}: {shown.text}")
        return 1
    print(f"the unchanged core passes all {options.seeds} seeds", flush=True)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    survivors = 0
    width, wide = max(map(len, Invariant)), max(len(mutant.name) for mutant in chosen)
    with ThreadPoolExecutor(options.workers) as pool:
        for mutant, found in zip(chosen, pool.map(lambda mutant: _try(mutant, options.seeds), chosen), strict=True):
            survivors += isinstance(found, str)
            print(f"{mutant.name:{wide}}  {mutant.invariant:{width}}  {_spell(found)}", flush=True)
    idle = [] if options.only else [str(invariant) for invariant in _without_mutant()]
    print(f"{len(chosen) - survivors} of {len(chosen)} planted bugs found")
    if idle:
        print(f"NO BUG IS PLANTED FOR: {', '.join(idle)}")
    return 1 if survivors or idle else 0


def _try(mutant: Mutant, seeds: int) -> Found | str:
    try:
        return hunt(mutant, seeds) or f"NOT FOUND in {seeds} seeds"
    except CannotPlantError as error:
        return f"NOT PLANTED: {error}"


def _spell(found: Found | str) -> str:
    return found if isinstance(found, str) else f"seed {found.seed:3}  step {found.step:3}  {found.text[:100]}"


def _without_mutant() -> Iterator[Invariant]:
    shown = {mutant.invariant for mutant in MUTANTS}
    return (invariant for invariant in Invariant if invariant not in shown)


def _options() -> Any:
    parser = argparse.ArgumentParser(description="Search for bugs that are planted in copies of the core.")
    parser.add_argument(
        "--seeds", type=int, default=MAX_SEEDS, help="runs until a bug counts as not found (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose name contains this")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
