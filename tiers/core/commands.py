"""What the core asks its shell to do. The core never waits for it: the result comes back as an event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base import NamespaceId
from ..types import JobId, LeaseId
from .block import Block

__all__ = [
    "Command",
    "ContinueWork",
    "HoldChanged",
    "LeaseSettled",
    "LoadFromTier",
    "LookupInTier",
    "RemoveFromTier",
    "StoreInTier",
]


@dataclass(frozen=True, slots=True)
class StoreInTier:
    """Write these blocks to a tier, then report `TierManager.job_finished`. Their slots do not move meanwhile."""

    job_id: JobId
    tier: int
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class LoadFromTier:
    """Fill the slots of these blocks from a tier, then report `TierManager.job_finished`."""

    job_id: JobId
    tier: int
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class LookupInTier:
    """Ask a tier whether it has these blocks, then report `TierManager.lookup_finished`."""

    job_id: JobId
    tier: int
    keys: Sequence[tuple[NamespaceId, bytes]]


@dataclass(frozen=True, slots=True)
class RemoveFromTier:
    """Remove these blocks from a tier, before any store that is asked for later. Nothing is reported."""

    tier: int
    keys: Sequence[tuple[NamespaceId, bytes]]


@dataclass(frozen=True, slots=True)
class LeaseSettled:
    """No block of this lease is pending any more: who waits for it can be answered."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class HoldChanged:
    """A hold was published, has ended, or nothing of it is on its way any more: who waits for it looks again."""

    name: tuple[NamespaceId, str, str]


@dataclass(frozen=True, slots=True)
class ContinueWork:
    """An event was too much to be done at once: call `TierManager.work` as soon as other events have had their turn."""


Command = StoreInTier | LoadFromTier | LookupInTier | RemoveFromTier | LeaseSettled | HoldChanged | ContinueWork
