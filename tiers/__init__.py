"""Tiered block cache: the decision core, the tier contract and the storage tiers.

The core (`core`, `eviction`, `stats`) does no I/O, reads no clock and uses no threads. The storage
tiers (`lmdb`, `disk`) do I/O on the thread that calls them. This module exports all names that an
author of a tier needs. Numbers like (B4.3) cite docs/behaviour.md.
"""

from __future__ import annotations

from .negotiation import vote
from .secondary_tier import (
    BlockBytes,
    Entry,
    Medium,
    NamespaceId,
    OffloadPolicy,
    Outcome,
    RequestInfo,
    SecondaryTier,
    TierDamagedError,
    TierError,
    TierFilter,
    TierInUseError,
    TierOpenError,
    Vote,
)
from .storage.checksum import block_checksum
from .storage.health import TierHealth

__all__ = [
    "BlockBytes",
    "Entry",
    "Medium",
    "NamespaceId",
    "OffloadPolicy",
    "Outcome",
    "RequestInfo",
    "SecondaryTier",
    "TierDamagedError",
    "TierError",
    "TierFilter",
    "TierHealth",
    "TierInUseError",
    "TierOpenError",
    "Vote",
    "block_checksum",
    "vote",
]
