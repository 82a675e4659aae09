"""Results of client calls."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..protos.v1 import cache_pb2, conversation_pb2
from ..protos.values import (
    DurableStatus,
    HandoffDirection,
    KeyStatus,
    Medium,
    NotClaimedReason,
    OffloadPolicy,
    PublishStatus,
    StoreStatus,
    TierFilter,
)
from .session.session import ClientSession

__all__ = [
    "BlocksInTier",
    "ConversationAction",
    "ConversationInfo",
    "ConversationPage",
    "ConversationResult",
    "DurableStatus",
    "HandoffDirection",
    "HoldInfo",
    "HoldName",
    "KeyStatus",
    "LeaseSlots",
    "LookupResult",
    "Medium",
    "NotClaimedReason",
    "OffloadPolicy",
    "Prefetched",
    "Publication",
    "PublishStatus",
    "ReadBatch",
    "RequestOutcome",
    "SourceOutcome",
    "StoreStatus",
    "TierFilter",
    "TierVote",
    "WriteBatch",
]


@dataclass(frozen=True, slots=True)
class TierVote:
    """Vote of one tier on the offload policy of a request. `why` gives the reason, for logs."""

    tier: str
    policy: OffloadPolicy
    why: str


class SourceOutcome(enum.IntEnum):
    """Result of the search for missing blocks at the server that a lookup named as its source.

    NONE: the lookup named no source. FOUND: the server loads blocks from there. ABSENT: the source
    has none of the blocks. NOT_NEEDED: no block is missing. NOT_LISTED: the server's setting
    `peers.servers` does not permit this source. UNREACHABLE: no answer in time. REFUSED: the source
    refused the server's call. BUSY: the loads in progress use up the tenant's share of
    `peers.in_flight`.
    """

    NONE = cache_pb2.SOURCE_OUTCOME_UNSPECIFIED
    FOUND = cache_pb2.SOURCE_OUTCOME_FOUND
    ABSENT = cache_pb2.SOURCE_OUTCOME_ABSENT
    NOT_NEEDED = cache_pb2.SOURCE_OUTCOME_NOT_NEEDED
    NOT_LISTED = cache_pb2.SOURCE_OUTCOME_NOT_LISTED
    UNREACHABLE = cache_pb2.SOURCE_OUTCOME_UNREACHABLE
    REFUSED = cache_pb2.SOURCE_OUTCOME_REFUSED
    BUSY = cache_pb2.SOURCE_OUTCOME_BUSY


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """Result of a prefetch. Each key counts once, except for `not_retained`.

    Attributes:
        present: number of leading blocks in the CPU tier, or on their way there for other calls.
        started: number of blocks that the server has started to promote.
        missing: number of keys from the first one that no tier has.
        no_room: number of keys from the first one for which the CPU tier has no room.
        unanswered: number of keys for which a shared tier did not answer in time.
        not_retained: number of blocks that the CPU tier does not retain as requested.
        source_outcome: result of the search at `source`.
    """

    present: int
    started: int
    missing: int
    no_room: int
    unanswered: int
    not_retained: int
    source_outcome: SourceOutcome = SourceOutcome.NONE


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Outcome of a finished request.

    Attributes:
        settled: whether all stores of the request have ended.
        incomplete_blocks: number of blocks that REQUEST_LEVEL tiers have not received so far.
    """

    settled: bool
    incomplete_blocks: int


@dataclass(frozen=True, slots=True)
class HoldName:
    """Name of a hold within a namespace: id of the publishing engine, and its id of the request."""

    engine_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Publication:
    """Result of a publication.

    Attributes:
        status: whether the request is held; if not, the reason.
        remaining: seconds until the hold expires.
        pending_blocks: number of blocks that are not stored yet.
    """

    status: PublishStatus
    remaining: float
    pending_blocks: int


