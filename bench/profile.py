"""Profile of a store and a load: how long each part takes (`python -m bench --profile`).

A wrapper of the client's transport measures each effect (call, copy, stream). The time of the
server's handlers comes from its histogram of call durations.
"""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash
from prometheus_client.parser import text_string_to_metric_families

from kvtier.client import Client, StoreStatus
from kvtier.client.effects import Call, Connect, Copy, Effect, Pull, Push, Transport

from .measure import timed
from .peers.base import free_port
from .pool import BATCH, Pool
from .report import Report, Row
from .service import Service
from .workload import SIZES, Keys, batch_name, connect

__all__ = ["SHARES", "Timings", "Watched", "measure_profile"]

REGION_BYTES = 1 << 30
ROUNDS = 25
SHARES = ("rpc", "decision", "copy", "checksum", "wait", "client")
"""The parts of a store or load.

rpc: calls and streams, without the parts below. decision: the server's handlers. copy: copies to or
from slots. checksum: hashing on one side, measured separately. wait: waiting for a session. client:
the remaining time, which is Python code of the client.
"""


@dataclass(slots=True)
class Timings:
    """Seconds of one store or load, by kind of effect."""

    calls: float = 0.0
    streams: float = 0.0
    copy: float = 0.0
    wait: float = 0.0
    methods: list[str] = field(default_factory=list)


class Watched:
    """Transport that measures the duration of each effect."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.timings = Timings()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def perform(self, effect: Effect) -> Any:
        """Performs an effect and records its duration."""
        began = time.perf_counter()
        try:
            return self._transport.perform(effect)
        finally:
            self._note(effect, time.perf_counter() - began)

    def _note(self, effect: Effect, seconds: float) -> None:
        match effect:
            case Call(method):
                self.timings.calls += seconds
                self.timings.methods.append(method)
            case Push() | Pull():
                self.timings.streams += seconds
            case Copy():
                self.timings.copy += seconds
            case Connect():
                self.timings.wait += seconds


def measure_profile(report: Report, directory: Path) -> None:
    """Adds a row per part: microseconds, and the fraction of the total time."""
    source, target = Pool.allocate(seed=1), Pool.allocate(seed=None)
    metrics = f"127.0.0.1:{free_port()}"
    with Service(directory, REGION_BYTES, config=f'metrics = "{metrics}"') as service:
        service.start()
        for transport, endpoint in (("shm", service.unix), ("grpc", service.tcp)):
            for block_bytes in SIZES:
                with connect(endpoint, transport, block_bytes) as client:
                    _profile(report, metrics, client, Pool(source, block_bytes), Pool(target, block_bytes), transport)


def _profile(
    report: Report, metrics: str, client: Client, source: Pool, target: Pool, transport: Literal["shm", "grpc"]
) -> None:
    watched = Watched(client._transport)
    client._transport = watched
    keys, stored = Keys(f"profile {transport} {source.block_bytes}"), []
    checksum = _checksum_seconds(source) if transport == "grpc" else 0.0
    for action in ("store", "load"):
        rounds = []
        for number in range(ROUNDS):
            before, watched.timings = _handler_seconds(metrics), Timings()
            if action == "store":
                names = keys.take(BATCH)
                stored.append(names)
                seconds = timed(_store, client, names, source.buffers(number))
            else:
                seconds = timed(_load, client, stored[-1], target.buffers(number))
            decided = _decided(before, _handler_seconds(metrics), watched.timings.methods)
            rounds.append(_parts(seconds, watched.timings, decided, checksum))
        _add(report, batch_name(f"{transport} {action}", source.block_bytes), rounds[3:])


def _store(client: Client, names: list[bytes], buffers: list[memoryview]) -> None:
    if client.store(names, buffers).count(StoreStatus.GRANTED) != BATCH:
        raise RuntimeError("not all blocks were stored")


def _load(client: Client, names: list[bytes], buffers: list[memoryview]) -> None:
    if client.load(names, buffers) != BATCH:
        raise RuntimeError("not all blocks were loaded")


def _parts(seconds: float, timings: Timings, decided: float, checksum: float) -> dict[str, float]:
    decision = min(decided, timings.calls)
    known = timings.calls + timings.streams + timings.copy + timings.wait
    return {
        "rpc": timings.calls - decision + max(timings.streams - checksum, 0.0),
        "decision": decision,
        "copy": timings.copy,
        "checksum": min(checksum, timings.streams),
        "wait": timings.wait,
        "client": max(seconds - known, 0.0),
        "all": seconds,
    }


def _add(report: Report, name: str, rounds: list[dict[str, float]]) -> None:
    middle = {part: statistics.median(one[part] for one in rounds) for part in (*SHARES, "all")}
    report.add(name, middle["all"] * 1e6, "us")
    for part in SHARES:
        report.rows.append(Row(f"{name}: {part}", middle[part] * 1e6, "us", middle[part] / middle["all"], name))


def _checksum_seconds(pool: Pool) -> float:
    return statistics.median(timed(_hash, pool.buffers(number)) for number in range(5))


def _hash(buffers: list[memoryview]) -> None:
    for buffer in buffers:
        xxhash.xxh3_64_intdigest(buffer)


def _decided(before: dict[str, float], after: dict[str, float], methods: list[str]) -> float:
    return sum(after.get(method, 0.0) - before.get(method, 0.0) for method in set(methods))


def _handler_seconds(metrics: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, method, value in _samples(metrics):
        if name == "kvtier_rpc_duration_seconds_sum":
            found[method] = found.get(method, 0.0) + value
    return found


def _samples(metrics: str) -> Iterator[tuple[str, str, float]]:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels.get("method", ""), sample.value
