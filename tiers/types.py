"""Who asks the core, and what it answers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from .base import NamespaceId, OffloadPolicy, Vote
from .errors import InvalidItem, InvalidKey, InvalidNamespace

__all__ = [
    "GROUP_INDEX_BYTES",
    "HOLD_ONLY_KEY_PREFIX",
    "MAX_PART_SIZES",
    "MAX_WORLD_SIZE",
    "REST",
    "SLOT_ALIGNMENT",
    "TENANT_TAG_BYTES",
    "DurableStatus",
    "EngineKey",
    "EngineSession",
    "HandoffDirection",
    "HoldEnd",
    "HoldName",
    "JobId",
    "KeyStatus",
    "LeaseId",
    "MissReason",
    "NamespaceSpec",
    "Negotiation",
    "Owner",
    "PublishStatus",
    "ShareStats",
    "StoreAnswer",
    "StoreId",
    "StoreStatus",
]


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
class EngineSession:
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


GROUP_INDEX_BYTES = 4
"""A key ends in its KV cache group's index, big-endian."""


HOLD_ONLY_KEY_PREFIX = b"kvtier.hold."
"""So begin the keys of blocks that only a hold names (`kvtier/v1/handoff.proto`): they have no content hash."""


SLOT_ALIGNMENT = 4096
"""Slots start and end on pages, as direct I/O wants it."""


MAX_WORLD_SIZE = 4096


MAX_PART_SIZES = 64
"""Each size is a line of eviction of its own; engines have a handful."""


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What the core needs to know of a namespace.

    Attributes:
        id: digest of everything that must agree for blocks to be shared.
        world_size: ranks, each with one part of every block.
        part_bytes: per KV cache group, the size of one rank's part of a block.
        no_slots: what a block without slots has, one for all of them.
    """

    id: NamespaceId
    world_size: int
    part_bytes: tuple[int, ...]
    no_slots: tuple[None, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise InvalidNamespace(f"world size {self.world_size} is not within 1..{MAX_WORLD_SIZE}")
        if not self.part_bytes:
            raise InvalidNamespace("a namespace needs at least one KV cache group")
        if len(set(self.part_bytes)) > MAX_PART_SIZES:
            raise InvalidNamespace(f"a namespace has parts of {MAX_PART_SIZES} sizes at most")
        if min(self.part_bytes) < 1:
            raise InvalidNamespace("part_bytes of every group must be positive")
        object.__setattr__(self, "no_slots", (None,) * self.world_size)

    def part_bytes_of(self, key: bytes) -> int:
        """Returns the size of one part of the block with this key.

        Raises:
            InvalidKey: the key names a group that the namespace lacks.
        """
        group = int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")
        if group >= len(self.part_bytes):
            raise InvalidKey(f"key names group {group}, the namespace has {len(self.part_bytes)}")
        return self.part_bytes[group]

    def check(self, keys: Sequence[bytes]) -> None:
        """Raises InvalidKey if one of the keys names a group that the namespace lacks."""
        if len(keys) == 1:  # blocks of the tiers below are found one by one
            self.part_bytes_of(keys[0])
            return
        lengths = set(map(len, keys))
        if len(lengths) == 1 and self.groups_are_known(b"".join(keys), lengths.pop()):
            return
        for key in keys:
            self.part_bytes_of(key)

    def groups_are_known(self, packed: bytes, length: int) -> bool:
        """Whether keys of one length, one behind the other, are sure to pass `check`. Column by column, for lookups wait for it."""
        *high, low = (packed[length - place :: length] for place in range(GROUP_INDEX_BYTES, 0, -1))
        return not b"".join(high).strip(b"\0") and not low.translate(None, bytes(range(min(len(self.part_bytes), 256))))


JobId = NewType("JobId", int)


LeaseId = NewType("LeaseId", int)


StoreId = NewType("StoreId", int)


HoldName = tuple[NamespaceId, str, str]
"""A hold: the engine that published it, and that engine's id of the request, within a namespace."""


class HandoffDirection(enum.IntEnum):
    """Which way a request goes. Numbers as in `kvtier.v1.HandoffDirection`."""

    PREFILL_TO_DECODE = 1
    DECODE_TO_PREFILL = 2


class PublishStatus(enum.IntEnum):
    """What became of a publication. Numbers as in `kvtier.v1.PublishStatus`."""

    PUBLISHED = 1
    NO_ROOM = 2
    TOO_MANY = 3


class HoldEnd(enum.Enum):
    """How a hold ended. Numbers as in `kvtier.v1.HoldEnd`."""

    RELEASED = 1
    EXPIRED = 2
    REPLACED = 3
    """Another one of its name was published."""
    RESET = 4


class KeyStatus(enum.IntEnum):
    """What a lookup says of one key. Numbers as in `kvtier.v1.KeyStatus`."""

    HIT = 1
    MISS = 2
    HIT_PENDING = 3
    RETRY = 4


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lease: a session of an engine, on behalf of a request (or none)."""

    engine: EngineKey
    session_id: bytes
    request_id: str

    @property
    def engine_id(self) -> str:
        """The engine, for people."""
        return self.engine[1]

    @property
    def user(self) -> tuple[EngineKey, str] | None:
        """What eviction policies know the request by; None where the client did not say."""
        return (self.engine, self.request_id) if self.request_id else None


TENANT_TAG_BYTES = 4
"""A namespace's id begins with a tag of its tenant, so that it is known whose a block is before the tenant has come."""


REST = ""
"""Name of the share of those who have none of their own."""


class MissReason(enum.Enum):
    """Why a looked-up block was a miss. Numbers as in `kvtier.v1.MissReason`."""

    NEVER_STORED = 1
    """Nobody stored it, as far as is remembered."""
    EVICTED = 2
    """It had to make room."""
    STORE_FAILED = 3
    """It was offered, and could not be written: there was no room, its writer failed or went silent, or a tier was too busy."""
    POLICY = 4
    """A rule kept it out: the lookup excluded the tier that has it, or a tier did not admit it."""
    BELOW_THRESHOLD = 5
    """It was there, in a prefix shorter than what the lookup called worth having."""
    FORMAT_MISMATCH = 6
    """It is there in another format (model revision, dtype, layout, parallelism), whose bytes would be wrong."""
    EXPIRED = 7
    """Its time was over."""
    LOAD_FAILED = 8
    """A tier had it and could not give it back: damaged, lost, or an error of its storage."""
    NO_ROOM = 9
    """A tier has it, and every slot of the CPU tier is in use."""
    RESET = 10
    """The CPU tier was emptied on demand, or is being emptied."""
    PENDING = 11
    """It was on its way, and had not come when the wait of a claim was over."""


@dataclass(frozen=True, slots=True)
class ShareStats:
    """What a tenant has of a tier at one moment, in bytes."""

    tenant: str
    """Its name; empty for all who have no share of their own."""
    quota_bytes: int
    """What it is guaranteed."""
    limit_bytes: int | None
    """The most that it may hold; None where nothing is said."""
    used_bytes: int
    """What it holds."""
    retained_bytes: int
    """What of that may not be evicted for a while."""
