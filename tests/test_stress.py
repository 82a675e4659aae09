"""Short runs of `make stress` and `make torture`; their processes after a SIGKILL of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.polling import wait_until

TESTS = Path(__file__).resolve().parent


def command(directory: Path, *more: str) -> list[str]:
    """The command of a run with its files in this directory."""
    return [sys.executable, "-m", "stress", "--directory", str(directory), *more]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def processes_of(directory: Path) -> list[str]:
    """Command lines that name the directory: servers and clients."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if str(directory) in text:
            found.append(text)
    return found


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """Eight clients and a server, killed at random: no wrong byte, no loss, no process left."""
    path = tmp_path / "facts.json"
    more = ("--seconds", "6", "--json", str(path))
    done = subprocess.run(command(tmp_path, *more), env=environment(), capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stderr, "a live line is for terminals"
    assert all(line.startswith("kvtier: ") for line in done.stderr.splitlines()), "what a client of its own may log"
    facts = json.loads(path.read_text())
    assert facts["ok"]
    assert len(facts["facts"]["server_runs"]) > 1
    assert facts["facts"]["counts"]["verified blocks"] > 100
    assert f"SEED={facts['facts']['plan']['seed']}\n" in done.stdout
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_a_short_torture_run(tmp_path: Path) -> None:
    """Thirty SIGKILLs of the server alone: nothing wrong, never stored or lost; no process left.

    How many blocks are acknowledged depends on the machine. A busy one must not fail the test.
    """
    path = tmp_path / "facts.json"
    more = ("--kills", "30", "--acknowledgements", "2000", "--json", str(path))
    done = subprocess.run(command(tmp_path, *more), env=environment(), capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    [facts] = [one["facts"] for one in found["rounds"]]
    assert found["ok"]
    assert sum(number for name, number in facts["faults"].items() if name.startswith("SIGKILL of the server")) >= 30
    assert facts["deposits"] >= 2000
    assert facts["audited"] >= facts["deposits"], "each acknowledged block is read back at least once"
    assert facts["listed"] > facts["deposits"]
    assert "0 wrong, 0 never stored, 0 lost" in done.stdout
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("more", [(), ("--kills", "1000")], ids=["stress", "torture"])
def test_a_killed_run_leaves_no_process(tmp_path: Path, more: tuple[str, ...]) -> None:
    run = subprocess.Popen(command(tmp_path, *more), env=environment(), stdout=subprocess.DEVNULL)
    try:
        # Itself, a server and eight clients.
        wait_until(lambda: len(processes_of(tmp_path)) >= 10)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not processes_of(tmp_path))
