"""Runs the mutation test: `make mutate`.

Each fault is planted alone, and the short tests of its area run. All faults that survive are then
planted together for one run of the whole suite, first of `make test`, then of `make test-long` and
of the tests with engines. Each test that fails in such a run is repeated with each fault alone. A
failure counts only if the test passes without a fault. Results are kept in `build/mutation`, so a
run that was stopped continues; `--fresh` begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.planting import Fault, with_fault

from . import FAULTS, related_tests

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutation"
SHORT, LONG = "not slow", "slow"
RELATED_SECONDS, SUITE_SECONDS = 1200, 2400
TIME_OUT = "a time-out"
OpenFaults = Callable[[], list[Fault]]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)


class Tree:
    """A copy of the source tree in which faults are planted."""

    def __init__(self, number: int) -> None:
        self.folder = BUILD / f"tree-{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if os.path.lexists(ROOT / name):
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name, follow_symlinks=False)
        for command in (["init", "--quiet"], ["add", "."]):  # some tests list the files with git
            subprocess.run(["git", *command], cwd=self.folder, check=True)

    def run(self, faults: Collection[Fault], python: Path, arguments: Sequence[str], seconds: float) -> list[str]:
        """Plants faults and runs tests. Returns the ids of the failed tests, or [TIME_OUT]."""
        before = {self.folder / fault.file: (self.folder / fault.file).read_text() for fault in faults}
        for fault in faults:
            file = self.folder / fault.file
            self._write(file, with_fault(file, fault.old, fault.new))
        try:
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", *arguments]
            environment = os.environ | {"PYTHONPATH": str(self.folder / "src")}
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                return [TIME_OUT]
            failed = _FAILED.findall(output)
            return failed or ([] if process.returncode in (0, 5) else [f"exit code {process.returncode}"])
        finally:
            for file, text in before.items():
                self._write(file, text)

    @staticmethod
    def _write(file: Path, text: str) -> None:
        """Writes a source file, and removes its byte code: within a second the time is the same."""
        file.write_text(text)
        for code in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            code.unlink()


class Results:
    """For each decided fault: the suite that found it (`short`, `long`, `engines`) and a test."""

    def __init__(self, file: Path, *, fresh: bool) -> None:
        self._file = file
        self.found: dict[str, list[str]] = {} if fresh or not file.exists() else json.loads(file.read_text())

    def add(self, fault: Fault, suite: str, test: str) -> None:
        self.found[fault.name] = [suite, test]
        self._file.write_text(json.dumps(self.found, indent=1))
        print(f"{suite:10} {fault.name}: {test}", flush=True)

    def open(self, faults: Sequence[Fault], marker: str = "") -> list[Fault]:
        return [fault for fault in faults if self.found.get(fault.name, [""])[0] == marker]


def run_related(results: Results, faults: Sequence[Fault], workers: int) -> None:
    """Runs the tests of the area of each fault, the fault planted alone."""
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for number in range(workers):
        trees.put(Tree(number))

    python = Path(sys.executable)
    stable: set[str] = set()  # tests that passed without a fault
    unstable: set[str] = set()  # tests that failed without a fault, or only once with one

    def decide(tree: Tree, fault: Fault) -> tuple[str, str] | None:
        """Returns the suite and the test, or None after a time-out, which tells nothing."""
        while True:
            skipped = [argument for test in sorted(unstable) for argument in ("--deselect", test)]
            tests = ["-x", "-m", SHORT, *skipped, *related_tests(fault.file)]
            failed = tree.run([fault], python, tests, RELATED_SECONDS)[:1]
            if failed == [TIME_OUT]:
                return None
            if not failed:
                return "survived", "the tests of its area"
            if "::" not in failed[0]:
                return "short", failed[0]
            again = tree.run([fault], python, failed, RELATED_SECONDS)
            if again and (failed[0] in stable or not tree.run([], python, failed, RELATED_SECONDS)):
                stable.add(failed[0])
                return "short", failed[0]
            unstable.add(failed[0])

    def try_fault(fault: Fault) -> None:
        tree = trees.get()
        try:
            if decided := decide(tree, fault):
                results.add(fault, *decided)
            else:
                print(f"undecided  {fault.name}", flush=True)
        finally:
            trees.put(tree)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(try_fault, results.open(faults)))


def run_suite(results: Results, suite: str, python: Path, arguments: Sequence[str], open_faults: OpenFaults) -> None:
    """Runs a whole suite with all open faults; again without those that were found.

    A fault that the suite finds can hide others, so the last run is one that finds none.
    """
    tree = Tree(0)

    def narrow(faults: Sequence[Fault], tests: Sequence[str]) -> None:
        """Finds out which of the faults make which of the tests fail."""
        failed = [test for test in tree.run(faults, python, tests, SUITE_SECONDS) if "::" in test]
        if failed and len(faults) == 1:
            results.add(faults[0], suite, failed[0])
        elif failed:
            middle = len(faults) // 2
            narrow(faults[:middle], failed)
            narrow(faults[middle:], failed)

    while faults := compatible(open_faults()):
        print(f"{suite}: {len(faults)} faults together", flush=True)
        result = tree.run(faults, python, arguments, SUITE_SECONDS)
        if TIME_OUT in result:
            print(f"{suite}: undecided, because the suite took more than {SUITE_SECONDS} s", flush=True)
            return
        failed = [test for test in result if "::" in test]
        if failed:
            unstable = set(tree.run([], python, failed, SUITE_SECONDS))
            failed = [test for test in failed if test not in unstable]
        print(f"{suite}: {len(failed)} tests fail", flush=True)
        found = len(open_faults())
        if failed:
            narrow(faults, failed)
        if len(open_faults()) == found:
            return


def compatible(faults: Sequence[Fault]) -> list[Fault]:
    """Returns the faults, without those that change the same text as another one."""
    texts: dict[str, str] = {}
    chosen = []
    for fault in faults:
        text = texts.setdefault(fault.file, (ROOT / fault.file).read_text())
        if text.count(fault.old) == 1:
            texts[fault.file] = text.replace(fault.old, fault.new)
            chosen.append(fault)
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation", description="Plants faults and runs the tests.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name or file contains this")
    parser.add_argument("--workers", type=int, default=2, help="processes of the first step (%(default)s)")
    parser.add_argument("--engines", type=Path, metavar="PYTHON", help="Python with vLLM, for the tests with engines")
    parser.add_argument("--steps", default="related,short,long,engines", help="steps to run (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    results = Results(BUILD / "results.json", fresh=options.fresh)
    faults = [fault for fault in FAULTS if options.only in fault.name or options.only in fault.file]
    steps, python = options.steps.split(","), Path(sys.executable)
    parallel = ["--numprocesses", "2", "--dist", "worksteal"]
    if "related" in steps:
        run_related(results, faults, options.workers)
    for suite, marker in (("short", SHORT), ("long", LONG)):
        if suite in steps:
            run_suite(results, suite, python, [*parallel, "-m", marker], lambda: results.open(faults, "survived"))
    if "engines" in steps and options.engines is not None:
        adapters = [fault for fault in faults if fault.file.startswith("client/")]
        arguments = ["-W", "default", "tests/engines"]
        run_suite(results, "engines", options.engines, arguments, lambda: results.open(adapters, "survived"))
    print(f"{len(faults)} faults: {dict(Counter(results.found[f.name][0] for f in faults if f.name in results.found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
