"""Benchmark of throughput and latency by number of clients, each in its own process.

`python -m bench.clients TRANSPORT ENDPOINT NUMBER BLOCK_BYTES` is one client. For each line of its
standard input it runs one step.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvtier.client import Client, StoreStatus

from .measure import GB, percentile, timed
from .pool import page_aligned
from .report import Report
from .service import Service
from .workload import Keys, connect

__all__ = ["COUNTS", "measure_clients"]

COUNTS = (1, 2, 4, 8, 16)
REGION_BYTES = 1 << 30
BLOCK_BYTES = 256 << 10
SMALL_BYTES = 64 << 10
"""Block size of the additional row with two clients."""
POOL_BYTES = 32 << 20
"""Minimum size of a client's source and of its destination; larger than the caches."""
BATCH = 64
LOOKUP_KEYS = 64
SECONDS = 0.6
"""Duration of each step."""
STEPS = ("memcpy", "store", "load", "lookup")


def measure_clients(report: Report, directory: Path) -> None:
    """Adds the total rate of the clients and their lookup times, by transport and number."""
    with Service(directory, REGION_BYTES) as service:
        service.start()
        for transport, endpoint in (("shm", service.unix), ("grpc", service.tcp)):
            for count in COUNTS:
                _measure(report, transport, endpoint, count, BLOCK_BYTES)
        _measure(report, "shm", service.unix, 2, SMALL_BYTES)


def _measure(report: Report, transport: str, endpoint: str, count: int, block_bytes: int) -> None:
    with ExitStack() as running:
        clients = [running.enter_context(_Child(transport, endpoint, number, block_bytes)) for number in range(count)]
        for child in clients:
            child.answer()
        found = {step: _together(clients, step) for step in STEPS}
    name = f"{transport}, {count} client{'s' if count > 1 else ''}"
    if block_bytes != BLOCK_BYTES:
        name += f", {block_bytes >> 10} KiB"
    for step in STEPS[:-1]:
        rate = sum(one["done"] * BATCH * block_bytes / one["seconds"] for one in found[step]) / GB
        report.add(f"{name}: {step}", rate, "GB/s", None if step == "memcpy" else f"{name}: memcpy")
    times = [seconds for one in found["lookup"] for seconds in one["times"]]
    for share in (50, 99):
        report.add(f"{name}: lookup of {LOOKUP_KEYS} keys, p{share}", percentile(times, share / 100), "ms")


def _together(clients: Sequence[_Child], step: str) -> list[dict[str, Any]]:
    until = time.monotonic() + SECONDS + 0.02
    for child in clients:
        child.ask(step, until)
    return [child.answer() for child in clients]


class _Child:
    def __init__(self, transport: str, endpoint: str, number: int, block_bytes: int) -> None:
        command = [sys.executable, "-m", "bench.clients", transport, endpoint, str(number), str(block_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, step: str, until: float) -> None:
        """Starts a step, which the client repeats until this time of the monotonic clock."""
        assert self._process.stdin is not None
        print(json.dumps([step, until]), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Returns the result of the step."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of a client ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Steps:
    """The steps of one client."""

    def __init__(self, client: Client, number: int, block_bytes: int) -> None:
        self._client = client
        self._keys = Keys(f"clients {number} {time.time_ns()}")
        self._batches = max(2, POOL_BYTES // (BATCH * block_bytes))
        shape = (2 * self._batches, BATCH, block_bytes)
        memory = page_aligned(math.prod(shape)).reshape(shape)
        memory[:] = np.random.default_rng(number).integers(0, 256, memory.shape, np.uint8)
        self._source, self._target = memory[: self._batches], memory[self._batches :]
        self._round = 0
        self._last: list[bytes] = []
        self.store()

    def memcpy(self) -> None:
        self._round += 1
        np.copyto(self._target[self._round % self._batches], self._source[self._round % self._batches])

    def store(self) -> None:
        self._round += 1
        self._last = self._keys.take(BATCH)
        statuses = self._client.store(self._last, [row.data for row in self._source[self._round % self._batches]])
        self._stored = self._round % self._batches
        if statuses.count(StoreStatus.GRANTED) != BATCH:
            raise RuntimeError("not all blocks were stored")

    def load(self) -> None:
        if self._client.load(self._last, [row.data for row in self._target[0]]) != BATCH:
            raise RuntimeError("not all blocks were loaded")

    def lookup(self) -> None:
        with self._client.lookup(self._last[:LOOKUP_KEYS]) as lease:
            if lease.prefix_hits != LOOKUP_KEYS:
                raise RuntimeError("not all blocks were found")

    def check(self) -> None:
        """Loads the last batch and compares every byte."""
        self._target[:] = 0
        self.load()
        if not np.array_equal(self._target[0], self._source[self._stored]):
            raise RuntimeError("a loaded batch differs from the stored one")


def _main(transport: Any, endpoint: str, number: int, block_bytes: int) -> None:
    with connect(endpoint, transport, block_bytes) as client:
        steps = _Steps(client, number, block_bytes)
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            step, until = json.loads(line)
            times = _repeat(getattr(steps, step), until)
            if step == "load":
                steps.check()
            print(json.dumps({"done": len(times), "seconds": sum(times), "times": times}), flush=True)


def _repeat(action: Callable[[], None], until: float) -> list[float]:
    times = [timed(action)]
    while time.monotonic() < until:
        times.append(timed(action))
    return times


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
