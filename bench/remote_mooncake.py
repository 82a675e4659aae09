"""Benchmark of the tier `mooncake`, compared with Mooncake's client, LMCache and bare TCP.

    PYTHONPATH=tests python -m bench.remote_mooncake [--json FILE]

It starts a master and a node in a network of their own. Tier and client move the same bytes from
and into the same memory; only the tier has checksums and a process of its own. The wheel of LMCache
has no L2 adapter for Mooncake, so its remote connector is measured. Needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from harness.mooncake_cluster import MASTER, MooncakeCluster
from harness.own_network import own_network
from mooncake.store import MooncakeDistributedStore

from kvtier.cuda.host.memory import tune_malloc
from kvtier.cuda.host.region import HostRegion
from kvtier.tiers.remote.mooncake import MooncakeTier
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.value_codec import name_of
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
"""Most bytes of one call of Mooncake's client, as in the tier."""
DEADLINE_SECONDS = 30.0
SPACE = NamespaceId(bytes(32))
LMCACHE = (
    {"type": "mooncake_store", "local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
    | {"global_segment_size": "0", "master_server_addr": MASTER},
    {
        "url": f"mooncakestore://{MASTER}/",
        "extra_config": {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "global_segment_size": 0,
            "mooncake_master_server_addr": MASTER,
            "transfer_timeout": 30,
        },
    },
)
"""Settings of LMCache's adapter and of its remote connector."""


class _Bare:
    """Mooncake's client in this process."""

    def __init__(self) -> None:
        self._store = MooncakeDistributedStore()
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", MASTER):
            raise RuntimeError("Mooncake's client cannot be set up")

    def store(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int) -> None:
        for start, end in self._windows(len(keys), nbytes):
            sizes = [nbytes] * (end - start)
            if any(self._store.batch_put_from(keys[start:end], addresses[start:end], sizes)):
                raise RuntimeError("Mooncake: a value was not stored")

    def load(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int) -> None:
        for start, end in self._windows(len(keys), nbytes):
            sizes = [nbytes] * (end - start)
            if self._store.batch_get_into(keys[start:end], addresses[start:end], sizes) != sizes:
                raise RuntimeError("Mooncake: a value was not loaded")

    def remove(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(keys, True)

    def close(self) -> None:
        self._store.close()

    @staticmethod
    def _windows(count: int, nbytes: int) -> list[tuple[int, int]]:
        step = WINDOW_BYTES // nbytes
        return [(start, min(count, start + step)) for start in range(0, count, step)]


def _measure(report: Report, bare: _Bare, block_bytes: int, count: int, lmcache: LMCacheAdapters) -> None:
    total = block_bytes * count
    tier = MooncakeTier("far", 1 << 30, master=MASTER, limits=RemoteLimits(deadline_seconds=DEADLINE_SECONDS))
    with HostRegion.create(2 * total) as region, BareSockets() as sockets:
        region.back(0, 2 * total)
        region.memory[:total] = random.Random(1).randbytes(total)
        tier.use_region(region.pools, region.address, region.size_bytes)
        slots = [region.memory[at : at + block_bytes] for at in range(0, 2 * total, block_bytes)]
        places = [region.address + at for at in range(0, 2 * total, block_bytes)]

        def keys(number: int) -> list[bytes]:
            return [f"{block_bytes}-{number}-{place}".encode() for place in range(count)]

        def run(move: Callable[[Sequence[BlockBytes]], list[Outcome]], number: int, first: int) -> float:
            blocks = [BlockBytes(SPACE, key, (slot,)) for key, slot in zip(keys(number), slots[first:], strict=False)]
            outcomes: list[Outcome] = []
            seconds = timed(lambda: outcomes.extend(move(blocks)))
            if set(outcomes) != {Outcome.DONE}:
                raise RuntimeError(f"the tier: {tier.last_error}")
            return seconds

        def check(number: int, seconds: float) -> float:
            if slots[count] != slots[0] or slots[-1] != slots[count - 1]:
                raise RuntimeError("wrong bytes")
            slots[-1][:8] = bytes(8)
            names = [name_of(SPACE, key).decode() for key in keys(number)]
            bare.remove([*names, *_bare_keys(keys(number))])
            return seconds

        actions: dict[str, Callable[[int], float]] = {
            "store: bare TCP": lambda _: timed(sockets.push, total),
            "load: bare TCP": lambda _: timed(sockets.pull, total),
            "store: tier": lambda number: run(tier.store, number, 0),
            "load: tier": lambda number: check(number, run(tier.load, number, count)),
            "store: Mooncake's client": lambda number: timed(
                bare.store, _bare_keys(keys(number)), places[:count], block_bytes
            ),
            "load: Mooncake's client": lambda number: check(
                number, timed(bare.load, _bare_keys(keys(number)), places[count:], block_bytes)
            ),
        }
        with lmcache.running(block_bytes, count) as of_lmcache:
            seconds = interleave(ROUNDS, actions | of_lmcache)
        slots.clear()
    tier.close()
    size = f"{block_bytes >> 20} MiB" if block_bytes >= 1 << 20 else f"{block_bytes >> 10} KiB"
    for name, times in seconds.items():
        limit = f"{name.partition(':')[0]}: bare TCP, {size}"
        report.add(f"{name}, {size}", rate(total, times), "GB/s", None if "bare" in name else limit)
    add_ratios(report, seconds, "tier", size)


def _bare_keys(keys: Sequence[bytes]) -> list[str]:
    return [f"bare/{key.decode()}" for key in keys]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.remote_mooncake", description="Measure the tier mooncake.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    try:
        with own_network():
            pass
    except OSError as error:
        print(f"Mooncake is not measured, because it needs a network of its own: {error}")
        return
    tune_malloc()
    sys.setswitchinterval(1e-4)  # as in the server
    report = Report()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory, own_network():
        cluster = MooncakeCluster(Path(directory), node_bytes=1 << 30)
        try:
            cluster.start()
            bare = _Bare()
            about = facts(Path(directory)) | {"store": f"Mooncake {version('mooncake-transfer-engine-non-cuda')}"}
            lmcache = LMCacheAdapters(Path(directory), LMCACHE)
            for block_bytes, count in SIZES.items():
                _measure(report, bare, block_bytes, count, lmcache)
            about["peer"] = lmcache.version
            bare.close()
        finally:
            cluster.end()
        about["load"] += f", {os.getloadavg()[0]:.1f} at the end"
    report.show(about)
    lmcache.show_missing()
    if options.json:
        report.write_json(options.json, about)


if __name__ == "__main__":
    main()
