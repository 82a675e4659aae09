"""Benchmark of the disk tier, compared with raw O_DIRECT reads and writes.

Tier and raw calls transfer the same number of bytes with the same number of calls in flight.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kvtier.cuda.host.region import HostRegion
from kvtier.tiers.disk.slabs import IO_THREADS
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome

from .measure import interleave, rate
from .measure import timed as seconds_of
from .report import Report

__all__ = ["measure_disk"]

SIZES = (64 << 10, 2 << 20)
ROUND_BYTES = 64 << 20
ROUNDS = 18
TIER_BYTES = 1 << 30
SPACE = NamespaceId(bytes(32))


def measure_disk(report: Report, directory: Path) -> None:
    """Adds the rows of a full tier with random eviction and loads."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # as in the server
    with HostRegion.create(ROUND_BYTES) as region:
        region.back(0, ROUND_BYTES)
        region.memory[:] = random.Random(1).randbytes(ROUND_BYTES)
        for durability in ("process", "power"):
            for block_bytes in SIZES:
                folder = directory / f"{durability}-{block_bytes}"
                folder.mkdir()
                slots = [region.memory[at : at + block_bytes] for at in range(0, ROUND_BYTES, block_bytes)]
                _measure(report, folder, slots, durability)
                slots.clear()
                shutil.rmtree(folder)
    sys.setswitchinterval(interval)


def _measure(
    report: Report, directory: Path, slots: Sequence[memoryview], durability: Literal["process", "power"]
) -> None:
    size = f"{slots[0].nbytes >> 20} MiB" if slots[0].nbytes >= 1 << 20 else f"{slots[0].nbytes >> 10} KiB"
    with _opened(directory, slots, durability) as (tier, raw):
        seconds = interleave(
            ROUNDS,
            {
                f"raw O_DIRECT write, {size}, {durability}": lambda _: raw.move(os.pwritev),
                f"disk tier store, {size}, {durability}": lambda _: tier.store(),
                f"raw O_DIRECT read, {size}": lambda _: raw.move(os.preadv),
                f"disk tier load, {size}": lambda _: tier.load(),
            },
        )
    limit = None
    for number, (name, times) in enumerate(seconds.items()):
        if number < 2 or durability == "process":
            limit = name if number % 2 == 0 else limit
            report.add(name, rate(ROUND_BYTES, times), "GB/s", limit if number % 2 else None)


class _Tier:
    """A disk tier that is always full."""

    def __init__(self, directory: Path, slots: Sequence[memoryview], durability: Literal["process", "power"]) -> None:
        self.tier = DiskTier("disk", directory, TIER_BYTES, durability)
        self._slots = slots
        self._source = random.Random(2)
        self._held: list[bytes] = []
        self._count = 0
        while (len(self._held) + len(slots)) * slots[0].nbytes <= self.tier.capacity_bytes:
            self._store()

    def store(self) -> float:
        """Removes random blocks and stores as many new ones; returns the seconds of the store."""
        self._source.shuffle(self._held)
        gone = [self._held.pop() for _ in self._slots]
        self.tier.remove([(SPACE, key) for key in gone])
        return self._store()

    def load(self) -> float:
        """Loads a round of blocks; returns the seconds."""
        blocks = self._blocks(self._source.sample(self._held, len(self._slots)))
        return seconds_of(self._do, self.tier.load, blocks)

    def _store(self) -> float:
        keys = [b"%d" % number for number in range(self._count, self._count + len(self._slots))]
        self._count += len(keys)
        self._held += keys
        return seconds_of(self._do, self.tier.store, self._blocks(keys))

    def _blocks(self, keys: Sequence[bytes]) -> list[BlockBytes]:
        return [BlockBytes(SPACE, key, (slot,)) for key, slot in zip(keys, self._slots, strict=True)]

    def _do(self, move: Callable[[Sequence[BlockBytes]], list[Outcome]], blocks: Sequence[BlockBytes]) -> None:
        if set(move(blocks)) != {Outcome.DONE}:
            raise RuntimeError(f"the disk tier: {self.tier.last_error}")


class _Raw:
    """File of the tier's size. Each call reads or writes one block at a random offset."""

    def __init__(self, path: Path, slots: Sequence[memoryview], *, sync: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._slots = slots
        self._sync = sync
        self._source = random.Random(3)
        self._threads = ThreadPoolExecutor(IO_THREADS)
        os.posix_fallocate(self._fd, 0, TIER_BYTES)
        for at in range(0, TIER_BYTES, ROUND_BYTES):
            os.pwritev(self._fd, slots, at)

    def move(self, call: Callable[[int, list[memoryview], int], int]) -> float:
        """Makes one read or write per slot; returns the seconds."""
        nbytes = self._slots[0].nbytes
        places = [at * nbytes for at in self._source.sample(range(TIER_BYTES // nbytes), len(self._slots))]

        def share(first: int) -> None:
            for slot, place in zip(self._slots[first::IO_THREADS], places[first::IO_THREADS], strict=True):
                if call(self._fd, [slot], place) != nbytes:
                    raise RuntimeError("a read or write was short")

        def everything() -> None:
            list(self._threads.map(share, range(IO_THREADS)))
            if self._sync and call is os.pwritev:
                os.fdatasync(self._fd)

        return seconds_of(everything)

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._fd)


@contextmanager
def _opened(
    directory: Path, slots: Sequence[memoryview], durability: Literal["process", "power"]
) -> Iterator[tuple[_Tier, _Raw]]:
    raw = _Raw(directory / "raw", slots, sync=durability == "power")
    tier = _Tier(directory / "tier", slots, durability)
    yield tier, raw
    tier.tier.close()
    raw.close()
