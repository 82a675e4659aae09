"""The engines of one role: who is up, and who gets the next request."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from .transfer import Address, DecodeEngine

__all__ = ["Fleet", "Instance", "Role"]

SLACK = 4
"""So many requests more than the idlest may a conversation's own engine have under way, and still get the next turn."""

MAX_PAUSE_S = 30.0


class Role(Enum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Instance:
    """One engine. ``kvtier``: where its kvtier server is for others, if that is not what it says itself (B2.22).

    ``engine``: who it is, if it holds anything, and since when that is known. ``is_doubted``: a request went wrong, and its health
    is to be looked at at once. ``failures``: in a row; it is left alone until ``retry_at``. Times in seconds, on the clock of
    whoever asks.
    """

    url: str
    role: Role
    kvtier: Address | None = None
    engine: DecodeEngine | None = None
    engine_seen_at: float | None = None
    is_up: bool = True
    is_doubted: bool = False
    outstanding: int = 0
    served: int = 0
    failures: int = 0
    retry_at: float = 0.0

    def failed(self, now: float) -> None:
        """It could not be reached, or a look at its health went wrong: it is down for 1 s, then 2, 4 and so on."""
        self.is_up = False
        self.failures += 1
        self.retry_at = now + min(MAX_PAUSE_S, 2.0 ** min(self.failures - 1, 10))
        self.engine = self.engine_seen_at = None  # it may come back as somebody else

    def is_healthy(self) -> None:
        """It says that it is well. Only an answered request ends the doubts: it may hang and say so."""
        self.is_up = True

    def answered(self) -> None:
        """It answered a request."""
        self.is_up, self.failures = True, 0

    def introduced(self, engine: DecodeEngine | None, now: float) -> None:
        """It said who it is, or that it holds nothing."""
        self.engine, self.engine_seen_at = engine, now


class Fleet:
    """Chooses. All that it goes by is in the instances."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.instances = tuple(instances)

    def choose(self, key: str | None, tried: Collection[Instance] = (), *, or_down: bool = False) -> Instance | None:
        """Returns the engine for the next request of ``key``, None where all were tried or are down.

        ``or_down``: one that is down is better than none.
        """
        left = [instance for instance in self.instances if instance not in tried]
        candidates = [instance for instance in left if instance.is_up] or (left if or_down else [])
        if not candidates:
            return None
        idlest = min(candidates, key=lambda instance: (instance.outstanding, instance.served))
        if key is None:
            return idlest
        home = max(candidates, key=lambda instance: _weight(key, instance.url))
        return home if home.outstanding - idlest.outstanding < SLACK else idlest


def _weight(key: str, url: str) -> bytes:
    """Rendezvous hashing: an engine that comes or goes moves only the conversations that are or were its own."""
    return hashlib.blake2b(f"{url}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
