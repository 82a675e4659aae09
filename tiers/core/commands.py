"""Commands from the core to the server, which reports results by calling `TierManager`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..secondary_tier import NamespaceId
from ..types import JobId, LeaseId
from .block import Block

__all__ = [
    "Change",
    "Command",
    "ContinueWork",
    "EndReaders",
    "EventsRecorded",
    "HoldChanged",
    "LeaseSettled",
    "LoadFromTier",
    "LookupInTier",
    "RemoveFromTier",
    "RequestsSettled",
    "RoomOffered",
    "StoreInTier",
    "Waiter",
]


@dataclass(frozen=True, slots=True)
class StoreInTier:
    """Store blocks in a tier, then call `TierManager.job_finished`. Slots are valid until then."""

    job_id: JobId
    tier: int
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class LoadFromTier:
    """Load blocks from a tier into their slots, then call `TierManager.job_finished`."""

    job_id: JobId
    tier: int
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class LookupInTier:
    """Ask a tier which blocks it has, then call `TierManager.lookup_finished`."""

    job_id: JobId
    tier: int
    keys: Sequence[tuple[NamespaceId, bytes]]


@dataclass(frozen=True, slots=True)
class RemoveFromTier:
    """Remove blocks from a tier, before the stores of later commands; the core needs no result."""

    tier: int
    keys: Sequence[tuple[NamespaceId, bytes]]


@dataclass(frozen=True, slots=True)
class LeaseSettled:
    """A lease has no pending block any more: the server can answer a client that waits for it."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class RequestsSettled:
    """Slices have told requests of blocks: calls that wait for the end of requests look again."""


@dataclass(frozen=True, slots=True)
class EndReaders:
    """A lease with readers has ended: end the copies from its slots, which stay pinned."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class HoldChanged:
    """A hold was published, has ended or has no pending block: wake clients that wait for it."""

    name: tuple[NamespaceId, str, str]


@dataclass(frozen=True, slots=True)
class EventsRecorded:
    """An event log that was read to its end has new events: wake its readers."""

    scope: bytes | None
    """The scope of the log, see `EventLog.watch`."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A lookup that waits for room in the CPU tier; see `RoomQueue`."""

    session_id: bytes
    namespace: NamespaceId
    since: float
    """Begin and end of the wait, in seconds of the core's clock."""
    until: float
    is_offered: bool = False
    """Whether there may be room. The waiter then tries again, and clears this."""


@dataclass(frozen=True, slots=True)
class Change:
    """An operation waits for a change, such as the end of a job or a tick.

    It counts from the step that returned this, and the wait ends at the latest at `until`.
    """

    until: float


@dataclass(frozen=True, slots=True)
class RoomOffered:
    """There may be room for a waiting lookup: wake it."""

    waiter: Waiter


@dataclass(frozen=True, slots=True)
class ContinueWork:
    """Incremental work is left: call `TierManager.work` after other events have been handled."""


Command = (
    StoreInTier
    | LoadFromTier
    | LookupInTier
    | RemoveFromTier
    | LeaseSettled
    | RequestsSettled
    | EndReaders
    | HoldChanged
    | EventsRecorded
    | RoomOffered
    | ContinueWork
)
