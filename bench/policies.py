"""Benchmark of eviction policies: replays a trace through the core.

    make bench-traces TRACE=FILE[,FILE...] [JSON=FILE]
    python -m bench.policies --trace FILE[,FILE...] [--json FILE] [--variants]

The hit ratio is the fraction of requested blocks that belong to the leading hits of their request.
The regret is the best hit ratio of the other policies minus the hit ratio of the default policy.
A trace has one JSON request per line. `hash_ids` names the chained blocks of the request: blocks
with equal ids have equal prefixes.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.operations import run_to_end
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.eviction import DEFAULT_POLICY, POLICIES
from kvtier.tiers.secondary_tier import NamespaceId, RequestInfo
from kvtier.tiers.types import SLOT_ALIGNMENT, EngineSession, NamespaceSpec

from .traces import MADE_UP, Trace, variants_of

__all__ = ["Replay", "optimum", "read_trace"]

CAPACITIES = (1_000, 3_000, 10_000, 30_000)
"""In blocks."""
BLOCK_BYTES = SLOT_ALIGNMENT
GROUP = bytes(4)
FOREVER = float("inf")
OPTIMUM = "optimum"


def read_trace(path: Path) -> Trace:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines if line.strip()]


def read_times(path: Path) -> Sequence[float]:
    """Returns the time of each request in seconds; empty if the trace has no timestamps."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        times = [json.loads(line).get("timestamp") for line in lines if line.strip()]
    return [] if None in times else [time / 1000 for time in times]


class Replay:
    """A core with one engine of one rank. The CPU tier has space for `capacity` blocks."""

    def __init__(self, policy: str, capacity: int) -> None:
        region = capacity * BLOCK_BYTES
        self.core = TierManager(region, region, (), settings=TierSettings(eviction={CPU_TIER: policy}))
        self.core.add_memory(0, region)
        spec = NamespaceSpec(NamespaceId(bytes(32)), world_size=1, part_bytes=(BLOCK_BYTES,))
        self.session: EngineSession = self.core.open_session(b"replay", "engine", 0, spec)
        self.asked = self.hits = 0

    def run(self, trace: Trace, times: Sequence[float] = ()) -> float:
        """Serves all requests in order, at `times` in seconds; returns the hit ratio."""
        for number, blocks in enumerate(trace):
            if times:
                self.core.tick(times[number])
            keys = [str(block).encode() + GROUP for block in blocks]
            self.hits += self.serve(f"request-{number}", keys)
            self.asked += len(keys)
        return self.hits / max(1, self.asked)

    def serve(self, request_id: str, keys: list[bytes]) -> int:
        """Looks up a request and stores its missing blocks; returns the number of hits."""
        core, session = self.core, self.session
        core.begin_request(session, RequestInfo(request_id, session.namespace.id))
        lease = run_to_end(
            core.lookup(session, keys, LookupSpec(request_id=request_id, lease_seconds=FOREVER), now=0)
        ).lease
        hits = len(lease.items) if lease is not None else 0
        if hits < len(keys):
            answer = run_to_end(
                core.prepare_store(session, keys[hits:], StoreSpec(request_id=request_id, lease_seconds=FOREVER), now=0)
            )
            if answer.store_id is not None:
                run_to_end(core.complete_store(session, answer.store_id))
        core.finish_request(session, request_id)  # also releases the lease
        core.take_commands()
        return hits


def optimum(trace: Trace, capacity: int) -> float:
    """Returns the hit ratio of an offline policy that knows the future (Belady).

    The policy does not store blocks without a next use. It evicts the block whose next use is
    furthest in the future. Among blocks with the same next use it evicts the last block of the
    chain first.
    """
    never = len(trace)
    held: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits = asked = 0
    for blocks, next_uses in zip(trace, _next_uses(trace), strict=True):
        asked += len(blocks)
        hits += next((place for place, block in enumerate(blocks) if block not in held), len(blocks))
        for place, (block, next_use) in enumerate(zip(blocks, next_uses, strict=True)):
            if next_use == never:
                held.pop(block, None)
                continue
            held[block] = next_use
            heapq.heappush(furthest, (-next_use, -place, block))
        while len(held) > capacity:
            next_use, _, block = heapq.heappop(furthest)
            if held.get(block) == -next_use:
                del held[block]
    return hits / max(1, asked)


