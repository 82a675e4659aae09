"""Benchmark of decision time and memory per key, by number of stored keys.

Measures the core without a server and without bytes. Each number of keys is measured in its own
process, because freed memory of an earlier measurement would distort the result.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.server.process.gc_tuning import disable_full_gc
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.catalog import Catalog
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.operations import run_to_end
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.types import SLOT_ALIGNMENT, NamespaceSpec

from .report import Report

__all__ = ["FULL", "measure_growth"]

FULL = "KVTIER_BENCH_FULL"
"""Environment variable. If set, also measures ten million keys, which takes minutes and 8 GB."""

COUNTS = (1_000, 10_000, 100_000, 1_000_000)
MOST = 10_000_000
CHAIN = 64
"""Number of blocks in a request."""
LONG = 8192
TIMES = 200
LONG_TIMES = 20
SPACE = NamespaceId(b"growth".ljust(32))
PATIENCE = 900.0
"""Maximum seconds for one number of keys."""


_Figure = tuple[str, float, str]


def measure_growth(report: Report, directory: Path) -> None:  # noqa: ARG001 - nothing is written
    """Adds the thread's processor time and the memory per key, by number of keys."""
    for count in (*COUNTS, MOST) if os.environ.get(FULL) else COUNTS:
        for part in _PARTS:
            command = [sys.executable, "-m", "bench.growth", part, str(count)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
            for name, value, unit in json.loads(done.stdout):
                report.add(f"{name}, {count:,} keys there", value, unit)


def _of_the_core(count: int) -> list[_Figure]:
    """Returns the figures of `count` keys in the CPU tier."""
    before = _resident_bytes()
    core = _Core(count)
    core.fill()
    rows: list[_Figure] = [("memory per key, CPU tier", (_resident_bytes() - before) / count, "bytes")]
    rows.append((f"lookup of {CHAIN} hits", _median(TIMES, lambda: core.look_up(CHAIN)), "us"))
    if count >= LONG:
        rows.append((f"lookup of {LONG:,} hits", _median(LONG_TIMES, lambda: core.look_up(LONG)), "us"))
    rows.append((f"store of {CHAIN}, as many evicted", _median(TIMES, core.store), "us"))
    rows.append(("longest of 1,000 stores and lookups", core.longest(1000) * 1e3, "ms"))
    rows.append(("longest slice of a reset", core.longest_of_reset() * 1e3, "ms"))
    return rows


class _Core:
    """A full core with one engine. Its memory includes the keys of 36 bytes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._next = 0
        self._random = random.Random(count)
        region = count * SLOT_ALIGNMENT
        self.core = TierManager(region, SLOT_ALIGNMENT * min(count, 1 << 14), ())
        self.core.add_memory(0, region)
        spec = NamespaceSpec(SPACE, world_size=1, part_bytes=(SLOT_ALIGNMENT,))
        self.session = self.core.open_session(b"growth", "engine", 0, spec)

    def fill(self) -> None:
        while self._next < self.count:
            self.store()

    def store(self) -> float:
        """Stores a chain of new blocks; returns the seconds of processor time."""
        keys = _keys(self._next, CHAIN)
        self._next += CHAIN
        request = f"store {self._next}"
        started = time.thread_time()
        answer = run_to_end(
            self.core.prepare_store(self.session, keys, StoreSpec(request_id=request, lease_seconds=1e9), now=0)
        )
        if answer.store_id is not None:
            run_to_end(self.core.complete_store(self.session, answer.store_id))
        self.core.finish_request(self.session, request)
        seconds = time.thread_time() - started
        self._work()
        return seconds

    def look_up(self, count: int) -> float:
        """Looks up a random chain of present blocks; returns the seconds of processor time."""
        blocks = self.core._cpu_tier.blocks_of(SPACE)  # the core has no public list of blocks
        first = self._random.randrange(max(1, self._next // CHAIN)) * CHAIN
        keys = [key for key in _keys(max(0, min(first, self._next - count)), count) if key in blocks]
        started = time.thread_time()
        answer = run_to_end(self.core.lookup(self.session, keys, LookupSpec(lease_seconds=1e9), now=0))
        if answer.lease is not None:
            answer.statuses()
            self.core.release(self.session, answer.lease.id)
        seconds = time.thread_time() - started
        self._work()
        return seconds

    def _work(self) -> None:
        """Runs the slices that the calls have left, as a server does, so that pins end."""
        self.core.take_commands()
        while self.core.has_work():
            self.core.work()
            self.core.take_commands()

    def longest(self, times: int) -> float:
        """Returns the duration of the longest of `times` calls in seconds."""
        return max(max(self.store(), self.look_up(CHAIN)) for _ in range(times))

    def longest_of_reset(self) -> float:
        """Resets everything in slices; returns the longest slice in seconds."""
        slices, left = [_seconds(lambda: self.core.reset(self.session))], True
        while left:
            left = bool(self.core.take_commands())
            slices.append(_seconds(self.core.work))
        return max(slices)


def _of_the_catalog(count: int) -> list[_Figure]:
    """Returns the memory per key in the catalog of a secondary tier."""
    before = _resident_bytes()
    capacity = count * SLOT_ALIGNMENT
    catalog = Catalog(capacity, TierSettings().new_queues("below", capacity, 0.0), EvictionHistory())
    for first in range(0, count, CHAIN):
        keys = _keys(first, min(CHAIN, count - first))
        for key in keys:
            catalog.begin_store(SPACE, key, SLOT_ALIGNMENT)
        catalog.use([entry for key in keys if (entry := catalog.get(SPACE, key)) is not None], None)
    return [("memory per key, tier below", (_resident_bytes() - before) / count, "bytes")]


def _keys(first: int, count: int) -> list[bytes]:
    """Returns keys as long as an engine's."""
    return [number.to_bytes(32, "little") + bytes(4) for number in range(first, first + count)]


def _median(times: int, call: Callable[[], float]) -> float:
    """Returns the median of the seconds that `call` returns, in microseconds."""
    return statistics.median(call() for _ in range(times)) * 1e6


def _seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_PARTS = {"core": _of_the_core, "catalog": _of_the_catalog}

if __name__ == "__main__":
    disable_full_gc()  # as in the server
    print(json.dumps(_PARTS[sys.argv[1]](int(sys.argv[2]))))
