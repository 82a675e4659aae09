"""Benchmark of stores and loads between an engine and the CPU tier, including all calls."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier.client import Client, StoreStatus

from .bare_grpc import BareGrpc
from .bare_sockets import BareSockets
from .certificate import Certificate
from .measure import interleave, rate, timed
from .pool import Pool, copy_blocks
from .report import Report
from .service import Service
from .workload import SIZES, Keys, batch_name, connect

__all__ = ["measure_movement"]

REGION_BYTES = 1 << 30
WORKING_SET_BYTES = 512 << 20
PER_CALLER_BYTES = 32 << 20
MANY_BLOCKS = 1024
"""Blocks in one call of an engine with a long prompt."""
GRPC_BYTES = 1 << 30
"""Maximum number of bytes that a network transport transfers for one row."""
_FOUND_SECONDS = 1.0
"""More than a client needs to find the bulk process."""


def measure_movement(report: Report, directory: Path) -> None:
    """Adds rows for shared memory and for the network transports, and for their limits."""
    source, target = Pool.allocate(seed=1), Pool.allocate(seed=None)
    with Service(directory, REGION_BYTES) as service:
        ready = service.start()
        for block_bytes in SIZES:
            with connect(service.unix, "shm", block_bytes) as client:
                batches = _Batches(client, Pool(source, block_bytes), Pool(target, block_bytes))
                _shared_memory(report, batches)
        with connect(service.unix, "shm", SIZES[0]) as client:
            pools = (Pool(memory, SIZES[0], MANY_BLOCKS) for memory in (source, target))
            _shared_memory(report, _Batches(client, *pools, series="many"), callers=1)
        _network(report, service, source, target)
        report.add("server: start to first answer", ready, "s")
        report.add("server: memory of its own", service.memory_bytes() / 2**20, "MiB")
    certificate = Certificate.write(directory)
    (directory / "tls").mkdir()
    with Service(directory / "tls", REGION_BYTES, certificate=certificate) as service:
        service.start()
        _network(report, service, source, target, certificate)


class _Batches:
    """Blocks of one size: each round stores a new batch and loads an older one."""

    def __init__(self, client: Client, source: Pool, target: Pool, *, series: str = "", part: int = 1) -> None:
        """`series` names the keys; `part` is the number of series that share the CPU tier."""
        self._client = client
        self._callers = ThreadPoolExecutor(2)
        self._source = source
        self._target = target
        self._keys = Keys(f"movement {series} {source.block_bytes}")
        self._sources = [source.buffers(number) for number in range(source.batches)]
        self._targets = [target.buffers(number) for number in range(target.batches)]
        self._stored: dict[int, list[bytes]] = {}
        self._next = itertools.count()
        self.block_bytes = source.block_bytes
        self.blocks = source.blocks
        self.nbytes = self.blocks * source.block_bytes
        self.lag = max(1, WORKING_SET_BYTES // part // self.nbytes - 1)
        """Rounds between store and load: enough for the bytes to leave the caches."""
        self.per_caller = min(8, max(2, PER_CALLER_BYTES // self.nbytes))
        """Batches per caller in a round: enough that both threads run at the same time."""

    def copy(self, number: int) -> float:
        """Copies a batch within this process."""
        number += self._source.batches // 2  # the next store's batch must not be in a cache
        to, start = self._target.batch(number), self._source.batch(number)
        return timed(copy_blocks, to, start)

    def store(self, _: int) -> float:
        """Stores a batch under new keys."""
        number = next(self._next)
        keys = self._stored[number] = self._keys.take(self.blocks)
        buffers = self._sources[number % len(self._sources)]
        statuses: list[bytes] = []
        seconds = timed(lambda: statuses.append(self._client.store(keys, buffers)))
        if statuses[0].count(StoreStatus.GRANTED) != self.blocks:
            raise RuntimeError(
                f"{statuses[0].count(StoreStatus.GRANTED)} of {self.blocks} blocks of batch {number} were stored"
            )
        return seconds

    def load(self, round_number: int) -> float:
        """Loads the batch that was stored `lag` rounds ago, and compares some of it."""
        number = max(self._stored) - self.lag
        buffers = self._targets[round_number % len(self._targets)]
        keys = self._stored[number]
        loaded: list[int] = []
        seconds = timed(lambda: loaded.append(self._client.load(keys, buffers)))
        if loaded != [self.blocks]:
            raise RuntimeError(f"{loaded[0]} of {self.blocks} blocks of batch {number} were loaded")
        self._compare(number, round_number)
        return seconds

    def both(self, one: Callable[[int], None]) -> float:
        """Runs `one` in two threads; returns the seconds per batch."""
        start = threading.Barrier(2)

        def run(caller: int) -> None:
            start.wait()
            one(caller)

        return timed(lambda: list(self._callers.map(run, range(2)))) / (2 * self.per_caller)

    def copy_both(self, number: int) -> float:
        number += self._source.batches // 2
        places = range(number, number + 2 * self.per_caller)

        def copy(caller: int) -> None:
            for place in places[caller::2]:
                copy_blocks(self._target.batch(place), self._source.batch(place))

        return self.both(copy)

    def store_both(self, _: int) -> float:
        """Stores batches with two threads of one client."""
        numbers = [next(self._next) for _ in range(2 * self.per_caller)]
        for number in numbers:
            self._stored[number] = self._keys.take(self.blocks)

        def store(caller: int) -> None:
            for number in numbers[caller::2]:
                buffers = self._sources[number % len(self._sources)]
                if self._client.store(self._stored[number], buffers).count(StoreStatus.GRANTED) != self.blocks:
                    raise RuntimeError(f"not all blocks of batch {number} were stored")

        return self.both(store)

    def load_both(self, round_number: int) -> float:
        """Loads batches with two threads of one client, and compares some of them."""
        count = 2 * self.per_caller
        oldest = max(self._stored) - self.lag
        pairs = [(oldest + place % self.lag, round_number * count + place) for place in range(count)]

        def load(caller: int) -> None:
            for number, place in pairs[caller::2]:
                if self._client.load(self._stored[number], self._targets[place % len(self._targets)]) != self.blocks:
                    raise RuntimeError(f"not all blocks of batch {number} were loaded")

        seconds = self.both(load)
        latest = {place % len(self._targets): (number, place) for number, place in pairs}
        for number, place in latest.values():
            self._compare(number, place)
        return seconds

    def _compare(self, number: int, round_number: int) -> None:
        got, expected = self._target.batch(round_number), self._source.batch(number)
        for block in {0, round_number % self.blocks, self.blocks - 1}:
            if not np.array_equal(got[block], expected[block]):
                raise RuntimeError(f"block {block} of batch {number} differs from the stored bytes")
            got[block][:64] = 0

    def warm_up(self, nbytes: int) -> None:
        """Stores enough batches for `load`, and maps all pages of the region in this process."""
        for _ in range(max(self.lag + 1, nbytes // self.nbytes)):
            self.store(0)
        for number in range(len(self._targets)):
            self.load(number)

    def rounds(self, nbytes: int) -> int:
        """Returns the number of rounds that transfer `nbytes`, but at least 9 and at most 200."""
        return min(max(nbytes // self.nbytes, 9), 200)


def _shared_memory(report: Report, batches: _Batches, callers: int = 2) -> None:
    batches.warm_up(REGION_BYTES)
    actions: dict[str, Callable[[int], float]] = {
        "memcpy": batches.copy,
        "shm store": batches.store,
        "shm load": batches.load,
    }
    if callers == 2:
        actions |= {
            "memcpy, 2 threads": batches.copy_both,
            "shm store, 2 callers": batches.store_both,
            "shm load, 2 callers": batches.load_both,
        }
    seconds = interleave(batches.rounds(3 << 30), actions)
    memcpy = batch_name("memcpy", batches.block_bytes, batches.blocks)
    report.add(memcpy, rate(batches.nbytes, seconds["memcpy"]), "GB/s")
    for name in list(actions)[1:]:
        row = batch_name(name, batches.block_bytes, batches.blocks)
        report.add(row, rate(batches.nbytes, seconds[name]), "GB/s", memcpy)


def _network(
    report: Report,
    service: Service,
    source: NDArray[np.uint8],
    target: NDArray[np.uint8],
    certificate: Certificate | None = None,
) -> None:
    """Adds the rows of gRPC and of the socket protocol; with a certificate both use TLS."""
    credentials = certificate.credentials if certificate is not None else None
    suffix = "" if certificate is None else "+tls"
    with BareGrpc("127.0.0.1:0", certificate) as bare_grpc, BareSockets(certificate) as bare_sockets:
        for block_bytes in SIZES:
            pools = Pool(source, block_bytes), Pool(target, block_bytes)
            with (
                connect(service.tcp, "grpc", block_bytes, credentials) as grpc_client,
                connect(service.tcp, "tcp", block_bytes, credentials) as tcp_client,
            ):
                # Both have their working sets in one CPU tier.
                ways = {
                    f"{way}{suffix}": _Batches(client, *pools, series=way, part=2)
                    for way, client in (("grpc", grpc_client), ("tcp", tcp_client))
                }
                _interleave_ways(report, ways, suffix, bare_grpc, bare_sockets)


def _interleave_ways(
    report: Report, ways: dict[str, _Batches], suffix: str, bare_grpc: BareGrpc, bare_sockets: BareSockets
) -> None:
    batches = next(iter(ways.values()))
    nbytes, block_bytes = batches.nbytes, batches.block_bytes
    rows: dict[str, dict[str, Callable[[int], float]]] = {
        "store": {
            f"bare grpc{suffix} push": lambda _: timed(bare_grpc.push, nbytes),
            f"bare grpc{suffix} push of memory": lambda _: timed(bare_grpc.push_memory, nbytes),
            f"bare sockets{suffix} push of memory": lambda _: timed(bare_sockets.push, nbytes),
        }
        | {f"{way} store": batches.store for way, batches in ways.items()},
        "load": {
            f"bare grpc{suffix} pull": lambda _: timed(bare_grpc.pull, nbytes),
            f"bare grpc{suffix} pull of memory": lambda _: timed(bare_grpc.pull_memory, nbytes),
            f"bare sockets{suffix} pull of memory": lambda _: timed(bare_sockets.pull, nbytes),
        }
        | {f"{way} load": batches.load for way, batches in ways.items()},
    }
    for each in ways.values():
        each.warm_up(0)
    time.sleep(_FOUND_SECONDS)
    actions = rows["store"] | rows["load"]
    for action in actions.values():
        action(0)
    seconds = interleave(batches.rounds(GRPC_BYTES), actions)
    for names in rows.values():
        grpc_row, _, sockets_row, *_ = (batch_name(name, block_bytes) for name in names)
        for name in names:
            row = batch_name(name, block_bytes)
            limit = batch_name("memcpy", block_bytes) if row == grpc_row else grpc_row
            if name.startswith("tcp"):
                limit = sockets_row
            report.add(row, rate(nbytes, seconds[name]), "GB/s", limit)
