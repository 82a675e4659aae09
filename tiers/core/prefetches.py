"""Prefetches: the limit of the bytes that they load, and their progress.

A prefetch is a lookup of a prefix that is not counted in the statistics. Its lease ends with the
call, but the promotions continue. A loading block is pinned, so that without a limit one client
could pin the whole CPU tier. Without a share of each tenant, one tenant could use up the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..types import tenant_of
from .block import Block
from .pin_budget import affordable
from .slot_allocator import SlotAllocator

__all__ = ["PrefetchAnswer", "PrefetchBudget", "PrefetchProgress"]

MAX_LOADING_PART = 0.5
"""Largest part of the memory that the running promotions of all prefetches may take. A tenant gets
at most as much as is then free, so one tenant alone gets a half of it."""


@dataclass(frozen=True, slots=True)
class PrefetchAnswer:
    """Result of a prefetch. Each key counts once, except for `not_retained`.

    Attributes:
        present: number of leading keys that are in the CPU tier, or on their way for other calls.
        started: number of leading keys whose promotion the prefetch has started.
        missing: number of keys from the first one that no tier has.
        no_room: number of keys from the first one that found no room in the CPU tier.
        unanswered: number of keys with an outstanding query to a shared tier.
        not_retained: number of blocks that are not retained as requested.
    """

    present: int
    started: int
    missing: int
    no_room: int
    unanswered: int
    not_retained: int


@dataclass(slots=True)
class PrefetchProgress:
    present: int = 0
    started: int = 0
    has_room: bool = True

    def add(self, *, present: int, started: int, has_room: bool) -> None:
        self.present += present
        self.started += started
        self.has_room &= has_room

    def answer(self, keys: int, unanswered: int, not_retained: int) -> PrefetchAnswer:
        rest = max(0, keys - self.present - self.started - unanswered)
        missing, no_room = (rest, 0) if self.has_room else (0, rest)
        return PrefetchAnswer(self.present, self.started, missing, no_room, unanswered, not_retained)


class PrefetchBudget:
    """Limit of the bytes of blocks that prefetches are loading, in all and per tenant."""

    def __init__(self, memory: SlotAllocator) -> None:
        self.loading_bytes = 0
        self._memory = memory
        self._loading: set[Block] = set()
        self._by_tenant: Counter[bytes] = Counter()
        """Bytes of the loading blocks, by the tag of the tenant."""

    @property
    def limit_bytes(self) -> int:
        return int(self._memory.available_bytes() * MAX_LOADING_PART)

    def admitted(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Returns the leading blocks, all of one tenant, that may be loaded now."""
        own = self._by_tenant[tenant_of(blocks[0].namespace)] if blocks else 0
        sizes = (block.allocated_bytes for block in blocks)
        return blocks[: affordable(sizes, free=self.limit_bytes - self.loading_bytes, own=own)]

    def started(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._loading.add(block)
            self.loading_bytes += block.allocated_bytes
            self._by_tenant[tenant_of(block.namespace)] += block.allocated_bytes

    def ended(self, blocks: Iterable[Block]) -> None:
        """Called when the job of these blocks has ended, whether a prefetch started it or not."""
        for block in blocks if self._loading else ():
            if block in self._loading:
                self._loading.remove(block)
                self.loading_bytes -= block.allocated_bytes
                tenant = tenant_of(block.namespace)
                self._by_tenant[tenant] -= block.allocated_bytes
                if not self._by_tenant[tenant]:
                    del self._by_tenant[tenant]
