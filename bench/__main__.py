"""Command line of the benchmarks: `python -m bench`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.cuda.host.memory import tune_malloc

from .calls import measure_calls
from .clients import measure_clients
from .copies import measure_copies
from .disk import measure_disk
from .durable import measure_durable
from .embedded import measure_embedded
from .fairness import measure_fairness
from .growth import measure_growth
from .handoffs import measure_handoffs
from .lookups import measure_lookups
from .machine import facts
from .movement import measure_movement
from .profile import measure_profile
from .report import Report
from .streams import measure_streams

PARTS: dict[str, Callable[[Report, Path], None]] = {
    "movement": measure_movement,
    "calls": measure_calls,
    "streams": measure_streams,
    "copies": measure_copies,
    "lookups": measure_lookups,
    "growth": measure_growth,
    "handoffs": measure_handoffs,
    "durable": measure_durable,
    "embedded": measure_embedded,
    "disk": measure_disk,
    "clients": measure_clients,
    "fairness": measure_fairness,
}
PROFILE: dict[str, Callable[[Report, Path], None]] = {"profile": measure_profile}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure kvtier against this machine's limits."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--facts", action="store_true", help="with --json: begin FILE with facts about the machine")
    parser.add_argument(
        "--profile", action="store_true", help="instead, measure how long each part of a store and of a load takes"
    )
    parser.add_argument(
        "--directory", type=Path, help="directory for the tiers' files (default: a temporary directory)"
    )
    options = parser.parse_args()
    tune_malloc()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.directory) as name:
        directory = Path(name)
        header = facts(directory)
        started = time.perf_counter()
        parts = PROFILE if options.profile else {part: PARTS[part] for part in options.only}
        for part, measure in parts.items():
            folder = directory / part
            folder.mkdir()
            print(f"measuring {part} …", file=sys.stderr, flush=True)
            measure(report, folder)
        header["load"] += f", {os.getloadavg()[0]:.1f} at the end"
        header["duration"] = f"{time.perf_counter() - started:.0f} s"
    report.show(header)
    if options.json:
        report.write_json(options.json, header if options.facts else None)


if __name__ == "__main__":
    main()
