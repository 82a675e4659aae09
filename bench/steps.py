"""Deterministic cost of the client's calls: function calls, system calls, round trips and memory.

    python -m bench.steps [--check | --write]

A client and a server run in one process, with the server's default settings, and talk over a Unix
socket. Nothing is timed: a busy machine changes the server's figures by a few percent only.
`--check` compares them with `bench/results/steps.json` and exits with 1 if a figure has grown;
`--write` replaces that file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import select
import socket
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from kvtier.client import Client, StoreStatus
from kvtier.server.app import Server
from kvtier.server.config.loader import load
from kvtier.server.telemetry.logs import configure

from .workload import Keys, connect

RESULTS = Path(__file__).parent / "results" / "steps.json"
BLOCK_BYTES = 4096
BATCH, LONG = 64, 8192
REPEATS = 40
"""The smallest figure counts: timers and turns of the server cost steps within some calls."""
START_SECONDS = 60.0
SLACK, SERVER_SLACK, WIDE_SLACK = 1.03, 1.15, 1.20
"""A figure has grown if it exceeds the committed one by this factor and `FEW`. On a busy machine
the server's event loop takes more turns for a call, and the eviction policy moves runs of earlier
calls to other age bins: up to six per call, with six functions each. Wide: for bytes, and for calls
of many slices, where the turns depend on the time."""
FEW = 4

_EXACT = ("round trips", "client: system calls")

Figures = dict[str, float]
T = TypeVar("T")


@dataclass(slots=True)
class Steps:
    """Profile function of a thread; counts what the thread calls."""

    functions: int = 0
    """Calls of Python functions, and resumptions of generators."""
    c_functions: int = 0
    sockets: Counter[str] = field(default_factory=Counter)
    """System calls on sockets, and polls."""
    codes: set[CodeType] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.functions += 1
            self.codes.add(frame.f_code)
        elif event == "c_call":
            self.c_functions += 1
            if isinstance(argument.__self__, _SOCKETS) and argument.__name__ in _SYSTEM_CALLS:
                self.sockets[argument.__name__] += 1

    def figures(self, who: str) -> Figures:
        return {
            f"{who}: function calls": self.functions,
            f"{who}: distinct functions": len(self.codes),
            f"{who}: C calls": self.c_functions,
            f"{who}: system calls": self.sockets.total(),
        }


_SOCKETS = (socket.socket, type(select.poll()))
_SYSTEM_CALLS = frozenset(
    ("send", "sendmsg", "recv_into", "recvmsg", "recvmsg_into", "setsockopt", "getsockopt", "poll")
)
"""Without `recv`: the event loop receives with it what wakes it."""


class LocalServer:
    """A server whose event loop runs in a thread of this process."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"unix:{directory / 'kvtier.sock'}"
        flags = {"listen": self.endpoint, "region_size": 256 << 20, "data_dir": str(directory), "tiers": []}
        config = load(flags | {"insecure": True}, environ={}).config
        configure(config.log, (directory / "server.log").open("w"))
        self._server = Server(config, lambda: None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtier-steps")
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(START_SECONDS)

    def run(self, action: Callable[[], object]) -> None:
        """Runs an action on the event loop, after everything that has arrived there."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        done.wait()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(START_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def measure() -> dict[str, Figures]:
    """Returns the figures of each operation."""
    with tempfile.TemporaryDirectory(prefix="kvtier-steps-") as name:
        server = LocalServer(Path(name))
        try:
            with connect(server.endpoint, "shm", BLOCK_BYTES) as client:
                return {what: _figures(server, act) for what, act in _operations(client).items()}
        finally:
            server.close()


def _operations(client: Client) -> dict[str, Callable[[], object]]:
    new, unknown = Keys("steps"), Keys("unknown")
    block = memoryview(bytearray(BLOCK_BYTES))  # writable, as the memory of engines
    target = memoryview(bytearray(BATCH * BLOCK_BYTES))
    targets = [target[at : at + BLOCK_BYTES] for at in range(0, len(target), BLOCK_BYTES)]
    stored, missing = Keys("stored").take(LONG), unknown.take(LONG)
    while client.store(stored, [block] * LONG).count(StoreStatus.NO_ROOM):
        time.sleep(0.05)  # the server still allocates the region
    # Each repetition stores new keys. They exist before, because hashes are no cost of the client.
    batches = iter([new.take(BATCH) for _ in range(4 * REPEATS)])
    return {
        "store of 64": lambda: client.store(next(batches), [block] * BATCH),
        "load of 64": lambda: client.load(stored[:BATCH], targets),
        "lookup and release of 64 hits": lambda: client.lookup(stored[:BATCH]).release(),
        "lookup of 64 misses": lambda: client.lookup(missing[:BATCH]).release(),
        "lookup and release of 8,192 hits": lambda: client.lookup(stored).release(),
        "lookup of 8,192 misses": lambda: client.lookup(missing).release(),
    }


def _figures(server: LocalServer, act: Callable[[], object]) -> Figures:
    for _ in range(REPEATS):
        act()
    idle = _least([_steps_of(server, lambda: None) for _ in range(REPEATS)])
    busy = _least([_steps_of(server, act) for _ in range(REPEATS)])
    figures = {name: value - idle[name] for name, value in busy.items()}
    return figures | {"memory at the peak, KiB": min(_peak_bytes(act) for _ in range(REPEATS)) // 1024}


def _least(rows: list[Figures]) -> Figures:
    return {name: min(row[name] for row in rows) for name in rows[0]}


def _steps_of(server: LocalServer, act: Callable[[], object]) -> Figures:
    """Counts the steps of one call on both sides, with those of `LocalServer.run`."""
    of_client, of_server = Steps(), Steps()
    with _without_gc():
        server.run(lambda: sys.setprofile(of_server))
        sys.setprofile(of_client)
        try:
            act()
        finally:
            sys.setprofile(None)
            server.run(lambda: sys.setprofile(None))
    trips = {"round trips": of_client.sockets["sendmsg"]}
    return trips | of_client.figures("client") | of_server.figures("server")


def _peak_bytes(act: Callable[[], object]) -> int:
    """Returns how much memory Python objects of both sides take at most during a call."""
    with _without_gc():
        tracemalloc.start()
        try:
            act()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@contextmanager
def _without_gc() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def grown(before: Mapping[str, Figures], now: Mapping[str, Figures]) -> list[str]:
    """Returns a line for each figure that is larger than before, or that only one side has."""
    lines: list[str] = []
    for what, old, new in _both(before, now, {}):
        for name, earlier, value in _both(old, new, None):
            wide = name.endswith("KiB") or (f"{LONG:,}" in what and name.startswith("server"))
            slack = WIDE_SLACK if wide else SERVER_SLACK if name.startswith("server") else SLACK
            most = 0 if earlier is None else earlier * slack + FEW
            if name in _EXACT and earlier is not None:
                most = earlier
            if earlier is None or value is None or value > most:
                lines.append(f"{what}, {name}: {earlier} before, {value} now")
    return lines


def _both(before: Mapping[str, T], now: Mapping[str, T], absent: T) -> Iterator[tuple[str, T, T]]:
    for name in sorted(before.keys() | now.keys()):
        yield name, before.get(name, absent), now.get(name, absent)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description="Count the steps of the client's calls.")
    parser.add_argument("--check", action="store_true", help=f"fail if a figure exceeds that of {RESULTS.name}")
    parser.add_argument("--write", action="store_true", help=f"replace {RESULTS.name}")
    options = parser.parse_args()
    version = ".".join(map(str, sys.version_info[:2]))
    if options.check and (compared := json.loads(RESULTS.read_text())["python"]) != version:
        print(f"not compared: {RESULTS.name} is of Python {compared}, this is {version}")
        return 0
    now = measure()
    if options.write:
        RESULTS.write_text(json.dumps({"python": version, "operations": now}, indent=1) + "\n")
    if options.check:
        lines = grown(json.loads(RESULTS.read_text())["operations"], now)
        print("\n".join(lines or ["no operation needs more steps than before"]))
        return 1 if lines else 0
    for what, figures in now.items():
        print(what, *(f"  {name}: {value:g}" for name, value in figures.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
