"""Benchmark of the LMDB tier in a server: stores until durable, and promotions after a restart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.client import Client, DurableStatus
from kvtier.cuda.host.region import HostRegion

from .measure import rate, timed
from .pool import BATCH, Pool
from .raw_lmdb import RawLmdb, drop_cache
from .report import Report
from .service import Service
from .workload import SIZES, Keys, batch_name, connect

__all__ = ["measure_durable"]

REGION_BYTES = 1 << 30
WAIT = 60.0
WARM_UP_ROUNDS = 4
"""Rounds until the LMDB tier is full. Later stores evict blocks, as in a long-running server."""
ROUNDS = WARM_UP_ROUNDS + 5
BATCHES = {64 << 10: 32, 256 << 10: 16, 2 << 20: 4}
"""Batches per round, by block size."""
COLD_BATCHES = 4
"""Batches of a cold round. Fewer, because a cold round can take a hundred times as long."""
FILE_ROUNDS = 3
"""Rounds that fit into a database file. kvtier keeps a fraction of the file free."""
KEPT_ROUNDS = 2
"""Rounds whose blocks stay in the bare LMDB database; older blocks are deleted."""


def measure_durable(report: Report, directory: Path) -> None:
    """Adds rows for stores until durable, and for promotions with a warm and a cold page cache."""
    source = Pool.allocate(seed=2)
    for block_bytes in SIZES:
        ours, raw = directory / f"ours-{block_bytes}", directory / f"raw-{block_bytes}"
        ours.mkdir()
        raw.mkdir()
        file_bytes = FILE_ROUNDS * BATCHES[block_bytes] * BATCH * block_bytes
        with Service(ours, REGION_BYTES, lmdb_bytes=file_bytes) as service:
            run = _Run(report, service, (raw, file_bytes), Pool(source, block_bytes))
            run.stores()
            service.stop()
            run.promotions("warm")
            service.stop()
            run.promotions("cold")
        for path in (*ours.rglob("data.mdb"), *raw.rglob("data.mdb")):
            path.unlink()  # frees the disk space for the next block size


class _Run:
    """Measurements with one block size."""

    def __init__(self, report: Report, service: Service, raw: tuple[Path, int], source: Pool) -> None:
        self._report = report
        self._service = service
        self._raw = raw
        self._directory = raw[0].parent
        self._source = source
        self._block_bytes = source.block_bytes
        self._batches = BATCHES[self._block_bytes]
        self._keys = Keys(f"durable {self._block_bytes}")
        self._stored: list[list[bytes]] = []

    def stores(self) -> None:
        """Stores rounds and waits until they are durable; puts the same bytes in bare LMDB."""
        self._service.start()
        ours: list[float] = []
        bare: list[float] = []
        rounds: list[list[list[bytes]]] = []
        with connect(self._service.unix, "shm", self._block_bytes) as client, RawLmdb(*self._raw) as raw:
            for number in range(ROUNDS):
                batches = [self._keys.take(BATCH) for _ in range(self._batches)]
                rounds.append(batches)
                old = rounds[number - KEPT_ROUNDS] if number >= KEPT_ROUNDS else []
                os.sync()  # so that the kernel does not write earlier rounds during this one
                bare.append(timed(self._put, raw, batches, old))
                os.sync()
                ours.append(timed(self._store, client, batches))
        self._stored = rounds[-1]
        limit = batch_name("raw LMDB put", self._block_bytes)
        nbytes = self._batches * BATCH * self._block_bytes
        self._report.add(limit, rate(nbytes, bare[WARM_UP_ROUNDS:]), "GB/s")
        self._report.add(
            batch_name("store until durable in LMDB", self._block_bytes),
            rate(nbytes, ours[WARM_UP_ROUNDS:]),
            "GB/s",
            limit,
        )

    def promotions(self, cache: str) -> None:
        """Looks up blocks that only the LMDB tier has; reads the same bytes from bare LMDB."""
        self._service.start()
        ours: list[float] = []
        bare: list[float] = []
        with (
            connect(self._service.unix, "shm", self._block_bytes) as client,
            RawLmdb(*self._raw) as raw,
            HostRegion.create(BATCH * self._block_bytes) as region,
        ):
            region.back(0, region.size_bytes)
            if cache == "cold":
                # Not earlier: the server checks a database when it opens it, which reads all pages.
                drop_cache(self._directory)
            slots = [
                region.memory[start : start + self._block_bytes]
                for start in range(0, region.size_bytes, self._block_bytes)
            ]
            for number, keys in enumerate(self._stored[: COLD_BATCHES if cache == "cold" else None]):
                bare.append(timed(raw.get, keys, slots))
                ours.append(timed(self._promote, client, keys))
                self._compare(client, number, keys)
            slots.clear()
        limit = batch_name(f"raw LMDB get, {cache}", self._block_bytes)
        nbytes = BATCH * self._block_bytes
        self._report.add(limit, rate(nbytes, bare), "GB/s")
        self._report.add(
            batch_name(f"promotion from LMDB, {cache}", self._block_bytes), rate(nbytes, ours), "GB/s", limit
        )

    def _put(self, raw: RawLmdb, batches: Sequence[Sequence[bytes]], old: Sequence[Sequence[bytes]]) -> None:
        for number, keys in enumerate(batches):
            raw.put(keys, self._source.buffers(number), old[number] if old else ())

    def _store(self, client: Client, batches: Sequence[Sequence[bytes]]) -> None:
        for number, keys in enumerate(batches):
            client.store(keys, self._source.buffers(number))
        every = [key for keys in batches for key in keys]
        flushed = client.flush(every, wait=WAIT)
        durable = flushed.count(DurableStatus.DURABLE)
        if durable != len(every):
            others = {DurableStatus(status).name for status in flushed} - {DurableStatus.DURABLE.name}
            raise RuntimeError(
                f"{durable} of {len(every)} blocks became durable, others are {others}: {self._service.log.read_text()}"
            )

    def _promote(self, client: Client, keys: Sequence[bytes]) -> None:
        lease = client.lookup(keys, wait=WAIT)
        if lease.prefix_hits != len(keys):
            raise RuntimeError(f"{lease.prefix_hits} of {len(keys)} blocks came back from LMDB")
        lease.release()

    def _compare(self, client: Client, number: int, keys: Sequence[bytes]) -> None:
        block = np.zeros(self._block_bytes, np.uint8)
        for index in (0, BATCH - 1):
            client.load([keys[index]], [block.data])
            if not np.array_equal(block, self._source.batch(number)[index]):
                raise RuntimeError(f"block {index} of batch {number} came back from LMDB with other bytes")
