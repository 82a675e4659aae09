"""Benchmark of hand-offs: time from the end of a prefill until the reader has all blocks.

A pause stands for the computation of a chunk of the prompt. The reader pulls all blocks after the
prefill, or the blocks of each chunk during the prefill.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvtier.client import Client, HoldName, KeyStatus, PublishStatus

from .measure import interleave, percentile
from .pool import Pool
from .report import Report
from .service import Service
from .workload import Keys, connect

__all__ = ["measure_handoffs"]

REGION_BYTES = 512 << 20
BLOCK_BYTES = 2 << 20
CHUNKS = 12
CHUNK_BLOCKS = 8
CHUNK_SECONDS = 0.05
BLOCKS = CHUNKS * CHUNK_BLOCKS
ROUNDS = 9
_FOUND_SECONDS = 1.0
"""More than a client needs to find the bulk process."""


def measure_handoffs(report: Report, directory: Path) -> None:
    """Adds the times of both ways to pull, over shared memory and over sockets."""
    pools = Pool(Pool.allocate(seed=1), BLOCK_BYTES, BLOCKS), Pool(Pool.allocate(seed=None), BLOCK_BYTES, BLOCKS)
    with Service(directory, REGION_BYTES, config="handoff = {part = 0.5}") as service:
        service.start()
        for transport, endpoint in (("shm", service.unix), ("tcp", service.tcp)):
            with (
                connect(endpoint, transport, BLOCK_BYTES) as prefill,
                connect(endpoint, transport, BLOCK_BYTES) as decode,
            ):
                time.sleep(_FOUND_SECONDS)
                handoffs = _Handoffs(prefill, decode, *pools, series=transport)
                after, during = (f"{transport} pull {when} the prefill" for when in ("after", "during"))
                actions = {after: handoffs.pull_after, during: handoffs.pull_during}
                interleave(2, actions)  # maps all pages of the region
                seconds = interleave(ROUNDS, actions)
                report.add(after, percentile(seconds[after], 0.5), "ms")
                report.add(during, percentile(seconds[during], 0.5), "ms", after)


class _Handoffs:
    """Each round hands over the blocks of a new prompt. `series` names the keys."""

    def __init__(self, prefill: Client, decode: Client, source: Pool, target: Pool, *, series: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._source = source.buffers(0)
        self._target = target.batch(0)
        self._keys = Keys(f"handoffs {series}")
        self._numbers = itertools.count()
        self._reader = ThreadPoolExecutor(1)

    def pull_after(self, _: int) -> float:
        keys, hold = self._keys.take(BLOCKS), self._next_hold()
        computed_at = self._compute(keys)
        self._publish(hold, keys)
        return self._ended(hold, self._reader.submit(self._pull, hold, 0).result() - computed_at)

    def pull_during(self, _: int) -> float:
        keys, hold = self._keys.take(BLOCKS), self._next_hold()
        self._publish(hold, keys)
        pulled = self._reader.submit(self._pull, hold, 1)
        computed_at = self._compute(keys)
        return self._ended(hold, pulled.result() - computed_at)

    def _next_hold(self) -> HoldName:
        return HoldName(self._prefill.engine_id, f"request {next(self._numbers)}")

    def _compute(self, keys: list[bytes]) -> float:
        """Stores the blocks chunk by chunk; returns when the last chunk was computed."""
        computed_at = 0.0
        for start in range(0, BLOCKS, CHUNK_BLOCKS):
            time.sleep(CHUNK_SECONDS)
            computed_at = time.perf_counter()
            chunk = slice(start, start + CHUNK_BLOCKS)
            self._prefill.store(keys[chunk], self._source[chunk])
        return computed_at

    def _publish(self, hold: HoldName, keys: list[bytes]) -> None:
        status = self._prefill.publish(hold.request_id, keys, range(BLOCKS), num_tokens=16 * BLOCKS).status
        if status is not PublishStatus.PUBLISHED:
            raise RuntimeError(f"the hold was not published: {status.name}")

    def _pull(self, hold: HoldName, min_blocks: int) -> float:
        """Reads the blocks as they are stored; returns when the reader has the last block."""
        missing = list(range(BLOCKS))
        while missing:
            with self._decode.claim(hold, first_positions=missing[:1], wait=10.0, min_blocks=min_blocks) as lease:
                assert lease.hold is not None
                stored = [place for place in missing if lease.statuses[place] == KeyStatus.HIT]
                with self._decode.read(lease, stored) as batch:
                    for place, view in zip(stored, batch.views(), strict=True):
                        np.copyto(self._target[place], np.frombuffer(view, np.uint8))
                missing = [place for place in missing if place not in stored]
                min_blocks = lease.hold.settled_blocks + 1
        return time.perf_counter()

    def _ended(self, hold: HoldName, seconds: float) -> float:
        """Checks some bytes and ends the hold; returns `seconds`."""
        self._decode.release_holds(hold)
        for place in (0, BLOCKS // 2, BLOCKS - 1):
            if self._target[place].data != self._source[place]:
                raise RuntimeError(f"block {place} differs from the stored bytes")
        self._target[:] = 0
        return seconds
