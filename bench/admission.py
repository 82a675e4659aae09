"""Benchmark of an admission filter: disk writes saved, and hits lost.

    python -m bench.admission --trace FILE [--cpu BLOCKS] [--disk BLOCKS]

Replays a trace through the core with two tiers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LoadFromTier, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.operations import run_to_end
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.eviction.admission import ADMISSION
from kvtier.tiers.negotiation import vote
from kvtier.tiers.secondary_tier import BlockBytes, Entry, NamespaceId, Outcome, RequestInfo, SecondaryTier, Vote
from kvtier.tiers.types import EngineSession, NamespaceSpec

from .policies import BLOCK_BYTES, FOREVER, GROUP, read_trace
from .traces import Trace

__all__ = ["replay"]


class _Disk(SecondaryTier):
    """Tier that does not store anything. The core's catalog decides its contents."""

    type: ClassVar[str] = "disk"
    durable: ClassVar[bool] = True

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        raise NotImplementedError

    load = store

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def replay(trace: Trace, admission: str, cpu_blocks: int, disk_blocks: int) -> tuple[float, float]:
    """Returns the prefix-hit ratio of both tiers, and disk writes per looked-up block."""
    region = cpu_blocks * BLOCK_BYTES
    disk = _Disk("disk", disk_blocks * BLOCK_BYTES)
    core = TierManager(
        region, region, [disk], max_queued_bytes=region, settings=TierSettings(admission={"disk": admission})
    )
    core.add_memory(0, region)
    spec = NamespaceSpec(NamespaceId(bytes(32)), world_size=1, part_bytes=(BLOCK_BYTES,))
    session = core.open_session(b"replay", "engine", 0, spec)
    hits = asked = written = 0
    for number, blocks in enumerate(trace):
        keys = [str(block).encode() + GROUP for block in blocks]
        found, wrote = _serve(core, session, f"request-{number}", keys)
        hits, asked, written = hits + found, asked + len(keys), written + wrote
    return hits / max(1, asked), written / max(1, asked)


def _serve(core: TierManager, session: EngineSession, request_id: str, keys: list[bytes]) -> tuple[int, int]:
    core.begin_request(session, RequestInfo(request_id, session.namespace.id))
    lease = run_to_end(
        core.lookup(session, keys, LookupSpec(request_id=request_id, lease_seconds=FOREVER), now=0)
    ).lease
    written = _finish_jobs(core)
    hits = len(keys) if lease is None else (*lease.items, None).index(None)
    hits = 0 if lease is None else hits
    if hits < len(keys):
        answer = run_to_end(
            core.prepare_store(session, keys[hits:], StoreSpec(request_id=request_id, lease_seconds=FOREVER), now=0)
        )
        if answer.store_id is not None:
            run_to_end(core.complete_store(session, answer.store_id))
    core.finish_request(session, request_id)
    return hits, written + _finish_jobs(core)


def _finish_jobs(core: TierManager) -> int:
    """Reports all jobs as successful; returns the number of blocks written."""
    written = 0
    while commands := core.take_commands():
        for command in commands:
            if isinstance(command, StoreInTier | LoadFromTier):
                written += len(command.blocks) if isinstance(command, StoreInTier) else 0
                core.job_finished(command.job_id, [Outcome.DONE] * len(command.blocks))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--cpu", type=int, default=3_000, help="size of the CPU tier in blocks (3,000)")
    parser.add_argument("--disk", type=int, default=30_000, help="size of the disk tier in blocks (30,000)")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    print("admission   hit ratio  written per looked-up block")
    for admission in ADMISSION:
        hit_ratio, written = replay(trace, admission, options.cpu, options.disk)
        print(f"{admission:10}  {hit_ratio:9.4f}  {written:8.4f}")


if __name__ == "__main__":
    main()
