"""Figures of the tiers at one moment: what status, health and metrics are made of.

Counters run from the server's start and never fall. Every key that is looked up is counted once: as a hit of the tier
that answered for it, or as a miss of the whole lookup, so that

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
    """One tier at one moment."""

    name: str
    """Its name, for people and as a metric label."""
    type: str
    """What the configuration chooses it by, for example "cpu" or "lmdb"."""
    capacity_bytes: int
    """What it may hold at most."""
    available_bytes: int
    """What it can hold now: the CPU tier grows while its pages are being backed."""
    used_bytes: int
    """What it holds."""
    blocks: int = 0
    """Blocks that it holds."""
    hits: int = 0
    """Keys found in it since start."""
    misses: int = 0
    """Keys asked of it and not found in it since start; a key may well be found in the next tier."""
    evictions: int = 0
    """Blocks evicted from it since start."""
    dropped: int = 0
    """Blocks that were not stored in it since start, because its queue or the tier itself was full."""
    damaged: int = 0
    """Blocks that it lost since start because they were damaged: found by a load or by a check, and never served."""
    expired: int = 0
    """Blocks that went since start because they were not used for as long as the tier's `ttl`."""
    not_retained: int = 0
    """Blocks that requests wanted to retain since start, beyond what may be retained."""
    shares: tuple[ShareStats, ...] = ()
    """Who has what of it: the rest, and each tenant with a share of its own."""
    declined: int = 0
    """Uses of blocks since start that its admission filter did not take in."""
    queued_bytes: int = 0
    """What waits to be stored in it, or is being stored."""
    jobs: int = 0
    """Jobs that wait or run."""
    healthy: bool = True
    """Whether all is well; otherwise `trouble` says what is not."""
    last_error: str = ""
    """What is wrong, for people."""
    estimates: tuple[HitRatio, ...] = ()
    """What it would answer if it had another size; empty where too little is known, or it is not to be estimated."""


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """One namespace at one moment, or those of a tenant that are not told apart (`Tally`)."""

    namespace: NamespaceId | None
    """Its id; None for those that are not told apart."""
    tenant: str
    """Name of its tenant where that has a share of its own, else empty."""
    blocks: tuple[int, ...]
    """Blocks per tier, in lookup order; the CPU tier is the first."""
    hits: tuple[int, ...]
    """Keys found since start, likewise."""
    misses: Mapping[MissReason, int]
    """Looked-up keys that no tier answered for since start, by reason."""


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """All tiers, and what pins their blocks, at one moment."""

    tiers: tuple[TierStats, ...]
    """The tiers in lookup order; the first is the CPU tier."""
    leases: int = 0
    """Leases that are held."""
    oldest_lease_seconds: float = 0.0
    """For how long the oldest of them has been held, renewals included."""
    expired_leases: int = 0
    """Leases since start that ended because their time was over: nobody gave them back."""
    expired_stores: int = 0
    """Stores since start that ended because their writer was silent for too long."""
    stores: int = 0
    """Stores that are in flight."""
    quarantined_bytes: int = 0
    """Bytes kept out of use because a process that lost its store may still write to them."""
    sessions: int = 0
    """Open sessions."""
    namespaces: int = 0
    """Namespaces seen since start."""
    holds: int = 0
    """Requests that are held to be handed to another engine."""
    held_bytes: int = 0
    """Bytes of the CPU tier that holds pin; what several hold counts once."""
    handoffs: Mapping[HandoffDirection, HandoffStats] = field(default_factory=dict)
    """What has become of all holds, per direction."""
    claims_missed: Mapping[ClaimOutcome, int] = field(default_factory=dict)
    """Claims since start that did not find their hold, by what they met."""
    lookup_keys: int = 0
    """Keys that were answered for since start."""
    lookup_misses: int = 0
    """Looked-up keys that no tier answered for since start; in PREFIX mode also those behind the first miss."""
    misses_by_reason: Mapping[MissReason, int] = field(default_factory=dict)
    """Why those keys were missed; adds up to `lookup_misses`."""


@dataclass(slots=True)
class HandoffStats:
    """What has become of the holds of one direction since start, each counted once; and what is open."""

    open: int = 0
    published: int = 0
    declined: int = 0
    """Publications that were beyond what may be held."""
    claimed: int = 0
    """Claims that were granted something."""
    released: int = 0
    expired: int = 0
    dropped: int = 0
    """Holds that ended with a reset, or were replaced."""
    claimed_bytes: int = 0
    held_seconds: float = 0.0
    """For how long the holds that have ended kept their blocks from eviction, added up."""
