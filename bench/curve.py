"""Benchmark of the live miss-ratio curve: compares its estimates with measured hit ratios.

    make bench-traces WHAT=curve TRACE=FILE [JSON=FILE]
    python -m bench.curve --trace FILE [--json FILE] [--made-up]

`bench.policies` defines the hit ratio. The benchmark also prints the cost: the time that the curve
adds to a lookup of 64 keys, half of them known, with a CPU tier and one secondary tier.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.tiers.eviction import DEFAULT_POLICY, POLICIES
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.stats.miss_ratio_curve import SCALES, MissRatioCurves
from kvtier.tiers.stats.request_log import OutcomeRun
from kvtier.tiers.types import MissReason, NamespaceSpec

from .policies import GROUP, Replay, read_trace
from .traces import MADE_UP, Trace

__all__ = ["compare", "price"]

CAPACITIES = (1_000, 3_000, 10_000)
"""In blocks."""
KEYS = 64
GIB = 1 << 30
MIB = 1 << 20


def compare(trace: Trace, policy: str, capacities: Sequence[int]) -> list[dict[str, object]]:
    """Prints estimated and measured hit ratios for each size; returns the rows."""
    reached: dict[int, float] = {}
    rows: list[dict[str, object]] = []
    for capacity in capacities:
        replay = Replay(policy, capacity)
        reached[capacity] = _run(replay, trace)
        estimates = {estimate.scale: estimate.hit_ratio for estimate in replay.core.stats().tiers[0].estimates}
        for scale in SCALES:
            size = int(capacity * scale)
            if size not in reached:
                reached[size] = _run(Replay(policy, size), trace)
        truth = [reached[int(capacity * scale)] for scale in SCALES]
        print(f"{capacity:>8,} estimated" + "".join(f"{estimates[scale]:9.4f}" for scale in SCALES))
        print(f"{policy:>8} reached  " + "".join(f"{ratio:9.4f}" for ratio in truth), flush=True)
        rows += [
            {"policy": policy, "capacity": capacity, "scale": scale, "estimated": estimates[scale], "reached": ratio}
            for scale, ratio in zip(SCALES, truth, strict=True)
        ]
    return rows


def price(*, rounds: int = 7) -> float:
    """Returns the added seconds per lookup, in the best of `rounds` rounds of 2,000 lookups."""
    spec = NamespaceSpec(NamespaceId(bytes(32)), world_size=1, part_bytes=(2 * MIB,))
    rng = random.Random(1)
    chains = [[rng.randbytes(16) + GROUP for _ in range(KEYS)] for _ in range(1500)]
    curves = MissRatioCurves((8 * GIB, 64 * GIB), lambda *_: None)
    known = [(spec.id, key) for chain in chains[::2] for key in chain]
    for name in known:
        curves.put(name, 2 * MIB)
    spans = (OutcomeRun(KEYS // 2, 0), OutcomeRun(KEYS // 2, MissReason.NEVER_STORED))
    best = float("inf")
    for _ in range(rounds):
        asked = rng.choices(chains, k=2000)
        started = time.perf_counter()
        for chain in asked:
            curves.looked_up(spec, chain, spans)
        best = min(best, (time.perf_counter() - started) / len(asked))
    return best


def _run(replay: Replay, trace: Trace) -> float:
    """Replays a trace. The keys are hashes, as those of an engine."""
    asked = hits = 0
    for number, blocks in enumerate(trace):
        keys = [hashlib.blake2b(b"%d" % block, digest_size=16).digest() + GROUP for block in blocks]
        hits += replay.serve(f"request-{number}", keys)
        asked += len(keys)
    return hits / max(1, asked)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.curve", description="Compare the live miss-ratio curve with real sizes."
    )
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="one JSON request with hash_ids per line"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=[DEFAULT_POLICY, "lru"], help="policies")
    parser.add_argument("--capacities", nargs="+", type=int, default=CAPACITIES, metavar="BLOCKS")
    parser.add_argument("--made-up", action="store_true", help="add the synthetic traces")
    options = parser.parse_args()
    traces: dict[str, Trace] = {options.trace.name: read_trace(options.trace)}
    if options.made_up:
        traces |= {name: make() for name, make in MADE_UP.items()}
    print(f"a lookup of {KEYS} keys takes {price() * 1e6:.1f} µs longer with two tiers, on this machine")
    rows: list[dict[str, object]] = []
    for name, trace in traces.items():
        for policy in options.policies:
            print(f"\n{name}, {policy}; blocks {'':5}" + "".join(f"{scale:>8g}x" for scale in SCALES))
            rows += [{"trace": name, **row} for row in compare(trace, policy, options.capacities)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
