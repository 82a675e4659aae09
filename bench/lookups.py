"""Benchmark of lookups over the Unix socket and over gRPC, compared with bare gRPC calls."""

from __future__ import annotations

from pathlib import Path

from kvtier.client import Client

from .bare_grpc import BareGrpc
from .measure import percentile, timed
from .report import Report
from .service import Service
from .workload import Keys, connect

__all__ = ["measure_lookups"]

COUNTS = {64: 1000, 1024: 400, 8192: 200}
"""Number of keys -> number of lookups."""
BLOCK_BYTES = 4096
KEY_BYTES = 36 + 2
"""Size of a key with its protobuf tag and length."""


def measure_lookups(report: Report, directory: Path) -> None:
    """Adds lookups that hit and lookups that miss, compared with bare calls of the same size."""
    most = max(COUNTS)
    with Service(directory, 4 * most * BLOCK_BYTES) as service, BareGrpc(f"{service.unix}-bare") as bare:
        service.start()
        keys, unknown = Keys("lookups").take(most), Keys("misses").take(most)
        block = memoryview(bytes(BLOCK_BYTES))
        with connect(service.unix, "shm", BLOCK_BYTES) as local, connect(service.unix, "grpc", BLOCK_BYTES) as remote:
            local.store(keys, [block] * most)
            for count, times in COUNTS.items():
                _bare(report, bare, count, times)
                for client, way in ((local, ""), (remote, " over grpc")):
                    _lookups(report, client, f"lookup of hits{way}, {count:,} keys", keys[:count], count, times)
                    _lookups(report, client, f"lookup of misses{way}, {count:,} keys", unknown[:count], 0, times)


def _bare(report: Report, bare: BareGrpc, count: int, times: int) -> None:
    request = bytes(count * KEY_BYTES)
    for _ in range(20):
        bare.echo(request)
    seconds = [timed(bare.echo, request) for _ in range(times)]
    for share in (50, 99):
        report.add(f"bare unary call, {count:,} keys, p{share}", percentile(seconds, share / 100), "ms")


def _lookups(report: Report, client: Client, name: str, keys: list[bytes], hits: int, times: int) -> None:
    for _ in range(20):
        _look_up(client, keys, hits)
    seconds = [_look_up(client, keys, hits) for _ in range(times)]
    report.add(f"{name}, p50", percentile(seconds, 0.5), "ms", f"bare unary call, {len(keys):,} keys, p50")
    # Without a ratio, because the p99 of both calls is mostly noise on a busy machine.
    report.add(f"{name}, p99", percentile(seconds, 0.99), "ms")


def _look_up(client: Client, keys: list[bytes], hits: int) -> float:
    found = []
    seconds = timed(lambda: found.append(client.lookup(keys)))
    lease = found[0]
    if lease.prefix_hits != hits:
        raise RuntimeError(f"{lease.prefix_hits} of {len(keys)} keys were hits instead of {hits}")
    lease.release()
    return seconds
