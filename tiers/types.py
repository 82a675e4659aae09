"""Who asks the core, and what it answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .base import NamespaceId, OffloadPolicy, Vote
from .core.block import NamespaceSpec
from .core.commands import StoreId
from .errors import InvalidItem

__all__ = ["DurableStatus", "EngineKey", "Negotiation", "Session", "StoreAnswer", "StoreStatus"]


EngineKey = tuple[NamespaceId, str]
"""An engine: its id, which it chooses itself, within its namespace. Nobody else's is reached by guessing an id."""


class StoreStatus(enum.IntEnum):
    """What a prepared store says of one key. Numbers as in `kvtier.v1.StoreStatus`."""

    GRANTED = 1
    PRESENT = 2
    IN_PROGRESS = 3
    NO_ROOM = 4


class DurableStatus(enum.IntEnum):
    """Whether a block survives a restart. Numbers as in `kvtier.v1.DurableStatus`."""

    DURABLE = 1
    PENDING = 2
    VOLATILE = 3


@dataclass(slots=True, eq=False)
class Session:
    """One client process, as far as the core cares."""

    id: bytes
    engine_id: str
    rank: int | None
    namespace: NamespaceSpec
    tenant: str = ""
    writers: set[int] = field(default_factory=set)
    """Connections that keep the region mapped: while one lives, the process may write to its slots."""
    requests: set[str] = field(default_factory=set)
    """Requests that it has begun and not finished."""

    @property
    def engine(self) -> EngineKey:
        """Its engine, which owns what it holds."""
        return self.namespace.id, self.engine_id

    def own_rank(self) -> int:
        """Returns the rank whose parts this session reads and writes.

        Raises:
            InvalidItem: the session has none (a scheduler's), and there are several to choose from.
        """
        if self.rank is not None:
            return self.rank
        if self.namespace.world_size > 1:
            raise InvalidItem("this session has no rank, and its namespace has several")
        return 0


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """Answer to a prepared store.

    Attributes:
        store_id: None where nothing was granted.
        statuses: a `StoreStatus` per key.
        slots: offsets of what was granted.
        not_retained: blocks that should be retained in the CPU tier, beyond what may be.
    """

    store_id: StoreId | None
    statuses: bytes
    slots: list[int]
    not_retained: int = 0


@dataclass(frozen=True, slots=True)
class Negotiation:
    """How a request is offloaded, and each tier's vote in lookup order."""

    policy: OffloadPolicy
    votes: tuple[tuple[str, Vote], ...]
