"""Benchmark of lookups while another client stores and loads over gRPC without pause.

`python -m bench.streams ENDPOINT` is the other client. It prints a line when it has begun, and ends
when its standard input is closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from kvtier.client import Client

from .measure import percentile, timed
from .pool import BATCH, Pool
from .report import Report
from .service import Service
from .workload import Keys, connect

__all__ = ["measure_streams"]

REGION_BYTES = 1 << 30
BLOCK_BYTES = 2 << 20
ROUNDS = 4
CALLS = 250
"""Number of calls per round. Rounds with and without load alternate."""


def measure_streams(report: Report, directory: Path) -> None:
    """Adds the time of a call over gRPC, idle and under load."""
    idle: list[float] = []
    busy: list[float] = []
    with Service(directory, REGION_BYTES) as service:
        service.start()
        with connect(service.tcp, "grpc", BLOCK_BYTES) as client:
            call = _lookup_of(client)
            for _ in range(ROUNDS):
                idle += [timed(call) for _ in range(CALLS)]
                with _Load(service.tcp):
                    busy += [timed(call) for _ in range(CALLS)]
    report.add("control p50 idle", percentile(idle, 0.5), "ms")
    report.add("control p50 under bulk", percentile(busy, 0.5), "ms", "control p50 idle")
    report.add("control p99 idle", percentile(idle, 0.99), "ms")
    report.add("control p99 under bulk", percentile(busy, 0.99), "ms", "control p99 idle")


def _lookup_of(client: Client) -> Callable[[], object]:
    keys = Keys("control").take(BATCH)
    for _ in range(50):
        client.lookup(keys)
    return lambda: client.lookup(keys)


class _Load:
    """Child process of the client that stores and loads."""

    def __init__(self, endpoint: str) -> None:
        command = [sys.executable, "-m", "bench.streams", endpoint]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the client that stores and loads has ended early")

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)


def _move(endpoint: str) -> None:
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    keys, source, target = Keys(f"load {os.getpid()}"), Pool(Pool.allocate(seed=1), BLOCK_BYTES), bytearray(BLOCK_BYTES)
    with connect(endpoint, "grpc", BLOCK_BYTES) as client:
        number = 0
        while not ended.is_set():
            batch = keys.take(BATCH)
            client.store(batch, source.buffers(number % source.batches))
            client.load(batch, [target] * BATCH)
            number += 1
            if number == 3:  # the client has found the bulk process by now
                print("moving", flush=True)


if __name__ == "__main__":
    _move(sys.argv[1])
