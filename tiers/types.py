"""Shared types of the core: session, namespace, lease owner, ids, miss reasons."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Final, NamedTuple, NewType

from ..protos.values import (
    HOLD_ONLY_KEY_PREFIX,
    DurableStatus,
    HandoffDirection,
    KeyStatus,
    PublishStatus,
    StoreStatus,
)
from .errors import InvalidItem, InvalidKey, InvalidNamespace
from .secondary_tier import NamespaceId, OffloadPolicy, Vote

__all__ = [
    "GROUP_INDEX_BYTES",
    "HOLD_ONLY_KEY_PREFIX",
    "MAX_GROUPS",
    "MAX_PART_SIZES",
    "NAMESPACE_BYTES",
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
    "StoreOrigin",
    "StoreStatus",
    "tenant_of",
]

EngineKey = tuple[NamespaceId, str]
"""Identity of an engine: the namespace id, and the id that the engine chose. Engines of different
namespaces may choose the same id."""


MAX_WITHDRAWN = 256
"""Number of withdrawn grants that a session remembers, about 60 bytes each."""


@dataclass(slots=True, eq=False)
class EngineSession:
    id: bytes
    engine_id: str
    rank: int | None
    namespace: NamespaceSpec
    tenant: str = ""
    writers: set[int] = field(default_factory=set)
    """Connections whose process maps the region. While one of them is open, the process may write
    to the slots of the session."""
    unmapped_from: float = math.inf
    """Number of the first store that the process cannot fill through a mapping of the region. The
    server sets it. It is infinite while the region is mapped, and for callers without a server."""
    requests: dict[str, None] = field(default_factory=dict)
    """Ids of the requests that it has begun and that are not finished, in their order."""
    ended: bool = False
    withdrawn: dict[int, None] = field(default_factory=dict)
    """The last ids of grants that the client has withdrawn. Their calls may arrive later."""
    engine: EngineKey = field(init=False)
    """The engine that owns the session's leases, stores and holds."""

    def __post_init__(self) -> None:
        self.engine = self.namespace.id, self.engine_id

    def check_wanted(self, grant_id: int) -> None:
        """Raises InvalidItem if the client has withdrawn the grant."""
        if grant_id in self.withdrawn:
            raise InvalidItem(f"the client has withdrawn grant {grant_id}")

    def withdraw(self, grant_id: int) -> None:
        self.withdrawn[grant_id] = None
        if len(self.withdrawn) > MAX_WITHDRAWN:
            del self.withdrawn[next(iter(self.withdrawn))]

    def own_rank(self) -> int:
        """Returns the rank of this session's parts. Raises InvalidItem if the rank is unknown."""
        if self.rank is not None:
            return self.rank
        if self.namespace.world_size > 1:
            raise InvalidItem("the session has no rank, but its namespace has several ranks")
        return 0


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """Answer to a prepared store.

    Attributes:
        store_id: None if nothing was granted.
        statuses: a `StoreStatus` per key.
        slots: offsets of the granted slots in the region.
        not_retained: number of blocks that the CPU tier could not retain.
    """

    store_id: StoreId | None
    statuses: bytes
    slots: list[int]
    not_retained: int = 0


@dataclass(frozen=True, slots=True)
class Negotiation:
    """The policy of a request, and each tier's vote in lookup order."""

    policy: OffloadPolicy
    votes: tuple[tuple[str, Vote], ...]


GROUP_INDEX_BYTES = 4
"""A key ends with the index of its KV cache group, big-endian."""

SLOT_ALIGNMENT = 4096
"""Slot offsets and sizes are multiples of this page size, because direct I/O requires it."""

MAX_WORLD_SIZE = 1024

MAX_GROUPS = 256
"""Limit of KV cache groups. Engines have a handful, and at most one per layer."""

MAX_PART_SIZES = 64
"""Limit of part sizes per namespace, because each size needs a separate eviction queue."""


