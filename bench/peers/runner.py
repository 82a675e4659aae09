"""Runner of the comparison: each peer in turns with kvtier, so that other load affects both."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.service import cpu_seconds_of, memory_bytes_of

from .base import PeerFailed, PeerMissing
from .entries import ENTRIES, ROOT, Entry
from .process import PeerProcess

__all__ = ["Column", "Effort", "compare"]

KVTIER = 2
"""Number of kvtier's entries, which are the first."""
UNKNOWN_KEYS = 8192
HIT_KEYS = (64, 1024)


@dataclass(frozen=True, slots=True)
class Effort:
    """Amount of work: sizes and numbers of rounds."""

    capacity_bytes: int = 640 << 20
    pool_bytes: int = 256 << 20
    apart_bytes: int = 128 << 20
    """See `Player.start`, also for `pool_bytes`."""
    rounds: tuple[tuple[int, int], ...] = ((64 << 10, 60), (256 << 10, 40), (2 << 20, 12))
    """Pairs of block size and number of rounds. Each round copies, stores and loads 64 blocks."""
    lookup_bytes: int = 4096
    lookup_rounds: int = 10
    lookups: int = 20
    """Lookups of present keys per round. There are a quarter as many lookups of missing keys."""
    imports: int = 3
    idle_seconds: float = 2.0
    """Seconds for which the processor time of an idle server is measured."""


@dataclass(slots=True)
class Column:
    """Results of one peer."""

    name: str
    absent: str | None = None
    """Reason why figures are missing; None if no figure is missing."""
    version: str = ""
    ready_seconds: float | None = None
    memory_bytes: int | None = None
    idle_share: float | None = None
    """Fraction of one processor that the idle server uses."""
    packages: int | None = None
    import_seconds: list[float] = field(default_factory=list)
    movement: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """By block size: seconds of memcpy, store and load."""
    lookups: dict[str, list[float]] = field(default_factory=dict)


def compare(directory: Path, effort: Effort, entries: Sequence[Entry] = ENTRIES, kvtier: int = KVTIER) -> list[Column]:
    """Returns a column per entry. The column of a missing or failed peer has the reason."""
    columns = [Column(entry.name) for entry in entries]
    with ExitStack() as running:
        own = list(zip(columns[:kvtier], entries[:kvtier], strict=True))
        players = [(column, running.enter_context(_started(column, entry, directory, effort))) for column, entry in own]
        for column, entry in zip(columns[kvtier:], entries[kvtier:], strict=True):
            print(f"measuring {entry.name} beside {', '.join(c.name for c, _ in own)} …", file=sys.stderr, flush=True)
            try:
                with _started(column, entry, directory, effort) as player:
                    _measure([*players, (column, player)], effort)
            except (PeerMissing, PeerFailed) as error:
                column.absent = str(error)
        if not any(column.movement for column in columns):
            _measure(players, effort)
    return columns


@contextmanager
def _started(column: Column, entry: Entry, directory: Path, effort: Effort) -> Iterator[PeerProcess]:
    folder = directory / entry.name.replace(" ", "-")
    folder.mkdir()
    with PeerProcess(entry, folder) as process:
        column.packages, column.version = _packages(entry)
        column.import_seconds = [_import_seconds(entry) for _ in range(effort.imports)]
        answer = process.ask(
            "start",
            directory=str(folder),
            capacity_bytes=effort.capacity_bytes,
            pool_bytes=effort.pool_bytes,
            apart_bytes=effort.apart_bytes,
        )
        column.ready_seconds = answer["seconds"]
        column.version = answer["version"] or column.version
        column.memory_bytes, column.idle_share = _at_rest(answer["processes"], effort.idle_seconds)
        yield process
        process.ask("stop")


def _at_rest(processes: Sequence[int], seconds: float) -> tuple[int, float]:
    before = sum(map(cpu_seconds_of, processes))
    time.sleep(seconds)
    spent = sum(map(cpu_seconds_of, processes)) - before
    return sum(map(memory_bytes_of, processes)), spent / seconds


def _measure(players: Sequence[tuple[Column, PeerProcess]], effort: Effort) -> None:
    for block_bytes, rounds in effort.rounds:
        for _, player in players:
            player.ask("open", block_bytes=block_bytes, fill_bytes=effort.capacity_bytes)
        for _ in range(rounds):
            for column, player in players:
                _add(column.movement.setdefault(block_bytes, {}), player.ask("round"))
    for _, player in players:
        player.ask("prepare_lookups", block_bytes=effort.lookup_bytes, most=max(HIT_KEYS), unknown=UNKNOWN_KEYS)
    for _ in range(effort.lookup_rounds):
        for column, player in players:
            _look_up(column, player, effort.lookups)


def _add(found: dict[str, list[float]], seconds: dict[str, Any]) -> None:
    for what in ("memcpy", "store", "load"):
        found.setdefault(what, []).append(seconds[what])


def _look_up(column: Column, player: PeerProcess, times: int) -> None:
    for count in HIT_KEYS:
        column.lookups.setdefault(f"hit, {count:,} keys", []).extend(
            player.ask("hits", count=count, times=times)["seconds"]
        )
    missed = player.ask("misses", times=max(times // 4, 1))["seconds"]
    column.lookups.setdefault(f"miss, {UNKNOWN_KEYS:,} keys", []).extend(missed)


def _packages(entry: Entry) -> tuple[int, str]:
    command = [str(entry.python), "-m", "bench.peers.packages", entry.requirement]
    done = subprocess.run(command, env=entry.environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerMissing(done.stderr.strip().splitlines()[-1])
    count, version = done.stdout.split()
    return int(count), version


def _import_seconds(entry: Entry) -> float:
    code = f"import time; began = time.perf_counter(); import {entry.imports}; print(time.perf_counter() - began)"
    command = [str(entry.python), "-c", code]
    done = subprocess.run(command, env=entry.environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerMissing(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.split()[-1])
