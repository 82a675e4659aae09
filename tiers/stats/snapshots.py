"""Statistics snapshots: the source of status, health and metrics.

Counters start at the server's start and never decrease. Every looked-up key is counted once, as a
hit of the tier that had it or as a miss of the whole lookup, so that

    sum(tier.hits for tier in stats.tiers) + stats.lookup_misses == stats.lookup_keys

holds in every snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..base import NamespaceId
from ..types import HandoffDirection, MissReason, ShareStats
from .miss_ratio_curve import HitRatio
from .request_log import ClaimOutcome

__all__ = ["HandoffStats", "ManagerStats", "NamespaceStats", "TierStats"]


@dataclass(frozen=True, slots=True)
class TierStats:
    name: str
    """Its name; also a metric label."""
    type: str
    """Its type in the configuration, for example "cpu" or "lmdb"."""
    capacity_bytes: int
    available_bytes: int
    """Usable capacity: the CPU tier grows until all its pages are backed."""
    used_bytes: int
    blocks: int = 0
    hits: int = 0
    misses: int = 0
    """Keys looked up in it and not found. They may be found in the next tier."""
    evictions: int = 0
    dropped: int = 0
    """Blocks not stored because its queue or the tier was full."""
    damaged: int = 0
    """Blocks lost because they were damaged, found by a load or a check. They are never served."""
    expired: int = 0
    """Blocks dropped after `ttl` without use."""
    not_retained: int = 0
    """Blocks that exceeded the retention budget."""
    shares: tuple[ShareStats, ...] = ()
    """Use per tenant with a quota or limit; the default share is the first."""
    declined: int = 0
    """Uses of blocks that its admission filter rejected."""
    queued_bytes: int = 0
    """Bytes waiting to be stored or being stored."""
    jobs: int = 0
    """Waiting and running jobs."""
    healthy: bool = True
    """Whether it has no error; otherwise see `last_error`."""
    last_error: str = ""
    estimates: tuple[HitRatio, ...] = ()
    """Estimated hit ratios for other sizes; empty without enough data, or if disabled."""


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace, or the later namespaces of one tenant (see `HitCounters`)."""

    namespace: NamespaceId | None
    """Its id; None for several namespaces."""
    tenant: str
    """Its tenant if that has a quota, else empty."""
    blocks: tuple[int, ...]
    """Blocks per tier in lookup order; the CPU tier is the first."""
    hits: tuple[int, ...]
    """Keys found, per tier."""
    misses: Mapping[MissReason, int]
    """Keys that no tier had, by reason."""


@dataclass(frozen=True, slots=True)
class ManagerStats:
    tiers: tuple[TierStats, ...]
    """The tiers in lookup order; the CPU tier is the first."""
    leases: int = 0
    oldest_lease_seconds: float = 0.0
    """Age of the oldest lease, renewals included."""
    expired_leases: int = 0
    """Leases that expired before their client released them."""
    expired_stores: int = 0
    """Stores that expired because their writer was silent."""
    stores: int = 0
    quarantined_bytes: int = 0
    """Bytes out of use because a client that lost its store may still write to them."""
    sessions: int = 0
    namespaces: int = 0
    holds: int = 0
    """Requests held for a hand-off."""
    held_bytes: int = 0
    """Bytes of the CPU tier pinned by holds; a shared block counts once."""
    handoffs: Mapping[HandoffDirection, HandoffStats] = field(default_factory=dict)
    """Holds since the start, per direction."""
    claims_missed: Mapping[ClaimOutcome, int] = field(default_factory=dict)
    """Failed claims since the start, by outcome."""
    lookup_keys: int = 0
    """Keys with a known outcome."""
    lookup_misses: int = 0
    """Keys that no tier had; in PREFIX mode also those behind the first miss."""
    misses_by_reason: Mapping[MissReason, int] = field(default_factory=dict)
    """The same by reason."""


@dataclass(slots=True)
class HandoffStats:
    """Holds of one direction since the start, each counted once, and the open ones."""

    open: int = 0
    published: int = 0
    declined: int = 0
    """Publications refused because of a limit."""
    claimed: int = 0
    """Claims that were granted blocks."""
    released: int = 0
    expired: int = 0
    dropped: int = 0
    """Holds ended by a reset or replaced."""
    claimed_bytes: int = 0
    held_seconds: float = 0.0
    """Total duration of the ended holds."""
