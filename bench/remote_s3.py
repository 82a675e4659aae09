"""Benchmark of the tier `s3`, compared with bare `obstore` calls and with LMCache's adapter.

    PYTHONPATH=tests python -m bench.remote_s3 [--json FILE]

It starts a SeaweedFS server. Tier and bare calls transfer the same bytes in objects of the same
size, with the same number of calls in flight. LMCache's adapter writes an object per block.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import obstore

from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.pack_tier import READ_BYTES, THREADS
from kvtier.tiers.remote.s3 import S3Tier
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome

from .machine import facts
from .measure import interleave, percentile, rate, timed
from .remote_lmcache import LMCacheAdapters, add_ratios
from .report import Report

__all__ = ["measure_s3"]

SIZES = (64 << 10, 2 << 20)
JOB_BYTES = 32 << 20
"""Bytes of one job, the largest that the server makes."""
PACK_BYTES = 16 << 20
ROUNDS = 12
SPACE = NamespaceId(bytes(32))


def measure_s3(report: Report, options: Mapping[str, Any], client: Any, lmcache: LMCacheAdapters) -> None:
    """Adds rows for a bucket. `options` are those of `S3Tier`, `client` is a store of `obstore`."""
    limits = RemoteLimits(deadline_seconds=10.0, in_flight_bytes=2 * JOB_BYTES)

    def open_tier() -> S3Tier:
        return S3Tier("s3", 1 << 40, limits=limits, pack=PACK_BYTES, **options)

    memory = memoryview(bytearray(random.Random(1).randbytes(JOB_BYTES)))
    with ThreadPoolExecutor(THREADS) as threads:
        bare = _Bare(client, memory, threads)
        for block_bytes in SIZES:
            _measure(report, open_tier, bare, block_bytes, lmcache)


def _measure(
    report: Report, open_tier: Callable[[], S3Tier], bare: _Bare, block_bytes: int, lmcache: LMCacheAdapters
) -> None:
    size = f"{block_bytes >> 10} KiB" if block_bytes < 1 << 20 else f"{block_bytes >> 20} MiB"
    slots = [bare.memory[at : at + block_bytes] for at in range(0, JOB_BYTES, block_bytes)]
    first, second = open_tier(), open_tier()
    stored: list[list[BlockBytes]] = []
    found: list[float] = []

    def store(number: int) -> float:
        stored.append(
            [BlockBytes(SPACE, b"%d %d %d" % (block_bytes, number, n), (slot,)) for n, slot in enumerate(slots)]
        )
        return timed(_do, first.store, stored[-1])

    def load(_: int) -> float:
        """Loads the last job at the second server, which finds it first."""
        found.append(timed(second.lookup, [(SPACE, block.key) for block in stored[-1]]))
        return timed(_do, second.load, stored[-1])

    actions: dict[str, Callable[[int], float]] = {
        f"bare obstore put, objects of 16 MiB, {size}": lambda _: timed(bare.put, PACK_BYTES),
        f"s3 tier store, blocks of {size}": store,
        f"bare obstore get, ranges of 8 MiB, {size}": lambda _: timed(bare.get, READ_BYTES),
        f"s3 tier load, blocks of {size}": load,
        f"bare obstore put, an object per block of {size}": lambda _: timed(bare.put, block_bytes),
        f"bare obstore get, an object per block of {size}": lambda _: timed(bare.get, block_bytes),
    }
    with lmcache.running(block_bytes, len(slots)) as of_lmcache:
        seconds = interleave(ROUNDS, actions | of_lmcache)
    limit = ""
    for number, (name, times) in enumerate(seconds.items()):
        named = f"{name}, blocks of {size}" if name in of_lmcache else name
        report.add(named, rate(JOB_BYTES, times[1:]), "GB/s", limit if number in (1, 3) else None)
        limit = name
    tier = {f"{action}: s3 tier": seconds[f"s3 tier {action}, blocks of {size}"] for action in ("store", "load")}
    add_ratios(report, tier | seconds, "s3 tier", size)
    report.add(f"s3 tier, first lookup of a job by another server, {size}", percentile(found[1:], 0.5), "ms")
    for opened in (first, second):
        opened.close()


class _Bare:
    """Calls of the library, with as many threads as the tier has."""

    def __init__(self, client: Any, memory: memoryview, threads: ThreadPoolExecutor) -> None:
        self.memory = memory
        self._client = client
        self._threads = threads
        self._numbers = count()
        self._objects: list[str] = []

    def put(self, object_bytes: int) -> None:
        self._objects = [f"bare/{next(self._numbers)}" for _ in range(0, JOB_BYTES, object_bytes)]
        parts = list(_ranges(object_bytes))

        def put(work: tuple[str, tuple[int, int]]) -> None:
            name, (start, end) = work
            obstore.put(self._client, name, self.memory[start:end], mode="create", use_multipart=False)

        list(self._threads.map(put, zip(self._objects, parts, strict=True)))

    def get(self, read_bytes: int) -> None:
        """Reads the objects of the last `put` in ranges of `read_bytes`, or whole."""
        object_bytes = JOB_BYTES // len(self._objects)
        ranges = [(name, start) for name in self._objects for start in range(0, object_bytes, read_bytes)]

        def get(work: tuple[str, int]) -> int:
            name, start = work
            end = min(start + read_bytes, object_bytes)
            return len(obstore.get_range(self._client, name, start=start, end=end))

        if sum(self._threads.map(get, ranges)) != JOB_BYTES:
            raise RuntimeError("the bare reads are incomplete")


def _ranges(nbytes: int) -> Iterator[tuple[int, int]]:
    return ((at, at + nbytes) for at in range(0, JOB_BYTES, nbytes))


def _do(move: Callable[[Sequence[BlockBytes]], list[Outcome]], blocks: Sequence[BlockBytes]) -> None:
    outcomes = move(blocks)
    if set(outcomes) != {Outcome.DONE}:
        raise RuntimeError(f"the tier failed: {set(outcomes)}")


def main() -> None:
    from harness.seaweed import SeaweedServer

    parser = argparse.ArgumentParser(prog="python -m bench.remote_s3", description="Measure the tier s3.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name:
        header = facts(Path(name))
        server = SeaweedServer(Path(name))
        server.start()
        try:
            lmcache = LMCacheAdapters(Path(name), [server.lmcache_settings()])
            measure_s3(report, server.options(), server.client(), lmcache)
            header["peer"] = lmcache.version
        finally:
            server.end()
        header["load"] += f", {os.getloadavg()[0]:.1f} at the end"
    report.show(header)
    lmcache.show_missing()
    if options.json:
        report.write_json(options.json, header)


if __name__ == "__main__":
    main()
