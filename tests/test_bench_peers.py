"""The comparison with peers: commands, comparison, and peers that are missing or fail."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from harness.polling import wait_until
from rich.console import Console

from bench import remote_lmcache
from bench.peers import packages
from bench.peers.entries import ENTRIES, Entry, isolation
from bench.peers.process import PeerProcess
from bench.peers.runner import Column, Effort, compare
from bench.peers.table import as_json, show
from bench.remote_lmcache import LMCacheAdapters, add_ratios
from bench.report import Report

HERE = Path(__file__).resolve().parent
SMALL = Effort(
    capacity_bytes=8 << 20,
    pool_bytes=8 << 20,
    apart_bytes=1 << 20,
    rounds=((4096, 3), (16 << 10, 2)),
    lookup_rounds=1,
    lookups=4,
    imports=1,
    idle_seconds=0.05,
)
RATES = [f"{what}, 64 x {size}" for size in ("4 KiB", "16 KiB") for what in ("memcpy", "store", "load")]
LOOKUPS = [
    f"lookup, {what}, p{n}" for what in ("hit, 64 keys", "hit, 1,024 keys", "miss, 8,192 keys") for n in (50, 99)
]


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(HERE), known])))


def entry(name: str, python: Path = Path(sys.executable)) -> Entry:
    """Returns a column for a class of `bench_peers_fakes`."""
    return Entry(name, f"bench_peers_fakes:{name}", python, "numpy", "json")


def played(tmp_path: Path, *names: str) -> list[Column]:
    """Returns the columns of `Dictionary`, in place of kvtier, and of these fakes."""
    return compare(tmp_path, SMALL, [entry("Dictionary"), *map(entry, names)], kvtier=1)


def shown(columns: list[Column]) -> str:
    out = io.StringIO()
    show(Console(file=out, width=200), columns)
    return out.getvalue()


def test_every_row_has_a_figure_per_column(tmp_path: Path) -> None:
    """A correct peer has a figure in each row; a rate has its ratio to memcpy of the same run."""
    found = as_json(played(tmp_path, "Another"), {"date": "today"})
    assert json.loads(json.dumps(found)) == found
    assert [column["absent"] for column in found["columns"]] == [None, None]
    rows = {row["name"]: row for row in found["rows"]}
    assert [name for name in rows if name.startswith("lookup")] == LOOKUPS
    assert list(rows)[: len(RATES)] == RATES
    for row in rows.values():
        assert all(value is not None for value in row["values"]), row
    for size in ("4 KiB", "16 KiB"):
        memcpy = rows[f"memcpy, 64 x {size}"]["values"]
        stored = rows[f"store, 64 x {size}"]
        ratios = [value / base for value, base in zip(stored["values"], memcpy, strict=True)]
        assert stored["of_memcpy"] == pytest.approx(ratios)


def test_the_table_names_every_column_and_row(tmp_path: Path) -> None:
    """The table has the rows and columns of the JSON."""
    columns = played(tmp_path, "Another")
    text = shown(columns)
    assert all(row["name"] in text for row in as_json(columns, {})["rows"])
    assert "Dictionary" in text
    assert "figures are missing" not in text


REASONS = {
    "Forgetful": "block 63 differs from the stored bytes",
    "Liar": "8192 keys hit instead of 0",
    "Absent": "it is not installed",
    "Dying": "the process of Dying ended",
    "Refusing": "no room",
    "NotThere": "has no attribute 'NotThere'",
}


def test_failed_peers_name_the_cause(tmp_path: Path) -> None:
    """Wrong bytes, a wrong answer, a dead process, a missing part: the column names the cause.

    The columns before and after them have their figures.
    """
    first, *failed, last = played(tmp_path, *REASONS, "Another")
    assert (first.absent, last.absent) == (None, None)
    assert all(block_bytes in last.movement for block_bytes, _ in SMALL.rounds)
    text = shown([first, *failed, last])
    for column, (name, reason) in zip(failed, REASONS.items(), strict=True):
        assert column.absent is not None
        assert reason in column.absent
        assert f"{name}: figures are missing: {column.absent}" in text


def test_an_environment_that_is_not_installed(tmp_path: Path) -> None:
    """The line of the peer says how to install it; kvtier is measured alone."""
    entries = [entry("Dictionary"), entry("Another", tmp_path / "nowhere" / "bin" / "python")]
    columns = compare(tmp_path, SMALL, entries, kvtier=1)
    assert columns[1].absent is not None
    assert "nowhere: make bench-peers" in columns[1].absent
    assert columns[0].movement


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """A server that its driver leaves is ended with the process group, also if the parent fails."""
    servers: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        _start_and_fail(tmp_path, servers)
    wait_until(lambda: not _runs(servers[0]))


def test_packages_are_counted_with_what_they_require() -> None:
    """Dependencies and their dependencies; extras only if requested."""
    found = packages.closure("kvtier")
    assert {"kvtier", "grpcio", "protobuf"} <= found
    assert not {"pytest", "torch", "lmdb"} & found
    assert found < packages.closure("kvtier[server]")
    assert "lmdb" in packages.closure("kvtier[server]")


def test_peers_that_listen_everywhere_are_isolated() -> None:
    """Mooncake's servers listen on every address: they run with loopback only, or not at all."""
    assert [one.name for one in ENTRIES if one.isolated] == ["Mooncake"]
    command = isolation()
    assert command is None or command[0] == "unshare"


def test_a_batch_has_the_requested_number_of_blocks(tmp_path: Path) -> None:
    """So that LMCache's adapters store batches of the same size as a shared tier."""
    with PeerProcess(entry("Dictionary"), tmp_path) as process:
        process.ask("start", directory=str(tmp_path), capacity_bytes=0, pool_bytes=64 << 10, apart_bytes=0)
        process.ask("open", block_bytes=4096, fill_bytes=0, count=8)
        for _ in range(3):
            assert process.ask("round")["bytes"] == 8 * 4096


def test_an_adapter_that_cannot_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, with the reason. The shared tiers are measured without it."""
    monkeypatch.setattr(remote_lmcache, "ROOT", tmp_path)
    adapters = LMCacheAdapters(tmp_path, [{"type": "resp"}, {"url": "mooncakestore://here/", "extra_config": {}}])
    for _ in range(2):
        with adapters.running(4096, 8) as actions:
            assert actions == {}
    adapters.show_missing()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" is not measured: ")[0] for line in lines] == [
        "LMCache, adapter resp",
        "LMCache, connector mooncakestore",
    ]
    assert all("make bench-peers" in line for line in lines)


def test_ratios_compare_the_median_rounds() -> None:
    """Above 1, the tier is faster than the adapter."""
    report = Report()
    seconds = {"store: tier": [2.0, 1.0, 9.0], "load: tier": [1.0], "store: other": [1.0]}
    add_ratios(report, seconds | {"store: LMCache, adapter x": [5.0, 3.0, 1.0]}, "tier", "2 MiB")
    assert [(row.name, row.value) for row in report.rows] == [("store: tier / LMCache, adapter x, 2 MiB", 1.5)]


def _start_and_fail(directory: Path, servers: list[int]) -> None:
    with PeerProcess(entry("Orphaning"), directory) as process:
        answer = process.ask("start", directory=str(directory), capacity_bytes=1, pool_bytes=1 << 20, apart_bytes=1)
        servers += answer["processes"]
        assert _runs(servers[0])
        raise KeyboardInterrupt


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
