"""Command line of the comparison with peers: `python -m bench.peers`."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from rich.console import Console

from bench.machine import facts

from .entries import ENTRIES
from .runner import KVTIER, Effort, compare
from .table import as_json, show

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Measure kvtier and its peers in turns.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    names = [entry.name for entry in ENTRIES[KVTIER:]]
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="peers (default: all)")
    parser.add_argument(
        "--directory", type=Path, help="directory for the servers' files (default: a temporary directory)"
    )
    options = parser.parse_args()
    entries = [entry for entry in ENTRIES if entry in ENTRIES[:KVTIER] or entry.name in options.only]
    console = Console()
    if not console.is_terminal:
        console.width = 160
    with tempfile.TemporaryDirectory(prefix="kvtier-peers-", dir=options.directory) as name:
        header = facts(Path(name))
        started = time.perf_counter()
        columns = compare(Path(name), Effort(), entries)
        header["load"] += f", {os.getloadavg()[0]:.1f} at the end"
        header["duration"] = f"{time.perf_counter() - started:.0f} s"
    for fact, value in header.items():
        console.print(f"[dim]{fact}[/]  {value}", highlight=False)
    show(console, columns)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(as_json(columns, header), indent=1) + "\n")


if __name__ == "__main__":
    main()
