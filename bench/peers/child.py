"""Driver of one peer in its own process: `python -m bench.peers.child MODULE:CLASS`.

Commands are lines of JSON on standard input. Answers are lines of JSON on the original standard
output. Output of the peer's libraries goes to standard error. When its standard input is closed,
the process ends all processes that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import itertools
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from .base import Blocks, Peer, PeerFailed, PeerMissing

__all__ = ["Player", "main", "serve"]

BATCH = 64
PATIENCE = 5.0
"""Maximum seconds until lookups find a stored block."""


class Player:
    """Commands of the parent process: each public method is one."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._series = itertools.count()
        self._stored: dict[int, Any] = {}

    def start(self, directory: str, capacity_bytes: int, pool_bytes: int, apart_bytes: int) -> dict[str, Any]:
        """Returns the seconds until the server answered, and its processes.

        The source pool has `pool_bytes` random bytes, the destination pool as many zeros. Between
        the store of a batch and its load, other batches with `apart_bytes` in total are stored.
        `pool_bytes` and `apart_bytes` are larger than the processor's caches.
        """
        self._source = np.random.default_rng(1).integers(0, 256, pool_bytes, np.uint8)
        self._target = np.full(pool_bytes, 0, np.uint8)
        self._apart = apart_bytes
        seconds = _timed(self._peer.start, Path(directory), capacity_bytes)
        version = getattr(self._peer, "version", None)
        found = version() if version is not None else None
        return {"seconds": seconds, "processes": list(self._peer.processes()), "version": found}

    def open(self, block_bytes: int, fill_bytes: int, count: int = BATCH) -> dict[str, Any]:
        """Connects for batches of `count` blocks; stores `fill_bytes` to touch the memory."""
        self._peer.open(block_bytes, [self._source, self._target])
        self._sources, self._targets = (_batches(pool, block_bytes, count) for pool in (self._source, self._target))
        self._count, self._nbytes = count, count * block_bytes
        self._stored.clear()
        for _ in range(max(self._apart, fill_bytes) // self._nbytes + 1):
            self._store()
            if self._apart < len(self._stored) * self._nbytes:
                self._drop_oldest()
        return {}

    def round(self) -> dict[str, Any]:
        """Copies, stores and loads a batch, and compares all bytes; returns the seconds."""
        copied = self._copy()
        stored = self._store()
        return {"memcpy": copied, "store": stored, "load": self._load_oldest(), "bytes": self._nbytes}

    def prepare_lookups(self, block_bytes: int, most: int, unknown: int) -> dict[str, Any]:
        """Stores the blocks for lookups, and makes names of unknown blocks."""
        self._peer.open(block_bytes, [self._source, self._target])
        self._stored.clear()
        self._known = _keys("lookup", most)
        memory = self._source[: most * block_bytes].reshape(most, block_bytes)
        names = self._peer.names(self._known)
        self._peer.store(names, Blocks.of(memory))
        self._peer.settle()
        self._unknown = [self._peer.names(_keys(f"unknown {number}", unknown)) for number in range(3)]
        self._wait_for(names, most)
        return {}

    def hits(self, count: int, times: int) -> dict[str, Any]:
        """Looks up present keys; returns the seconds of each call."""
        names = self._peer.names(self._known[:count])
        return {"seconds": [self._look_up(names, count) for _ in range(times)]}

    def misses(self, times: int) -> dict[str, Any]:
        """Looks up missing keys; returns the seconds of each call."""
        return {"seconds": [self._look_up(self._unknown[number % 3], 0) for number in range(times)]}

    def stop(self) -> dict[str, Any]:
        self._peer.stop()
        return {}

    def _copy(self) -> float:
        number = next(self._series)
        to, start = (pools[number % len(pools)].arrays for pools in (self._targets, self._sources))
        whole = [
            np.lib.stride_tricks.as_strided(rows[0], (self._count, rows[0].nbytes), (2 * rows[0].nbytes, 1))
            for rows in (to, start)
        ]
        seconds = _timed(np.copyto, *whole)
        whole[0].fill(0)
        return seconds

    def _store(self) -> float:
        number = next(self._series)
        names = self._stored[number] = self._peer.names(_keys(f"{self._nbytes} {number}", self._count))
        seconds = _timed(self._peer.store, names, self._sources[number % len(self._sources)])
        self._peer.settle()
        return seconds

    def _load_oldest(self) -> float:
        number, names = next(iter(self._stored.items()))
        blocks, expected = (pools[number % len(pools)] for pools in (self._targets, self._sources))
        seconds = _timed(self._peer.load, names, blocks)
        self._peer.settle()
        for place, (got, wanted) in enumerate(zip(blocks.arrays, expected.arrays, strict=True)):
            if not np.array_equal(got, wanted):
                raise PeerFailed(f"block {place} differs from the stored bytes")
            got.fill(0)
        self._drop_oldest()
        return seconds

    def _drop_oldest(self) -> None:
        self._peer.drop(self._stored.pop(next(iter(self._stored))))

    def _wait_for(self, names: Any, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while (found := self._peer.lookup(names)) != count:
            self._peer.settle()
            if time.monotonic() > deadline:
                raise PeerFailed(f"{found} of {count} keys were found")
        self._peer.settle()

    def _look_up(self, names: Any, expected: int) -> float:
        began = time.perf_counter()
        found = self._peer.lookup(names)
        seconds = time.perf_counter() - began
        self._peer.settle()
        if found != expected:
            raise PeerFailed(f"{found} keys hit instead of {expected}")
        return seconds


def serve(player: Player, commands: TextIO, answers: TextIO) -> None:
    """Answers commands until the input ends. An exception is sent as an answer."""
    for line in commands:
        command = json.loads(line)
        what: Callable[..., dict[str, Any]] = getattr(player, command.pop("do"))
        try:
            answer = what(**command)
        except PeerMissing as error:
            answer = {"absent": str(error)}
        except Exception as error:  # noqa: BLE001 - any error of a peer is an answer
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.child")
    parser.add_argument("peer", help="MODULE:CLASS")
    parser.add_argument("--isolated", action="store_true", help="set up loopback of a new network namespace")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if options.isolated:
        _loopback_up()
    module, _, name = options.peer.partition(":")
    try:
        peer = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        print(json.dumps({"absent": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({}), file=answers, flush=True)
    try:
        serve(Player(peer), sys.stdin, answers)
    finally:
        # Ends the process even if threads of libraries still run.
        with contextlib.suppress(Exception):
            peer.stop()


def _timed(action: Callable[..., object], *arguments: Any) -> float:
    began = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began


def _keys(series: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{series} {number}".encode()).digest() for number in range(count)]


def _batches(pool: NDArray[np.uint8], block_bytes: int, count: int) -> list[Blocks]:
    """Returns batches of every second block, so that no two blocks of a batch are adjacent."""
    rows = pool.reshape(-1, block_bytes)
    pairs = len(rows) // (2 * count)
    return [
        Blocks.of(rows[2 * count * pair + odd : 2 * count * (pair + 1) : 2]) for pair in range(pairs) for odd in (0, 1)
    ]


def _loopback_up() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, get_flags, request))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


if __name__ == "__main__":
    main()
