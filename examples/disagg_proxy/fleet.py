"""Engines of one role: their state, and the choice of the engine for the next request."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from .transfer import Address, EngineIdentity

__all__ = ["Fleet", "Instance", "Role"]

SLACK = 4
"""If a conversation's engine has at least this many requests more than the least loaded engine, the
request goes to the least loaded engine."""

MAX_PAUSE_S = 30.0


class Role(Enum):
    """An engine's task."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Instance:
    """One engine. `kvtier`: address of its kvtier server; None: the reported address (B2.22).

    `hints`: its kvtier server, which gets hints about agents; None for no hints.
    `engine`: identity of the engine if it holds requests, known since `engine_seen_at`.
    `is_suspect`: a request failed, so the next health check is due at once. `failures`: number of
    consecutive failures. `retry_at`: the engine is not used before this time. Times are seconds on
    the caller's clock.
    """

    url: str
    role: Role
    kvtier: Address | None = None
    hints: str | None = None
    engine: EngineIdentity | None = None
    engine_seen_at: float | None = None
    is_up: bool = True
    is_suspect: bool = False
    outstanding: int = 0
    served: int = 0
    failures: int = 0
    retry_at: float = 0.0

    def failed(self, now: float) -> None:
        """Marks the engine down: for 1 s after the first failure, then for 2 s, 4 s and so on."""
        self.is_up = False
        self.failures += 1
        self.retry_at = now + min(MAX_PAUSE_S, 2.0 ** min(self.failures - 1, 10))
        self.engine = self.engine_seen_at = None  # the engine may restart with another identity

    def is_healthy(self) -> None:
        """Records a successful health check. Keeps `failures` until a request is answered."""
        self.is_up = True

    def answered(self) -> None:
        """Records an answered request."""
        self.is_up, self.failures = True, 0

    def identified(self, engine: EngineIdentity | None, now: float) -> None:
        """Records the engine's identity; None means that the engine holds no requests."""
        self.engine, self.engine_seen_at = engine, now


class Fleet:
    """Chooses engines. All state is in the instances."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.instances = tuple(instances)

    def choose(
        self, key: str | None, tried: Collection[Instance] = (), *, include_down: bool = False
    ) -> Instance | None:
        """Returns the engine for a request of conversation `key`, or None if none is left.

        With `include_down`, an engine that is down may be chosen if no other engine is up.
        """
        left = [instance for instance in self.instances if instance not in tried]
        candidates = [instance for instance in left if instance.is_up] or (left if include_down else [])
        if not candidates:
            return None
        idlest = min(candidates, key=lambda instance: (instance.outstanding, instance.served))
        if key is None:
            return idlest
        home = max(candidates, key=lambda instance: _weight(key, instance.url))
        return home if home.outstanding - idlest.outstanding < SLACK else idlest


def _weight(key: str, url: str) -> bytes:
    """Rendezvous hashing: if an engine is removed, only that engine's conversations move."""
    return hashlib.blake2b(f"{url}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
