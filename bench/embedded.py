"""Benchmark of the LMDB tier without a server, compared with bare LMDB."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.cuda.host.region import HostRegion
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome

from .measure import interleave, rate, timed
from .raw_lmdb import RawLmdb, drop_cache
from .report import Report
from .workload import SIZES

__all__ = ["measure_embedded"]

ROUND_BYTES = 64 << 20
HELD_ROUNDS = 8
FILE_BYTES = 1 << 30
ROUNDS = 12
COLD_ROUNDS = 3
COLD_BYTES = 8 << 20
"""Bytes of a cold round. Fewer, because a cold round can take a hundred times as long."""
JOB_BYTES = 32 << 20
"""Size of a job, as the core sends jobs to a tier."""
SPACE = NamespaceId(bytes(32))


def measure_embedded(report: Report, directory: Path) -> None:
    """Adds the rows of a full tier. Stores replace the oldest blocks; loads read random blocks.

    Loads read from the page cache (warm) and from the disk (cold).
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # as in the server
    with HostRegion.create(2 * ROUND_BYTES) as region:
        region.back(0, region.size_bytes)
        region.memory[:ROUND_BYTES] = random.Random(6).randbytes(ROUND_BYTES)
        for block_bytes in SIZES:
            views = [region.memory[at : at + block_bytes] for at in range(0, region.size_bytes, block_bytes)]
            _measure(report, directory, views[: len(views) // 2], views[len(views) // 2 :])
            views.clear()
    sys.setswitchinterval(interval)


def _measure(report: Report, directory: Path, sources: list[memoryview], targets: list[memoryview]) -> None:
    stores = _Stores(directory, sources, targets)
    for _ in range(HELD_ROUNDS + 2):  # until stores reuse freed pages
        stores.put(0)
        stores.store(0)
    warm = interleave(
        ROUNDS,
        {
            "put": stores.put,
            "put with checksums": stores.put_summed,
            "store": stores.store,
            "get, warm": stores.get,
            "get with checksums, warm": stores.get_summed,
            "load, warm": stores.load,
        },
    )
    cold = interleave(COLD_ROUNDS, {"get, cold": stores.cold(stores.get), "load, cold": stores.cold(stores.load)})
    size = f"{sources[0].nbytes >> 20} MiB" if sources[0].nbytes >= 1 << 20 else f"{sources[0].nbytes >> 10} KiB"
    for ours, bare, summed, seconds, nbytes in (
        ("store", "put", "put with checksums", warm, ROUND_BYTES),
        ("load, warm", "get, warm", "get with checksums, warm", warm, ROUND_BYTES),
        ("load, cold", "get, cold", None, cold, COLD_BYTES),
    ):
        limit = f"bare LMDB {bare}, {size}"
        report.add(limit, rate(nbytes, seconds[bare]), "GB/s")
        report.add(f"LMDB tier {ours}, {size}", rate(nbytes, seconds[ours]), "GB/s", limit)
        if summed is not None:  # separates checksums from the rest of the tier's cost
            with_sums = f"bare LMDB {summed}, {size}"
            report.add(with_sums, rate(nbytes, seconds[summed]), "GB/s", limit)
            report.add(f"LMDB tier {ours}, beside checksums, {size}", rate(nbytes, seconds[ours]), "GB/s", with_sums)
    stores.close()


class _Stores:
    """A tier and a bare LMDB environment with the same blocks."""

    def __init__(self, directory: Path, sources: list[memoryview], targets: list[memoryview]) -> None:
        self._ours, self._bare = directory / "ours", directory / "bare"
        self._sources = sources
        self._targets = targets
        self._source = random.Random(7)
        self._rounds: dict[str, list[list[bytes]]] = {"ours": [], "bare": []}
        self._count = 0
        for path in (self._ours, self._bare):
            path.mkdir()
        self._open()

    def _open(self) -> None:
        self._tier = LMDBTier("lmdb", self._ours, FILE_BYTES, "process")
        self._raw = RawLmdb(self._bare, FILE_BYTES)

    def put(self, _: int, *, summed: bool = False) -> float:
        """Writes a round to bare LMDB and deletes the oldest round."""
        keys, old = self._turn("bare")
        return timed(lambda: self._raw.put(keys, self._sources, old, summed=summed))

    def put_summed(self, _: int) -> float:
        """Like `put`, with a checksum per block."""
        return self.put(_, summed=True)

    def store(self, _: int) -> float:
        """Removes the oldest round and stores a new one; returns the seconds of both."""
        keys, old = self._turn("ours")
        gone, jobs = [(SPACE, key) for key in old], _jobs(keys, self._sources)

        def replace() -> None:
            self._tier.remove(gone)
            self._move(self._tier.store, jobs)

        return timed(replace)

    def get(self, _: int, *, summed: bool = False) -> float:
        """Copies random blocks out of bare LMDB."""
        keys = self._any("bare")
        return timed(lambda: self._raw.get(keys, self._targets, summed=summed))

    def get_summed(self, _: int) -> float:
        """Like `get`, with a checksum per block."""
        return self.get(_, summed=True)

    def load(self, _: int) -> float:
        """Loads random blocks."""
        return timed(self._move, self._tier.load, _jobs(self._any("ours"), self._targets))

    def cold(self, action: Callable[[int], float]) -> Callable[[int], float]:
        """Returns the action for a cold page cache, with fewer bytes. A VM's host may still cache.

        Drops the cache after the tier is open, because opening reads the whole file.
        """

        def run(number: int) -> float:
            self.close(keep=True)
            self._open()
            drop_cache(self._ours)
            drop_cache(self._bare)
            every, self._targets = self._targets, self._targets[: COLD_BYTES // self._targets[0].nbytes]
            try:
                return action(number)
            finally:
                self._targets = every

        return run

    def close(self, *, keep: bool = False) -> None:
        self._tier.close()
        self._raw.close()
        if not keep:
            shutil.rmtree(self._ours)
            shutil.rmtree(self._bare)

    def _turn(self, which: str) -> tuple[list[bytes], list[bytes]]:
        rounds = self._rounds[which]
        keys = [b"%032d" % number for number in range(self._count, self._count + len(self._sources))]
        self._count += len(keys)
        rounds.append(keys)
        return keys, rounds.pop(0) if len(rounds) > HELD_ROUNDS else []

    def _any(self, which: str) -> list[bytes]:
        return self._source.sample([key for keys in self._rounds[which] for key in keys], len(self._targets))

    def _move(
        self, move: Callable[[Sequence[BlockBytes]], list[Outcome]], jobs: Sequence[Sequence[BlockBytes]]
    ) -> None:
        for blocks in jobs:
            if set(move(blocks)) != {Outcome.DONE}:
                raise RuntimeError(f"the LMDB tier: {self._tier.last_error}")


def _jobs(keys: Sequence[bytes], views: Sequence[memoryview]) -> list[list[BlockBytes]]:
    """Splits blocks into jobs of the size that the core uses."""
    blocks = [BlockBytes(SPACE, key, (view,)) for key, view in zip(keys, views, strict=True)]
    job = max(1, JOB_BYTES // views[0].nbytes)
    return [blocks[start : start + job] for start in range(0, len(blocks), job)]
