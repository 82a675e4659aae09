"""A short run of `make stress`, and what becomes of its processes when it is killed itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def command(directory: Path, *more: str) -> list[str]:
    """Returns how it is run, with its files in this directory."""
    return [sys.executable, "-m", "stress", "--directory", str(directory), *more]


def environment() -> dict[str, str]:
    """Returns ours, with the way to the program."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def processes_of(directory: Path) -> list[str]:
    """Returns the command lines that name the directory: servers and clients, wherever they have got to."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # gone
            continue
        if str(directory) in text:
            found.append(text)
    return found


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """Eight clients and a server, all of them killed now and then: no wrong byte, nothing lost, nothing left behind."""
    path = tmp_path / "facts.json"
    more = ("--seconds", "6", "--json", str(path))
    done = subprocess.run(command(tmp_path, *more), env=environment(), capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stderr, "a live line is for terminals"
    assert all(line.startswith("kvtier: ") for line in done.stderr.splitlines()), "what a client of its own may log"
    facts = json.loads(path.read_text())
    assert facts["ok"]
    assert len(facts["facts"]["lives"]) > 1
    assert facts["facts"]["counts"]["verified blocks"] > 100
    assert f"SEED={facts['facts']['seed']}\n" in done.stdout
    assert processes_of(tmp_path) == []


def test_nothing_outlives_it(tmp_path: Path) -> None:
    """A SIGKILL of the run ends its server and its clients."""
    run = subprocess.Popen(command(tmp_path), env=environment(), stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(processes_of(tmp_path)) >= 10, "itself, a server and eight clients")
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not processes_of(tmp_path), "the end of all of them")


def wait_for(what: object, name: str) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + 60
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"still waiting for {name}"
        time.sleep(0.1)