@cache
def _no_slots(world_size: int) -> tuple[None, ...]:
    """Returns empty slots. All `MAX_WORLD_SIZE` tuples together take 4 MiB."""
    return (None,) * world_size


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """A namespace as the core needs it.

    Attributes:
        id: digest of all properties that must be equal for engines to share blocks.
        world_size: number of ranks, each with one part of every block.
        part_bytes: size of one rank's part, per KV cache group.
        no_slots: value of `Block.slots` for a new block; one tuple for all namespaces with this
            world size.
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
        if len(self.part_bytes) > MAX_GROUPS:
            raise InvalidNamespace(f"a namespace has {MAX_GROUPS} KV cache groups at most")
        sizes = {size: size for size in self.part_bytes}
        if len(sizes) > MAX_PART_SIZES:
            raise InvalidNamespace(f"a namespace has parts of {MAX_PART_SIZES} sizes at most")
        if min(self.part_bytes) < 1:
            raise InvalidNamespace("part_bytes of every group must be positive")
        # One object per size: conversations keep the namespace when its session has ended.
        object.__setattr__(self, "part_bytes", tuple(map(sizes.__getitem__, self.part_bytes)))
        object.__setattr__(self, "no_slots", _no_slots(self.world_size))

    def part_bytes_of(self, key: bytes) -> int:
        """Returns the part size of a key's block. Raises InvalidKey for an unknown group."""
        group = int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")
        if group >= len(self.part_bytes):
            raise InvalidKey(f"a key names group {group}, but the namespace has {len(self.part_bytes)} groups")
        return self.part_bytes[group]

    def check(self, keys: Sequence[bytes]) -> None:
        if len(keys) == 1:
            self.part_bytes_of(keys[0])
            return
        lengths = set(map(len, keys))
        if len(lengths) == 1 and self.groups_are_known(b"".join(keys), lengths.pop()):
            return
        for key in keys:
            self.part_bytes_of(key)

    def groups_are_known(self, packed: bytes, length: int) -> bool:
        """Returns whether all keys of this length pass `check`. `packed`: the concatenated keys."""
        *high, low = [packed[length - place :: length] for place in range(GROUP_INDEX_BYTES, 0, -1)]
        return not b"".join(high).strip(b"\0") and not low.translate(None, bytes(range(min(len(self.part_bytes), 256))))


JobId = NewType("JobId", int)
LeaseId = NewType("LeaseId", int)
StoreId = NewType("StoreId", int)

HoldName = tuple[NamespaceId, str, str]
"""Name of a hold: namespace id, id of the publishing engine, and the engine's request id."""


class HoldEnd(enum.Enum):
    """How a hold ended. Numbers as in `kvtier.v1.HoldEnd`."""

    RELEASED = 1
    EXPIRED = 2
    REPLACED = 3
    """The engine published another hold with the same name."""
    RESET = 4


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of a lease or store: engine, session, and request id ("" if unknown)."""

    engine: EngineKey
    session_id: bytes
    request_id: str
    grant_id: int = 0
    """Id that the client chose for the grant, unique within the session; 0: none."""

    @property
    def grant(self) -> tuple[bytes, int]:
        return self.session_id, self.grant_id

    @property
    def engine_id(self) -> str:
        return self.engine[1]

    @property
    def user(self) -> tuple[EngineKey, str] | None:
        """Identifies the request for eviction policies; None if the client sent no request id."""
        return (self.engine, self.request_id) if self.request_id else None


TENANT_TAG_BYTES = 16
"""Length of the tenant tag at the start of a namespace id. The tag decides which tenant owns a
block. Clients choose names of tenants, so it must not be possible to find two with one tag."""

NAMESPACE_BYTES = 32
"""Length of a namespace id: the tenant tag, and a digest of the namespace."""


tenant_of: Final[Callable[[NamespaceId], bytes]] = itemgetter(slice(TENANT_TAG_BYTES))
"""Returns the tag of the tenant that owns a namespace. Each call needs it many times, so that it is
not a Python function."""


REST = ""
"""Name of the default share, which all tenants without a quota use."""


class MissReason(enum.Enum):
    """Why a looked-up block was a miss. Numbers as in `kvtier.v1.MissReason`."""

    NEVER_STORED = 1
    """The block was never stored, or the eviction history no longer contains it."""
    EVICTED = 2
    """The block was evicted to make room."""
    STORE_FAILED = 3
    """A store failed: no slot was free, the client was lost, or a tier was too busy."""
    POLICY = 4
    """The lookup excluded the tier with the block, or a tier declined to store the block."""
    BELOW_THRESHOLD = 5
    """The block was present, but the matching prefix was shorter than the requested minimum."""
    FORMAT_MISMATCH = 6
    """The tenant has the block in another format (model revision, dtype, layout, parallelism)."""
    EXPIRED = 7
    """The time to live of the block had passed."""
    LOAD_FAILED = 8
    """A tier had the block but could not load it: it was damaged or lost, or the storage failed."""
    NO_ROOM = 9
    """A tier has the block, but no slot of the CPU tier could be freed for it."""
    RESET = 10
    """A reset dropped the block from the CPU tier, or a reset is running."""
    PENDING = 11
    """The block was not ready when a claim stopped waiting, or a lease ended before its lookup."""
    DAMAGED = 12
    """The bytes of the block did not match their digest, so the block was removed."""


class StoreOrigin(NamedTuple):
    """Store that wrote a part: who is asked if the bytes turn out to be damaged."""

    engine_id: str
    begun_at: float
    """In seconds of the core's clock."""


@dataclass(frozen=True, slots=True)
class ShareStats:
    """Use of a tier by one tenant, in bytes."""

    tenant: str
    """Tenant name; empty for the default share."""
    quota_bytes: int
    limit_bytes: int | None
    """None for no limit."""
    used_bytes: int
    retained_bytes: int
