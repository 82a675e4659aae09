"""A short run of `make stress`, and its processes after a SIGKILL of the run."""

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
    assert f"SEED={facts['facts']['seed']}\n" in done.stdout
    assert processes_of(tmp_path) == []


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    run = subprocess.Popen(command(tmp_path), env=environment(), stdout=subprocess.DEVNULL)
    try:
        # Itself, a server and eight clients.
        wait_until(lambda: len(processes_of(tmp_path)) >= 10)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not processes_of(tmp_path))
