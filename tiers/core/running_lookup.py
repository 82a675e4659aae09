"""State of a lookup between its slices, and the answer of a lookup."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..types import EngineSession, KeyStatus, MissReason, Owner
from .call_specs import LookupSpec
from .commands import Waiter
from .conversations import Conversation
from .leases import BlockLease
from .prefetches import PrefetchProgress

if TYPE_CHECKING:
    from ..stats.miss_ratio_curve import MissRatioCurves
    from ..stats.request_log import LookupRecord, OutcomeRun

__all__ = ["LOOKUP_SLICE", "LookupAnswer", "RunningLookup"]

LOOKUP_SLICE = 1024
"""Keys per slice of a lookup that are ready in the CPU tier: 1 to 2 µs per key, with the release.
Only a quarter if each key is retained, or recorded for a conversation."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Result of a lookup.

    Attributes:
        keys: number of looked-up keys.
        lease: the lease on the hits; None if there are no hits.
        retries: positions of keys with an outstanding query to a shared tier (B3.15).
        not_retained: number of hits that the CPU tier could not retain.
    """

    keys: int
    lease: BlockLease | None
    retries: Sequence[int] = ()
    not_retained: int = 0

    def statuses(self) -> bytes:
        statuses = self.lease.statuses() if self.lease else bytes([KeyStatus.MISS]) * self.keys
        if not self.retries:
            return statuses
        deferred = bytearray(statuses)
        for position in self.retries:
            deferred[position] = KeyStatus.RETRY
        return bytes(deferred)


@dataclass(slots=True, eq=False)
class RunningLookup:
    """A running lookup. Between two slices its lease owns the pins of the hits.

    Attributes:
        position: number of keys that the slices so far have looked up.
        counted: number of leading keys that were examined for `min_hits` before the first slice.
        is_short: whether there are fewer leading hits than `min_hits`. Then no key is a hit.
        lease: the lease on the hits so far; None if there are none.
        rest: reason of the misses in further slices, if no further key can be a hit.
        record: the lookup in the request log.
        prefetch: progress, if the lookup is a prefetch, which has no lease.
        conversation: records the looked-up keys; None without a conversation.
    """

    session: EngineSession
    owner: Owner
    keys: Sequence[bytes]
    spec: LookupSpec
    excluded: Collection[int]
    retain_until: float
    """End of the retention of the hits, in seconds of the core's clock; 0 for none."""
    slice_keys: int = LOOKUP_SLICE
    """Limit of keys per slice. An eighth of them may be keys that are not ready, at least one."""
    position: int = 0
    counted: int = 0
    is_short: bool = False
    lease: BlockLease | None = None
    retries: list[int] = field(default_factory=list)
    not_retained: int = 0
    rest: MissReason | None = None
    record: LookupRecord | None = None
    uncounted: deque[tuple[Sequence[bytes], tuple[OutcomeRun, ...]]] = field(default_factory=deque)
    """Keys and outcomes of the slices that the miss-ratio curves do not have. These are all slices
    until the last one if there are shared tiers, because a client repeats a lookup with RETRY keys,
    and if there is `min_hits`, because the hits may become misses."""
    prefetch: PrefetchProgress | None = None
    conversation: Conversation | None = None
    may_wait: bool = False
    lacks_room: bool = False
    """Whether the last slice ended before the first block for which there was no room."""
    is_over_budget: bool = False
    """Whether the leases of the tenant pin as much as they may. Other tenants may have room."""
    waiter: Waiter | None = None
    """Place in the room queue, if the lookup waits for room."""
    user: Hashable = None
    """The request, for eviction policies. A lookup in slices counts as one use of its blocks."""

    def answer(self) -> LookupAnswer:
        return LookupAnswer(len(self.keys), self.lease, self.retries, self.not_retained)

    def count_references(self, curves: MissRatioCurves | None) -> bool:
        """Adds one slice to the miss-ratio curves; returns whether uncounted slices are left."""
        if curves is None or self.retries:
            self.uncounted.clear()
        elif self.uncounted:
            curves.looked_up(self.session.namespace, *self.uncounted.popleft())
        return bool(self.uncounted)
