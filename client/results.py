"""What client calls return."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..protos.v1 import cache_pb2, common_pb2, handoff_pb2
from .session.session import Session

__all__ = [
    "DurableStatus",
    "HandoffDirection",
    "HoldInfo",
    "HoldName",
    "KeyStatus",
    "LookupResult",
    "Medium",
    "OffloadPolicy",
    "Publication",
    "PublishStatus",
    "ReadBatch",
    "RequestOutcome",
    "StoreStatus",
    "TierFilter",
    "TierVote",
    "WriteBatch",
]


class KeyStatus(enum.IntEnum):
    """What a lookup says of one key."""

    HIT = common_pb2.KEY_STATUS_HIT
    MISS = common_pb2.KEY_STATUS_MISS
    HIT_PENDING = common_pb2.KEY_STATUS_HIT_PENDING
    RETRY = common_pb2.KEY_STATUS_RETRY


class StoreStatus(enum.IntEnum):
    """What became of one key of a store."""

    GRANTED = common_pb2.STORE_STATUS_GRANTED
    PRESENT = common_pb2.STORE_STATUS_PRESENT
    IN_PROGRESS = common_pb2.STORE_STATUS_IN_PROGRESS
    NO_ROOM = common_pb2.STORE_STATUS_NO_ROOM


class DurableStatus(enum.IntEnum):
    """Whether a block survives a restart of the server."""

    DURABLE = common_pb2.DURABLE_STATUS_DURABLE
    PENDING = common_pb2.DURABLE_STATUS_PENDING
    VOLATILE = common_pb2.DURABLE_STATUS_VOLATILE


class HandoffDirection(enum.IntEnum):
    """Which way a request is handed over."""

    PREFILL_TO_DECODE = handoff_pb2.HANDOFF_DIRECTION_PREFILL_TO_DECODE
    DECODE_TO_PREFILL = handoff_pb2.HANDOFF_DIRECTION_DECODE_TO_PREFILL


class PublishStatus(enum.IntEnum):
    """What became of a publication."""

    PUBLISHED = handoff_pb2.PUBLISH_STATUS_PUBLISHED
    NO_ROOM = handoff_pb2.PUBLISH_STATUS_NO_ROOM
    TOO_MANY = handoff_pb2.PUBLISH_STATUS_TOO_MANY


class OffloadPolicy(enum.Enum):
    """How a request is offloaded."""

    BLOCK_LEVEL = cache_pb2.OFFLOAD_POLICY_BLOCK_LEVEL
    REQUEST_LEVEL = cache_pb2.OFFLOAD_POLICY_REQUEST_LEVEL


class Medium(enum.IntEnum):
    """What the bytes of a tier lie on."""

    MEMORY = cache_pb2.TIER_MEDIUM_MEMORY
    DISK = cache_pb2.TIER_MEDIUM_DISK
    NETWORK = cache_pb2.TIER_MEDIUM_NETWORK


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Tiers that a lookup leaves out: those that match any of these. The CPU tier cannot be left out.

    Attributes:
        names: tiers, by name; one that the server lacks is an `InvalidRequest`.
        media: tiers whose bytes lie on one of these.
        remote: whether tiers are left out whose bytes are not on the server's host.
    """

    names: Collection[str] = ()
    media: Collection[Medium] = ()
    remote: bool = False


@dataclass(frozen=True, slots=True)
class TierVote:
    """One tier's vote on how a request is offloaded, and why (for people)."""

    tier: str
    policy: OffloadPolicy
    why: str


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of a request.

    Attributes:
        settled: whether nothing more is going to be stored for it.
        incomplete_blocks: blocks that a REQUEST_LEVEL tier asked for and did not get, as far as is known.
    """

    settled: bool
    incomplete_blocks: int


@dataclass(frozen=True, slots=True)
class HoldName:
    """Names a request that is held, within a namespace: the engine that published it, and that engine's id of it."""

    engine_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of a publication.

    Attributes:
        status: whether the request is held, or why not.
        remaining: seconds for which it is held, if nobody extends that.
        pending_blocks: blocks that are still on their way to the server.
    """

    status: PublishStatus
    remaining: float
    pending_blocks: int


@dataclass(frozen=True, slots=True)
class HoldInfo:
    """What a claim learns of a hold.

    Attributes:
        positions: of each key's block, within its group.
        num_tokens: tokens of the request that all blocks together back.
        direction: which way the request is handed over.
        remaining: seconds until the hold ends, if nobody extends it.
    """

    positions: Sequence[int]
    num_tokens: int
    direction: HandoffDirection
    remaining: float


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What a lookup found, pinned by a lease until it is released, expires, or its session falls.

    Attributes:
        id: the lease; 0 where nothing was found.
        statuses: one `KeyStatus` per key.
        prefix_hits: leading keys that are hits: the usable prefix.
        request_id: the request it was granted for.
        keys: the keys that were looked up.
        link: the session that holds the lease.
        slots: where this session's parts of the leading hits are in the region, if asked for.
        policy: how the request is offloaded; None unless it was begun with this lookup.
        votes: each tier's vote; empty likewise.
        not_retained: hits that were to be retained and are not: that is bounded.
        hold: of a claim, what is held; its `statuses` are 0 where a block was not wanted. None for a lookup.
    """

    id: int
    statuses: bytes
    prefix_hits: int
    request_id: str
    keys: Sequence[bytes]
    link: Session
    source_indices: bytes
    slots: Sequence[int] = ()
    policy: OffloadPolicy | None = None
    votes: tuple[TierVote, ...] = ()
    not_retained: int = 0
    hold: HoldInfo | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Per key the tier where it was found; meaningless for misses."""
        return tuple(map(self.link.tiers.__getitem__, self.source_indices))


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Bytes to be copied out: part i is `memory[offsets[i] : offsets[i] + sizes[i]]`.

    `memory` is the mapped region or a staging buffer, `address` where it starts; both are valid only within the `with`
    block.
    """

    memory: memoryview
    address: int
    offsets: Sequence[int]
    sizes: Sequence[int]

    def views(self) -> list[memoryview]:
        """Returns a view of each part."""
        return [self.memory[offset : offset + size] for offset, size in zip(self.offsets, self.sizes, strict=True)]


@dataclass(slots=True)
class WriteBatch:
    """Where to copy bytes to: the part of key `wanted[i]` goes to `memory[offsets[i] : offsets[i] + sizes[i]]`.

    `memory` is the mapped region or a staging buffer, `address` where it starts; both are valid only within the `with`
    block.

    Attributes:
        statuses: one `StoreStatus` per key; only GRANTED ones are wanted.
        not_retained: blocks that were to be retained and are not: that is bounded.
        failed: positions in `wanted` that the user could not fill; they are not stored.
    """

    statuses: bytes
    wanted: Sequence[int]
    memory: memoryview
    address: int
    offsets: Sequence[int]
    sizes: Sequence[int]
    not_retained: int = 0
    failed: set[int] = field(default_factory=set)

    def views(self) -> list[memoryview]:
        """Returns a view of each part."""
        return [self.memory[offset : offset + size] for offset, size in zip(self.offsets, self.sizes, strict=True)]
