"""Benchmark of `copy_batch`, alone and beside a busy thread, compared with one call of numpy."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.cuda.host.copy import address_of, copy_batch

from .measure import GB, interleave, rate, timed
from .pool import BATCH, Pool, copy_blocks
from .report import Report
from .workload import SIZES, batch_name

__all__ = ["measure_copies"]

ROUNDS = 40


def measure_copies(report: Report, _: Path) -> None:
    source, target = Pool.allocate(seed=5), Pool.allocate(seed=None)
    for block_bytes in (16 << 10, *SIZES):
        copies = _Copies(Pool(source, block_bytes), Pool(target, block_bytes))
        alone = interleave(ROUNDS, {"numpy": copies.in_one_call, "ours": copies.ours})
        with _busy_thread():
            crowded = interleave(ROUNDS, {"ours": copies.ours})
        limit = batch_name("one call of numpy", block_bytes)
        report.add(limit, rate(copies.nbytes, alone["numpy"]), "GB/s")
        report.add(batch_name("copy_batch", block_bytes), rate(copies.nbytes, alone["ours"]), "GB/s", limit)
        # The mean: a median would hide the few copies that wait long for the other thread.
        mean = copies.nbytes / statistics.mean(crowded["ours"]) / GB
        report.add(batch_name("copy_batch beside a busy thread", block_bytes), mean, "GB/s", limit)


class _Copies:
    """Batches of one block size. Each copy uses another batch, so the bytes are in no cache."""

    def __init__(self, source: Pool, target: Pool) -> None:
        self._source = source
        self._target = target
        self._next = 0
        self.nbytes = BATCH * source.block_bytes

    def in_one_call(self, _: int) -> float:
        """Copies evenly spaced rows with numpy."""
        number = self._turn()
        return timed(copy_blocks, self._target.batch(number), self._source.batch(number))

    def ours(self, _: int) -> float:
        """Copies the same rows by address, as clients do."""
        number = self._turn()
        to = [address_of(view, writable=True)[0] for view in self._target.buffers(number)]
        start = [address_of(view)[0] for view in self._source.buffers(number)]
        return timed(copy_batch, to, start, [self._source.block_bytes] * BATCH)

    def _turn(self) -> int:
        # The step leaves the caches. It is prime, so that all batches are used.
        self._next += 37
        return self._next


@contextmanager
def _busy_thread() -> Iterator[None]:
    """Runs a thread that computes in Python, as an engine's scheduler does."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)], daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
