"""Statistics snapshots of the core, for status, health and metrics.

Counters start at 0 when the server starts and never decrease. Every looked-up key is counted once:
as a hit of the tier that had it, or as a miss of all tiers. So in every snapshot, the `hits` of all
tiers plus `lookup_misses` equal `lookup_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..secondary_tier import NamespaceId
from ..types import HandoffDirection, MissReason, ShareStats
from .miss_ratio_curve import HitRatio
from .request_log import ClaimOutcome

__all__ = ["ConversationStats", "HandoffStats", "ManagerStats", "NamespaceStats", "RoomStats", "TierStats"]


@dataclass(frozen=True, slots=True)
class TierStats:
    name: str
    type: str
    """Type of the tier in the configuration, for example "cpu" or "lmdb"."""
    capacity_bytes: int
    available_bytes: int
    """Usable capacity. In the CPU tier it grows until all pages of the region are allocated."""
    used_bytes: int
    blocks: int = 0
    hits: int = 0
    misses: int = 0
    """Keys that were looked up in the tier and not found. The next tier may have them."""
    evictions: int = 0
    dropped: int = 0
    """Blocks that were not stored because the write-back queue or the tier was full."""
    damaged: int = 0
    """Blocks that a load or a check found damaged and dropped. They are never served."""
    expired: int = 0
    """Blocks that were dropped after `ttl` without use."""
    not_retained: int = 0
    """Blocks that were not retained: beyond the retention budget, or in a retiring extent."""
    shares: tuple[ShareStats, ...] = ()
    """Use per tenant with a quota or limit; the default share is the first."""
    declined: int = 0
    """How often the admission filter, or the eviction policy of the CPU tier, declined to store a
    block. A block can count several times."""
    queued_bytes: int = 0
    """Bytes of blocks that are queued or being stored."""
    jobs: int = 0
    """Waiting and running jobs."""
    stored_bytes: int = 0
    """Bytes that engines (CPU tier) or jobs (other tiers) have stored."""
    loaded_bytes: int = 0
    """Bytes that engines (CPU tier) or jobs (other tiers) have loaded."""
    free_disk_bytes: int | None = None
    """Free bytes of the tier's disk; None if unknown."""
    healthy: bool = True
    last_error: str = ""
    shared: bool = False
    """Whether other servers use the same store."""
    estimates: tuple[HitRatio, ...] = ()
    """Estimated hit ratios for other tier sizes; empty if disabled or without enough data."""


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One of the first `MAX_NAMESPACES` namespaces, or the sum of a tenant's other namespaces."""

    namespace: NamespaceId | None
    """Namespace id; None for a sum of several namespaces."""
    tenant: str
    """Name of the tenant if the tenant has a quota, else empty."""
    blocks: tuple[int, ...]
    """Blocks per tier in lookup order; the CPU tier is the first."""
    hits: tuple[int, ...]
    """Keys found, per tier."""
    misses: Mapping[MissReason, int]
    """Keys that no tier had, by reason."""


@dataclass(frozen=True, slots=True)
class ConversationStats:
    """Numbers of recorded conversations and of their keys, and of conversations forgotten."""

    conversations: int = 0
    keys: int = 0
    forgotten: int = 0
    """Conversations that the server has forgotten since the start because of a limit."""


@dataclass(slots=True)
class RoomStats:
    """Waits of lookups for room in the CPU tier."""

    waiting: int = 0
    """Lookups that wait now."""
    waits: int = 0
    """Waits that have begun since the start."""
    waited_seconds: float = 0.0
    """Duration of all waits that have ended."""


@dataclass(frozen=True, slots=True)
class ManagerStats:
    tiers: tuple[TierStats, ...]
    """The tiers in lookup order; the CPU tier is the first."""
    leases: int = 0
    oldest_lease_seconds: float = 0.0
    """Time since the oldest lease was granted; a renewal does not reset it."""
    room: RoomStats = field(default_factory=RoomStats)
    expired_leases: int = 0
    """Leases that expired before their client released them."""
    expired_stores: int = 0
    """Stores that expired because the client did not complete or renew them."""
    stores: int = 0
    quarantined_bytes: int = 0
    """Bytes that are out of use, because a client whose store has ended may still write to them."""
    sessions: int = 0
    namespaces: int = 0
    holds: int = 0
    """Open holds: finished requests whose blocks are held for another engine."""
    held_bytes: int = 0
    """Bytes of the CPU tier pinned by holds; a shared block counts once."""
    handoffs: Mapping[HandoffDirection, HandoffStats] = field(default_factory=dict)
    """Numbers of holds, per direction."""
    conversations: ConversationStats = ConversationStats()
    claims_missed: Mapping[ClaimOutcome, int] = field(default_factory=dict)
    """Failed claims since the start, by outcome."""
    lookup_keys: int = 0
    """Looked-up keys whose outcome (hit or miss) is known. A key that waits for a transfer is
    counted when the transfer has ended."""
    lookup_misses: int = 0
    """Keys that no tier had. In PREFIX mode all keys after the first miss count too."""
    misses_by_reason: Mapping[MissReason, int] = field(default_factory=dict)
    """Number of missed keys, by reason; the sum is `lookup_misses`."""


@dataclass(slots=True)
class HandoffStats:
    """Numbers of holds of one direction: currently open ones, and counters since the start."""

    open: int = 0
    published: int = 0
    declined: int = 0
    """Publications that were refused because of a limit."""
    claimed: int = 0
    """Claims that leased at least one block."""
    released: int = 0
    expired: int = 0
    dropped: int = 0
    """Holds that a reset ended or a new hold replaced."""
    claimed_bytes: int = 0
    held_seconds: float = 0.0
    """Total duration of the ended holds."""