def _next_uses(trace: Trace) -> Iterator[list[int]]:
    """Yields, for each block of each request, the next request with the block, or `len(trace)`."""
    following: dict[int, int] = {}
    found = []
    for number in range(len(trace) - 1, -1, -1):
        found.append([following.get(block, len(trace)) for block in trace[number]])
        following.update(dict.fromkeys(trace[number], number))
    return reversed(found)


def compare(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], times: Sequence[float] = ()
) -> list[dict[str, object]]:
    """Prints a table of hit ratios; returns its rows."""
    references = sum(map(len, trace))
    distinct = len({block for blocks in trace for block in blocks})
    print(f"{len(trace):,} requests, {references:,} blocks, {distinct:,} of them distinct; capacity in blocks")
    print(f"{'policy':12}" + "".join(f"{capacity:>10,}" for capacity in capacities) + f"{'µs/block':>12}")
    rows: list[dict[str, object]] = []
    measured: dict[str, list[float]] = {}
    for policy in [*policies, OPTIMUM]:
        started = time.process_time()
        ratios = [
            optimum(trace, capacity) if policy == OPTIMUM else Replay(policy, capacity).run(trace, times)
            for capacity in capacities
        ]
        measured[policy] = ratios
        cost = (time.process_time() - started) / len(ratios) / max(1, references) * 1e6
        default = policy == DEFAULT_POLICY
        name = policy + " *" * default
        price = "" if policy == OPTIMUM else f"{cost:12.1f}"
        print(f"{name:12}" + "".join(f"{ratio:10.4f}" for ratio in ratios) + price, flush=True)
        rows += [
            {"policy": policy, "capacity": capacity, "hit_ratio": ratio, "default": default}
            for capacity, ratio in zip(capacities, ratios, strict=True)
        ]
    others = [measured[policy] for policy in policies if policy != DEFAULT_POLICY]
    if others and DEFAULT_POLICY in policies:
        regrets = (
            max(best) - own for best, own in zip(zip(*others, strict=True), measured[DEFAULT_POLICY], strict=True)
        )
        print(f"{'regret':12}" + "".join(f"{regret:+10.4f}" for regret in regrets), flush=True)
    return rows


def _files(names: str) -> list[Path]:
    return [Path(name) for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description="Replay a trace through the core.")
    parser.add_argument(
        "--trace", type=_files, required=True, metavar="FILE[,FILE...]", help="one JSON request with hash_ids per line"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="policies (default: all)"
    )
    parser.add_argument("--capacities", nargs="+", type=int, default=CAPACITIES, metavar="BLOCKS")
    parser.add_argument(
        "--variants", action="store_true", help="also replay variants of the trace and synthetic traces (20 minutes)"
    )
    options = parser.parse_args()
    print("hit ratio: fraction of the blocks of a trace that are leading hits of their request")
    print("* the default. optimum: policy that knows the future (Belady), and need not store a block.")
    print("regret: the best of the other policies minus the default; a negative number is better.")
    rows: list[dict[str, object]] = []
    more: dict[str, Trace] = {}
    times: dict[str, Sequence[float]] = {}
    for path in options.trace:
        trace = more[path.name] = read_trace(path)
        times[path.name] = read_times(path)
        if options.variants:
            variants = variants_of(trace)
            del variants["as it is"]
            more.update((f"{path.name}, {name}", variant) for name, variant in variants.items())
    if options.variants:
        more.update((name, make()) for name, make in MADE_UP.items())
    for name, trace in more.items():
        print(f"\n{name}: ", end="")
        rows += [
            {"trace": name, **row} for row in compare(trace, options.policies, options.capacities, times.get(name, ()))
        ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
