"""Benchmark of the tier `valkey`: `python -m bench.remote [--program NAME] [--json FILE]`.

The tier `valkey` stores and loads blocks at a Redis or Valkey server of this machine, alternating
with the client libraries of the same server, with LMCache's adapters for it and with bare TCP. The
programs share the processors, so the ratios matter and not the rates. A library that is not
installed has no row.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.redis_server import RedisServer

from kvtier.cuda.host.memory import tune_malloc
from kvtier.cuda.host.region import HostRegion
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.valkey import ValkeyTier
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome

from .bare_sockets import BareSockets
from .machine import facts
from .measure import interleave, rate, timed
from .remote_lmcache import LMCacheAdapters, add_ratios
from .report import Report

__all__ = ["main"]

SIZES = {2 << 20: 32, 64 << 10: 256}
"""Sizes of blocks, and how many a job has."""
ROUNDS = 9
WINDOW_BYTES = 16 << 20
"""Most bytes of one call of a library, as in the tier."""
DEADLINE_SECONDS = 30.0
SPACE = NamespaceId(bytes(32))


class _Tier:
    """The tier, with one job, or with as many at the same time as it permits."""

    def __init__(self, port: int, *, parallel: bool) -> None:
        limits = RemoteLimits(deadline_seconds=DEADLINE_SECONDS)
        self._tier = ValkeyTier("far", 1 << 30, url=f"valkey://127.0.0.1:{port}", limits=limits)
        self._threads = ThreadPoolExecutor(max(self._tier.parallel_stores, self._tier.parallel_loads))
        self._parallel = parallel

    def store(self, names: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        self._run(self._tier.store, self._tier.parallel_stores, names, slots)

    def load(self, names: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        self._run(self._tier.load, self._tier.parallel_loads, names, slots)

    def close(self) -> None:
        self._threads.shutdown()
        self._tier.close()

    def _run(
        self,
        move: Callable[[Sequence[BlockBytes]], list[Outcome]],
        permitted: int,
        names: Sequence[bytes],
        slots: Sequence[memoryview],
    ) -> None:
        blocks = [BlockBytes(SPACE, name, (slot,)) for name, slot in zip(names, slots, strict=True)]
        jobs = permitted if self._parallel else 1
        for outcomes in self._threads.map(move, [blocks[job::jobs] for job in range(jobs)]):
            if set(outcomes) != {Outcome.DONE}:
                raise RuntimeError(f"the tier: {self._tier.last_error}")


class _Glide:
    """The library valkey-glide-sync, without checksums."""

    def __init__(self, port: int) -> None:
        self._glide: Any = importlib.import_module("glide_sync")
        self._glide.Logger.init(self._glide.LogLevel.OFF)
        address = self._glide.NodeAddress("127.0.0.1", port)
        settings = self._glide.GlideClientConfiguration([address], request_timeout=round(DEADLINE_SECONDS * 1e3))
        self._client = self._glide.GlideClient.create(settings)

    def store(self, names: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        for some, values in _windows(names, slots):
            batch = self._glide.Batch(is_atomic=False)
            for name, value in zip(some, values, strict=True):
                batch.custom_command([b"SET", name, value])
            self._client.exec(batch, raise_on_error=True)

    def load(self, names: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        for some, values in _windows(names, slots):
            sizes = self._client.mget(list(some), buffers=list(values))
            if None in sizes or list(map(int, sizes)) != [value.nbytes for value in values]:
                raise RuntimeError("valkey-glide-sync: a value is missing")

    def close(self) -> None:
        self._client.close()


class _RedisPy:
    """The library redis-py, with hiredis if it is installed, without checksums."""

    def __init__(self, port: int) -> None:
        self._client: Any = importlib.import_module("redis").Redis(port=port)

    def store(self, names: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        for some, values in _windows(names, slots):
            self._client.mset(dict(zip(some, values, strict=True)))

    def load(self, names: Sequence[bytes], slots: Sequence[memoryview]) -> None:
        for some, values in _windows(names, slots):
            for value, found in zip(values, self._client.mget(list(some)), strict=True):
                value[:] = found

    def close(self) -> None:
        self._client.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.remote", description="Measure the tier valkey.")
    parser.add_argument("--program", default="valkey-server", choices=("valkey-server", "redis-server"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    tune_malloc()
    sys.setswitchinterval(1e-4)  # as in the server
    report = Report()
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory,
        _server(options.program, Path(directory)) as server,
    ):
        port = server.port
        about = facts(Path(directory)) | {"store": _info(server)}
        adapters: list[dict[str, Any]] = [
            {"type": "resp", "host": "127.0.0.1", "port": port},
            {"type": "valkey", "startup_nodes": f"127.0.0.1:{port}"},
        ]
        lmcache = LMCacheAdapters(Path(directory), adapters)
        for block_bytes, count in SIZES.items():
            _measure(report, server, block_bytes, count, lmcache)
        about["peer"] = lmcache.version
        about["load"] += f", {os.getloadavg()[0]:.1f} at the end"
    report.show(about)
    lmcache.show_missing()
    if options.json:
        report.write_json(options.json, about)


def _measure(report: Report, server: RedisServer, block_bytes: int, count: int, lmcache: LMCacheAdapters) -> None:
    total = block_bytes * count
    clients = _clients(server.port)
    with HostRegion.create(2 * total) as region, BareSockets() as bare:
        region.back(0, 2 * total)
        region.memory[:total] = random.Random(1).randbytes(total)
        slots = [region.memory[at : at + block_bytes] for at in range(0, 2 * total, block_bytes)]
        sources, targets = slots[:count], slots[count:]

        def names(client: str, number: int) -> list[bytes]:
            return [f"{client}-{block_bytes}-{number}-{place}".encode() for place in range(count)]

        def store(client: str, number: int) -> float:
            _flush(server)
            return timed(clients[client].store, names(client, number), sources)

        def load(client: str, number: int) -> float:
            targets[-1][:8] = bytes(8)
            seconds = timed(clients[client].load, names(client, number), targets)
            if targets[-1] != sources[-1] or targets[0] != sources[0]:
                raise RuntimeError(f"{client}: wrong bytes")
            return seconds

        actions: dict[str, Callable[[int], float]] = {
            "store: bare TCP": lambda _: timed(bare.push, total),
            "load: bare TCP": lambda _: timed(bare.pull, total),
        }
        for client in clients:
            actions[f"store: {client}"] = lambda number, client=client: store(client, number)  # type: ignore[misc]
            actions[f"load: {client}"] = lambda number, client=client: load(client, number)  # type: ignore[misc]
        with lmcache.running(block_bytes, count, lambda: _flush(server)) as of_lmcache:
            seconds = interleave(ROUNDS, actions | of_lmcache)
        for views in (slots, sources, targets):
            views.clear()
    for client in clients.values():
        client.close()
    size = f"{block_bytes >> 20} MiB" if block_bytes >= 1 << 20 else f"{block_bytes >> 10} KiB"
    for name, times in seconds.items():
        limit = f"{name.partition(':')[0]}: bare TCP, {size}"
        report.add(f"{name}, {size}", rate(total, times), "GB/s", None if "bare" in name else limit)
    for tier in ("tier", "tier, parallel jobs"):
        add_ratios(report, seconds, tier, size)


def _clients(port: int) -> dict[str, Any]:
    clients: dict[str, Any] = {"tier": _Tier(port, parallel=False), "tier, parallel jobs": _Tier(port, parallel=True)}
    for name, package, client in (("valkey-glide-sync", "glide_sync", _Glide), ("redis-py", "redis", _RedisPy)):
        if importlib.util.find_spec(package):
            clients[name] = client(port)
        else:
            print(f"{name}: not installed")
    return clients


def _windows(
    names: Sequence[bytes], slots: Sequence[memoryview]
) -> Iterator[tuple[Sequence[bytes], Sequence[memoryview]]]:
    step = WINDOW_BYTES // slots[0].nbytes
    for start in range(0, len(names), step):
        yield names[start : start + step], slots[start : start + step]


@contextmanager
def _server(name: str, directory: Path) -> Iterator[RedisServer]:
    """Runs the program of REDIS_DIR (Debian's), of a package, or an installed one."""
    debian = Path(os.environ.get("REDIS_DIR", "/nowhere"), "usr/bin", name)
    server = RedisServer(directory, program=str(debian) if debian.exists() else name)
    server.start()
    try:
        yield server
    finally:
        server.end()


def _flush(server: RedisServer) -> None:
    server.command("FLUSHALL", "SYNC")


def _info(server: RedisServer) -> str:
    """Returns name and version of the server."""
    values = dict(line.split(":", 1) for line in server.command("INFO", "server").decode().splitlines() if ":" in line)
    return f"{values.get('server_name', 'redis')} {values.get('valkey_version', values.get('redis_version'))}"


if __name__ == "__main__":
    main()
