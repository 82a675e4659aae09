"""Benchmark of single calls as an engine makes them: default policy, pauses, other sessions.

Each arm has its own engine process and its own server. In a round each arm makes each call once,
in turns, after a pause. The limits are memcpy in an engine process, and the minimal server.
KVTIER_BENCH_BESIDE is the directory of another tree, which then is one more arm.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from .measure import GB, percentile
from .report import Report
from .service import Service
from .workload import SIZES, batch_name

__all__ = ["BESIDE", "measure_calls"]

BESIDE = "KVTIER_BENCH_BESIDE"
ROOT = Path(__file__).resolve().parent.parent

REGION_BYTES = 1 << 30
BATCH, LONG = 64, 8192
SMALL_BYTES = 4096
PAUSES = (0, 2, 20)
"""Milliseconds before each call."""
ROUNDS: Mapping[int, int] = {0: 60, 2: 60, 20: 30}
LAG = 3
"""Rounds between the store and the load of a batch: it has left the caches of the processor."""
SHARE = 0.25
"""Quantile of the rounds that a row has."""
MINIMAL, MEMCPY = "minimal server", "memcpy"

Seconds = dict[tuple[str, str], list[float]]
"""Seconds of the calls, by arm and action."""


class EngineProcess:
    """An engine process of a tree."""

    def __init__(self, kind: str, endpoint: str, block_bytes: int, tree: Path = ROOT) -> None:
        self._arguments = kind, endpoint, block_bytes, tree
        command = [sys.executable, "-m", "bench.engine_process", kind, endpoint, str(block_bytes)]
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, action: str, first: int, count: int) -> float:
        """Returns the seconds of a call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([action, first, count]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine process has ended: {action} of {count} keys")
        return float(line)

    def second(self) -> EngineProcess:
        """Starts another process with a session of its own at the same server."""
        return EngineProcess(*self._arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def measure_calls(report: Report, directory: Path) -> None:
    """Adds stores and loads of each size, and lookups, for each pause between calls."""
    for block_bytes in SIZES:
        with _arms(directory / str(block_bytes), block_bytes) as arms:
            _movement(report, arms, block_bytes)
    with _arms(directory / "lookups", SMALL_BYTES) as arms:
        for engine in arms.values():
            engine.call("store", 0, LONG)
        for pause in PAUSES:
            _lookups(report, arms, pause, f", {pause} ms between calls")
        with _active_sessions(arms):
            _lookups(report, arms, 2, ", beside an active session")


@contextlib.contextmanager
def _arms(directory: Path, block_bytes: int) -> Iterator[dict[str, EngineProcess]]:
    """Starts a server and an engine process per arm."""
    trees = {"kvtier": ROOT}
    if other := os.environ.get(BESIDE):
        trees["kvtier, other tree"] = Path(other)
    with contextlib.ExitStack() as stack:
        arms: dict[str, EngineProcess] = {}
        for name, tree in trees.items():
            folder = directory / name
            folder.mkdir(parents=True)
            service = stack.enter_context(Service(folder, REGION_BYTES, eviction=None, tree=tree))
            service.start()
            arms[name] = stack.enter_context(EngineProcess("kvtier", service.unix, block_bytes, tree))
        arms[MINIMAL] = stack.enter_context(EngineProcess("minimal", "minimal", block_bytes))
        yield arms


@contextlib.contextmanager
def _active_sessions(arms: Mapping[str, EngineProcess]) -> Iterator[None]:
    """Lets a second session look up 64 keys every 5 ms at each server but the minimal one."""
    ended = threading.Event()

    def look_up(engine: EngineProcess) -> None:
        while not ended.wait(0.005):
            engine.call("hits", 0, BATCH)

    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(arms[name].second()) for name in _measured(arms)]
        threads = [threading.Thread(target=look_up, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def _movement(report: Report, arms: Mapping[str, EngineProcess], block_bytes: int) -> None:
    nbytes, rounds = BATCH * block_bytes, _Rounds(arms, BATCH * block_bytes)
    for pause in PAUSES:
        seconds = rounds.run(ROUNDS[pause], pause / 1000)
        suffix = f", {pause} ms between calls"
        memcpy = batch_name(MEMCPY, block_bytes) + suffix
        report.add(memcpy, nbytes / GB / _quantile(seconds[MEMCPY, MEMCPY]), "GB/s")
        for action in ("store", "load"):
            limit = batch_name(f"{MINIMAL} {action}", block_bytes) + suffix
            report.add(limit, nbytes / GB / _quantile(seconds[MINIMAL, action]), "GB/s", memcpy)
            for name in _measured(arms):
                row = batch_name(f"{name} {action}", block_bytes) + suffix
                report.add(row, nbytes / GB / _quantile(seconds[name, action]), "GB/s", limit)


class _Rounds:
    """Rounds of a store of a new batch and a load of an older one, by each arm."""

    def __init__(self, arms: Mapping[str, EngineProcess], nbytes: int) -> None:
        self._arms = arms
        self._most = REGION_BYTES // nbytes
        self._number = self._held = 0

    def run(self, count: int, pause: float) -> Seconds:
        """Returns the seconds of `count` rounds, by arm and action."""
        seconds: Seconds = defaultdict(list)
        while len(seconds[MEMCPY, MEMCPY]) < count:
            if self._held == self._most:  # the policy would evict blocks that are loaded next
                for engine in self._arms.values():
                    engine.call("reset", 0, 0)
                self._held = 0
            took = self._store_and_load(pause)
            if self._held >= LAG:
                for key, value in took.items():
                    seconds[key].append(value)
            self._number, self._held = self._number + 1, self._held + 1
        return seconds

    def _store_and_load(self, pause: float) -> dict[tuple[str, str], float]:
        took = {}
        for action, lag in (("store", 0), ("load", LAG)):
            for name, engine in _in_turns(self._arms, self._number):
                time.sleep(pause)
                if self._held >= lag:
                    took[name, action] = engine.call(action, (self._number - lag) * BATCH, BATCH)
        took[MEMCPY, MEMCPY] = self._arms[MINIMAL].call("memcpy", 0, 0)
        return took


def _lookups(report: Report, arms: Mapping[str, EngineProcess], pause: int, suffix: str) -> None:
    for count in (BATCH, LONG):
        seconds: Seconds = defaultdict(list)
        for turn in range(ROUNDS[pause]):
            for action in ("hits", "misses"):
                for name, engine in _in_turns(arms, turn):
                    time.sleep(pause / 1000)
                    seconds[name, action].append(engine.call(action, 0, count))
            time.sleep(pause / 1000)
            seconds["echo", ""].append(arms[MINIMAL].call("echo", 0, count))
        echo = f"echo of {count:,} keys{suffix}"
        report.add(echo, _quantile(seconds["echo", ""]) * 1e3, "ms")
        for action in ("hits", "misses"):
            for name in (MINIMAL, *_measured(arms)):
                row = f"{name}: lookup and release of {count:,} {action}{suffix}"
                report.add(row, _quantile(seconds[name, action]) * 1e3, "ms", echo)


def _measured(arms: Mapping[str, EngineProcess]) -> list[str]:
    return [name for name in arms if name != MINIMAL]


def _in_turns(arms: Mapping[str, EngineProcess], turn: int) -> list[tuple[str, EngineProcess]]:
    order = list(arms.items())
    turn %= len(order)
    return order[turn:] + order[:turn]


def _quantile(seconds: list[float]) -> float:
    return percentile(seconds, SHARE) / 1e3
