"""What happens to whom and when, all of it from a seed. When exactly each blow falls is up to the machine."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["SLOTS", "SURVIVORS", "Blow", "Kind", "first_calm", "timeline"]

SLOTS = 8
SURVIVORS = 2
"""The first slots are never killed, so that the memory of a client that lives long can be watched."""

_LIFE_SECONDS = 15.0
_LAST_LIFE = 0.6
"""Share of the time that the last server lives, so that its memory can be watched."""


class Kind(enum.Enum):
    """What is done."""

    KILL_CLIENT = "SIGKILL of a client"
    STOP_CLIENT = "SIGSTOP of a client"
    STOP_SERVER = "SIGSTOP of the server"
    KILL_SERVER = "SIGKILL of the server"
    END_SERVER = "SIGTERM of the server"


@dataclass(frozen=True, order=True)
class Blow:
    """One of them: when, in seconds from the start; to which slot; for how many seconds, where it is a stop."""

    at: float
    kind: Kind
    slot: int = 0
    seconds: float = 0.0


def timeline(seed: int, seconds: float) -> list[Blow]:
    """Returns everything that is going to happen, in order."""
    rng = random.Random(f"{seed}:chaos")
    blows = [*_blows_to_clients(rng, seconds), *_blows_to_server(rng, seconds)]
    return sorted(blows, key=lambda blow: blow.at)


def first_calm(seconds: float) -> float:
    """Returns when the last life of the server begins, in seconds from the start."""
    return seconds * (1 - _LAST_LIFE)


def _blows_to_clients(rng: random.Random, seconds: float) -> Iterator[Blow]:
    at = rng.uniform(1.0, 2.0)
    while at < seconds:
        yield Blow(at, Kind.KILL_CLIENT, rng.randrange(SURVIVORS, SLOTS))
        at += 0.2 + rng.expovariate(1 / 0.8)
    at = rng.uniform(1.0, 3.0)
    while at < seconds:
        yield Blow(at, Kind.STOP_CLIENT, rng.randrange(SLOTS), rng.choice((0.2, 1.0, 3.0, 6.0)))
        at += rng.expovariate(1 / 6.0)


def _blows_to_server(rng: random.Random, seconds: float) -> Iterator[Blow]:
    mean = min(_LIFE_SECONDS, seconds / 4)
    last = first_calm(seconds)
    at = 0.0
    while (at := at + mean * rng.uniform(0.6, 1.4)) < last - mean / 2:
        yield _end_of_a_life(rng, at)
        if rng.random() < 0.3:
            yield Blow(at + mean * 0.4, Kind.STOP_SERVER, seconds=rng.choice((0.3, 1.0, 4.0)))
    yield _end_of_a_life(rng, last)


def _end_of_a_life(rng: random.Random, at: float) -> Blow:
    return Blow(at, Kind.KILL_SERVER if rng.random() < 0.75 else Kind.END_SERVER)
