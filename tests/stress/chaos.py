"""Faults and their times, drawn from a seed. Their exact time depends on the machine."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["SLOTS", "SURVIVORS", "Fault", "FaultKind", "Kill", "kill_of", "last_run_start", "timeline"]

SLOTS = 8
SURVIVORS = 2
"""The first slots are never killed, so that the memory of a long-lived client is watched."""

_LIFE_SECONDS = 15.0
_LAST_LIFE = 0.6
"""Share of the time that the last server runs, so that its memory is watched."""

_KILL_SECONDS = (0.2, 3.0)
_START_KILLS = 0.25
"""Share of the starts that are killed in `make torture`."""
_LATEST_START_KILL = 1.2


class FaultKind(enum.Enum):
    KILL_CLIENT = "SIGKILL of a client"
    STOP_CLIENT = "SIGSTOP of a client"
    STOP_SERVER = "SIGSTOP of the server"
    KILL_SERVER = "SIGKILL of the server"
    KILL_START = "SIGKILL of the server while it starts"
    END_SERVER = "SIGTERM of the server"


@dataclass(frozen=True, order=True)
class Fault:
    """One fault: when, in seconds from the start; which slot; for how many seconds (a stop)."""

    at: float
    kind: FaultKind
    slot: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Kill:
    """One run of the server in `make torture`, and its end.

    Attributes:
        seconds: time under load until the server is killed.
        starts: for each start after it that is killed, too: when, as a share of the time of a whole
            start. The last start is not killed.
    """

    seconds: float
    starts: tuple[float, ...]


def kill_of(seed: int, number: int) -> Kill:
    """The run with this number; it depends on no other run."""
    rng = random.Random(f"{seed}:kill {number}")
    seconds = rng.uniform(*_KILL_SECONDS)
    starts = []
    while rng.random() < _START_KILLS:
        starts.append(rng.uniform(0.0, _LATEST_START_KILL))
    return Kill(seconds, tuple(starts))


def timeline(seed: int, seconds: float) -> list[Fault]:
    rng = random.Random(f"{seed}:chaos")
    faults = [*_faults_of_clients(rng, seconds), *_faults_of_server(rng, seconds)]
    return sorted(faults, key=lambda fault: fault.at)


def last_run_start(seconds: float) -> float:
    """Start of the server's last run, in seconds from the start."""
    return seconds * (1 - _LAST_LIFE)


def _faults_of_clients(rng: random.Random, seconds: float) -> Iterator[Fault]:
    at = rng.uniform(1.0, 2.0)
    while at < seconds:
        yield Fault(at, FaultKind.KILL_CLIENT, rng.randrange(SURVIVORS, SLOTS))
        at += 0.2 + rng.expovariate(1 / 0.8)
    at = rng.uniform(1.0, 3.0)
    while at < seconds:
        yield Fault(at, FaultKind.STOP_CLIENT, rng.randrange(SLOTS), rng.choice((0.2, 1.0, 3.0, 6.0)))
        at += rng.expovariate(1 / 6.0)


def _faults_of_server(rng: random.Random, seconds: float) -> Iterator[Fault]:
    mean = min(_LIFE_SECONDS, seconds / 4)
    last = last_run_start(seconds)
    at = 0.0
    while (at := at + mean * rng.uniform(0.6, 1.4)) < last - mean / 2:
        yield _end_of_a_run(rng, at)
        if rng.random() < 0.3:
            yield Fault(at + mean * 0.4, FaultKind.STOP_SERVER, seconds=rng.choice((0.3, 1.0, 4.0)))
    yield _end_of_a_run(rng, last)


def _end_of_a_run(rng: random.Random, at: float) -> Fault:
    return Fault(at, FaultKind.KILL_SERVER if rng.random() < 0.75 else FaultKind.END_SERVER)
