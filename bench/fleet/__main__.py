"""Simulation of a fleet of hosts: hit ratios, bandwidths, and events per second.

    make bench-traces WHAT=fleet TRACE=FILE[,FILE...] [QUICK=1] [SEED=N] [JSON=FILE]
    python -m bench.fleet --trace FILE[,FILE...] [--quick] [--seed N] [--json FILE]

Each line of a trace is a request with `timestamp` in milliseconds and `hash_ids`, the ids of its
chained blocks of 512 tokens. docs/scaling.md explains the model and the figures.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from ..machine import facts
from .plan import Case, cases_of, figures_of, trace_of
from .router import index_bytes_per_key, index_keys_per_second
from .simulation import Settings

FAILURE_MINUTES = 1000
"""Mean minutes between two failures of the same host."""
LABELS = {
    "designs": "",
    "network": "nic_bytes_per_second",
    "store": "store_bytes_per_second",
    "store capacity": "store_blocks",
    "admission": "admission",
    "penalty": "penalty",
    "event delay": "event_delay_seconds",
    "CPU tier": "cpu_blocks",
    "failures": "minutes_per_failure",
    "hosts": "hosts",
    "load": "load",
    "policy": "policy",
}


def _line(row: dict[str, object], case: Case) -> str:
    values = {name: value for name, value in row.items() if isinstance(value, int | float)}
    label = LABELS[case.part]
    changed = row.get(label, getattr(case.settings, label, "")) if label else ""
    changed = f"{changed:g}" if isinstance(changed, float) else f"{changed}"
    if case.part == "policy":
        changed += f" {case.settings.cpu_blocks}"
    return (
        f"{case.part:14} {case.settings.design:7}{case.settings.routing:12}{changed:>14} "
        f"{values['hits']:6.3f} {values['cpu']:6.3f} {values['shared']:6.3f} {values['peer']:6.3f} "
        f"{values['network_bytes_per_s'] / 1e9:9.1f} {values['network_bytes_per_s_per_host'] / 1e9:7.2f} "
        f"{values['slow_loads']:6.3f} {values['events_per_s']:9,.0f} {values['imbalance']:6.2f} "
        f"{values['busy']:6.2f} {values['first_token_p50_s']:7.2f} {values['first_token_p99_s']:8.2f}"
    )


HEADER = (
    f"{'part':14} {'design':7}{'routing':12}{'changed':>14} {'hits':>6} {'cpu':>6} {'shared':>6} {'peer':>6} "
    f"{'GB/s':>9} {'/host':>7} {'slow':>6} {'events/s':>9} {'imbal.':>6} {'busy':>6} {'p50 s':>7} {'p99 s':>8}"
)


def _files(names: str) -> Sequence[Path]:
    return [Path(name) for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description="Simulate a fleet of hosts.")
    parser.add_argument("--trace", type=_files, required=True, metavar="FILE[,FILE...]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--quick", action="store_true", help="20 hosts and 200 seconds (a few seconds)")
    parser.add_argument("--hosts", type=int, help="hosts (default: 1000)")
    parser.add_argument("--load", type=float, default=0.8, help="asked tokens per token of prefill capacity")
    parser.add_argument("--seconds", type=float, help="simulated time; the first half is not measured (default: 600)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    hosts = options.hosts or (20 if options.quick else 1000)
    base = Settings(hosts=hosts, minutes_per_failure=FAILURE_MINUTES / hosts, seed=options.seed)
    seconds = options.seconds or (200.0 if options.quick else 600.0)
    machine = facts(Path(tempfile.gettempdir()))
    started = time.monotonic()
    work = [(path, case) for path in options.trace for case in cases_of(base, options.load, seconds)]
    print("hits: fraction of the asked blocks that are not computed; cpu, shared, peer: their sources")
    print("GB/s: across the network, all hosts; /host: mean; slow: loads that took longer than computing")
    print("events/s: at the router; imbal.: computed tokens of the busiest host over the mean; p50, p99: first token")
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for (path, case), row in zip(work, pool.map(figures_of, *zip(*work, strict=True)), strict=True):
            if not rows or rows[-1]["trace"] != path.name:
                trace = trace_of(path)
                print(f"\n{path.name}: {len(trace.paths):,} requests, {len(trace.members):,} sessions, ", end="")
                print(f"{trace.known / trace.blocks:.3f} of the blocks are known\n{HEADER}")
            rows.append(row)
            print(_line(row, case), flush=True)
    one, nine = index_bytes_per_key(1), index_bytes_per_key(9)
    applied = index_keys_per_second()
    print(f"\nindex of a router, a Python dict: {one:.0f} bytes per key, {(nine - one) / 8:.0f} per further holder,")
    print(f"{applied:,.0f} keys stored or removed per second")
    elapsed = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime
    print(f"{len(rows)} fleets in {elapsed:.0f} s, {processor:.0f} s of processor time")
    if options.json:
        head = {
            "facts": machine,
            "elapsed_s": round(elapsed),
            "processor_s": round(processor),
            "seed": options.seed,
            "seconds": seconds,
            "load": options.load,
            "index_bytes_per_key": round(one),
            "index_bytes_per_further_holder": round((nine - one) / 8),
            "index_keys_per_s": float(f"{applied:.2g}"),
        }
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in [head, *rows])
        options.json.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
