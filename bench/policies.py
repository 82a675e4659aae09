"""Benchmark of eviction policies: replays a trace through the core.

    make bench-policies TRACE=FILE [JSON=FILE]
    python -m bench.policies --trace FILE [--json FILE] [--variants]

The hit ratio is the share of blocks that hit in an unbroken run from the start of a request. A
trace has one request per line, as JSON; `hash_ids` are its chained blocks: equal ids have equal
prefixes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtier.tiers.base import NamespaceId, RequestInfo
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.eviction import DEFAULT_POLICY, POLICIES
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
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines if line.strip()]


class Replay:
    """A core with one engine of one rank, and space for `capacity` blocks of one size."""

    def __init__(self, policy: str, capacity: int) -> None:
        region = capacity * BLOCK_BYTES
        self.core = TierManager(region, region, (), settings=TierSettings(eviction={CPU_TIER: policy}))
        self.core.add_memory(0, region)
        spec = NamespaceSpec(NamespaceId(bytes(16)), world_size=1, part_bytes=(BLOCK_BYTES,))
        self.session: EngineSession = self.core.open_session(b"replay", "engine", 0, spec)
        self.asked = self.hits = 0

    def run(self, trace: Trace) -> float:
        """Serves all requests in order; returns the hit ratio."""
        for number, blocks in enumerate(trace):
            keys = [str(block).encode() + GROUP for block in blocks]
            self.hits += self.serve(f"request-{number}", keys)
            self.asked += len(keys)
        return self.hits / max(1, self.asked)

    def serve(self, request_id: str, keys: list[bytes]) -> int:
        """Does what an engine does for a request; returns the number of blocks found."""
        core, session = self.core, self.session
        core.begin_request(session, RequestInfo(request_id, session.namespace.id))
        lease = core.lookup(session, keys, prefix=True, request_id=request_id, expires_at=FOREVER).lease
        hits = len(lease.items) if lease is not None else 0
        if hits < len(keys):
            answer = core.prepare_store(session, keys[hits:], request_id=request_id, expires_at=FOREVER)
            if answer.store_id is not None:
                core.complete_store(session, answer.store_id)
        core.finish_request(session, request_id)  # releases the lease, too
        core.take_commands()
        return hits


def optimum(trace: Trace, capacity: int) -> float:
    """Returns the hit ratio of an offline policy that knows the future (Belady).

    It does not store blocks without a next use. A block is used no later than the blocks behind it
    in its chain. Of one request the head counts as used first, so a block is never evicted before
    the blocks behind it.
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
    """Yields per request and block the next request with the block, or `len(trace)`."""
    following: dict[int, int] = {}
    found = []
    for number in range(len(trace) - 1, -1, -1):
        found.append([following.get(block, len(trace)) for block in trace[number]])
        following.update(dict.fromkeys(trace[number], number))
    return reversed(found)


def compare(trace: Trace, policies: Sequence[str], capacities: Sequence[int]) -> list[dict[str, object]]:
    """Prints a table of hit ratios; returns its rows."""
    references = sum(map(len, trace))
    distinct = len({block for blocks in trace for block in blocks})
    print(f"{len(trace):,} requests, {references:,} blocks, {distinct:,} of them distinct; capacity in blocks")
    print(f"{'policy':12}" + "".join(f"{capacity:>10,}" for capacity in capacities) + f"{'µs/block':>12}")
    rows: list[dict[str, object]] = []
    for policy in [*policies, OPTIMUM]:
        started = time.process_time()
        ratios = [
            optimum(trace, capacity) if policy == OPTIMUM else Replay(policy, capacity).run(trace)
            for capacity in capacities
        ]
        cost = (time.process_time() - started) / len(ratios) / max(1, references) * 1e6
        default = policy == DEFAULT_POLICY
        name = policy + " *" * default
        price = "" if policy == OPTIMUM else f"{cost:12.1f}"
        print(f"{name:12}" + "".join(f"{ratio:10.4f}" for ratio in ratios) + price, flush=True)
        rows += [
            {"policy": policy, "capacity": capacity, "hit_ratio": ratio, "default": default}
            for capacity, ratio in zip(capacities, ratios, strict=True)
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description="Replay a trace through the core.")
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="one JSON request with hash_ids per line"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE, too")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="policies (all)")
    parser.add_argument("--capacities", nargs="+", type=int, default=CAPACITIES, metavar="BLOCKS")
    parser.add_argument("--variants", action="store_true", help="add variants and synthetic traces (20 minutes)")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    print(f"share of blocks that hit in an unbroken run from the start of {options.trace.name}\n")
    rows = compare(trace, options.policies, options.capacities)
    print("\n* the default. optimum: knows the future (Belady), and may leave blocks out.")
    if options.variants:
        more = {**variants_of(trace), **{name: make() for name, make in MADE_UP.items()}}
        del more["as it is"]
        for name, variant in more.items():
            print(f"\n{name}: ", end="")
            rows += [{"trace": name, **row} for row in compare(variant, options.policies, options.capacities)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