@dataclass(frozen=True, slots=True)
class HoldInfo:
    """Description of a claimed hold.

    Attributes:
        positions: position of each key's block within its group.
        num_tokens: number of the request's tokens for which the hold has blocks.
        direction: direction of the hand-off.
        remaining: seconds until the hold expires.
        settled_blocks: number of the hold's blocks that are stored or will not be stored.
    """

    positions: Sequence[int]
    num_tokens: int
    direction: HandoffDirection
    remaining: float
    settled_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LeaseSlots:
    """Places of the leading hits of a lookup in the region, for `read`. Can be pickled.

    A client of the same engine and server reads these hits without a call before the copy. The
    client that looked up must have no rank, or be the client that reads.

    Attributes:
        epoch: run of the server that granted the lease.
        groups: index of the KV cache group of each hit, one byte each.
        offsets: packed offsets in the region, hit by hit: of one rank, or of all ranks. Empty if
            the client that looked up maps no region, or if there are too many.
        names: keys of the hits whose bytes are compared with their digests, by position.
    """

    epoch: int
    groups: bytes
    offsets: bytes
    names: Mapping[int, bytes] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Result of a lookup or claim.

    A lease pins the hits until the lease is released or expires, or the session ends.

    Attributes:
        id: id of the lease; 0 if there is no hit.
        statuses: one `KeyStatus` per key. In a claim, blocks before `first_positions` have 0.
        prefix_hits: number of leading hits: those before the first key that is not a hit.
        request_id: request that owns the lease.
        keys: the keys that were looked up.
        session: session that owns the lease.
        source_indices: for each key, the index in `session.tiers` of the tier that had the block.
        slots: places of the leading hits in the region; None if not requested, or not known.
        policy: offload policy of the request; None unless the lookup was part of `begin_request`.
        votes: votes of the tiers; empty unless the lookup was part of `begin_request`.
        not_retained: number of hits that the server does not retain for `retain_for`, because the
            tenant has reached its limit, or because their memory is needed for other block sizes.
        hold: for a claim, the description of the hold; None for a lookup.
        source_outcome: result of the search at `source`.
    """

    id: int
    statuses: bytes
    prefix_hits: int
    request_id: str
    keys: Sequence[bytes]
    session: ClientSession
    source_indices: bytes
    slots: LeaseSlots | None = None
    policy: OffloadPolicy | None = None
    votes: tuple[TierVote, ...] = ()
    not_retained: int = 0
    hold: HoldInfo | None = None
    source_outcome: SourceOutcome = SourceOutcome.NONE

    @property
    def sources(self) -> tuple[str, ...]:
        """For each key, the name of the tier that had the block; undefined for misses."""
        return tuple(map(self.session.tiers.__getitem__, self.source_indices))


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Memory to read from: part i is `memory[offsets[i] : offsets[i] + sizes[i]]`.

    `memory` is the mapped region or a staging buffer, and `address` its address. Use the memory
    only within the `with` block.
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
    """Memory to write to: key `wanted[i]` goes to `memory[offsets[i] : offsets[i] + sizes[i]]`.

    `memory` is the mapped region or a staging buffer, and `address` its address. Use the memory
    only within the `with` block.

    Attributes:
        statuses: one `StoreStatus` per key.
        wanted: positions of the keys that are GRANTED.
        not_retained: number of blocks that the server does not retain for `retain_for`, because the
            tenant has reached its limit, or because their memory is needed for other block sizes.
        failed: the caller adds the index i of each block `wanted[i]` that it could not write. The
            server does not store these blocks.
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


class ConversationAction(enum.IntEnum):
    """What to do with the blocks of a conversation.

    RETAIN: keep them for `retain_for` seconds, also those of later requests. RELEASE: end this.
    DEMOTE: evict them next, if a lower tier has them. PREFETCH: load those of the latest request
    into the CPU tier. PIN: keep them until UNPIN (role admin). DELETE: remove those that no other
    conversation uses from all tiers of the server.
    """

    RETAIN = conversation_pb2.CONVERSATION_ACTION_RETAIN
    RELEASE = conversation_pb2.CONVERSATION_ACTION_RELEASE
    DEMOTE = conversation_pb2.CONVERSATION_ACTION_DEMOTE
    PREFETCH = conversation_pb2.CONVERSATION_ACTION_PREFETCH
    PIN = conversation_pb2.CONVERSATION_ACTION_PIN
    UNPIN = conversation_pb2.CONVERSATION_ACTION_UNPIN
    DELETE = conversation_pb2.CONVERSATION_ACTION_DELETE


@dataclass(frozen=True, slots=True)
class ConversationResult:
    """Result of an action. Each block counts once.

    Attributes:
        changed: number of blocks that were changed in any tier, or whose loading has started.
        shared: number of blocks left alone, because another conversation uses them.
        kept: number of blocks left alone for another reason: pinned, in use, in only one tier
            (DEMOTE), beyond the tenant's retention limit, or in the CPU tier already (PREFETCH).
        missing: number of blocks that no tier has.
    """

    changed: int
    shared: int
    kept: int
    missing: int


@dataclass(frozen=True, slots=True)
class BlocksInTier:
    """Blocks of a conversation in one tier.

    Attributes:
        tier: name of the tier.
        blocks: number of blocks.
        nbytes: size of these blocks.
        retained: number of these blocks that are retained.
    """

    tier: str
    blocks: int
    nbytes: int
    retained: int


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """A conversation in one namespace.

    Attributes:
        conversation_id: name of the conversation.
        tenant: its tenant.
        namespace_id: id of the namespace.
        requests: number of requests.
        blocks: number of blocks that the requests have used.
        tiers: the blocks that each tier has now, in lookup order.
        age_seconds: time since the first request.
        idle_seconds: time since the latest request.
        retained_seconds: time until the retention ends; None if it is not retained, or pinned.
        pinned: whether it is pinned.
    """

    conversation_id: str
    tenant: str
    namespace_id: bytes
    requests: int
    blocks: int
    tiers: tuple[BlocksInTier, ...]
    age_seconds: float
    idle_seconds: float
    retained_seconds: float | None
    pinned: bool


@dataclass(frozen=True, slots=True)
class ConversationPage:
    """Some conversations, newest first.

    Attributes:
        conversations: the conversations.
        total: number of all conversations.
        next_page: the argument `page` for the next page; 0 after the last page.
    """

    conversations: tuple[ConversationInfo, ...]
    total: int
    next_page: int
