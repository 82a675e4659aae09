"""Overdue pins: ends the leases, stores and holds that pin blocks in retiring extents for too long.

A lease or store ends as if it had expired. A hold gives up the blocks, so that its claims miss
them. Pins of jobs end with the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from .block import Block
from .cpu_tier import CpuTier
from .handoffs import HandoffHandler
from .holds import Hold
from .in_flight_stores import InFlightStores, Store
from .leases import BlockLease, LeaseTable

__all__ = ["OverduePins"]

SLICE = 65_536
"""Number of items that a slice compares: about 2 ms."""
_COST = 64
"""To examine a lease, store or hold takes as long as this number of items."""


class OverduePins:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        leases: LeaseTable,
        stores: InFlightStores,
        handoffs: HandoffHandler,
        settle: Callable[[Sequence[Block]], None],
        end_leases: Callable[[Collection[BlockLease]], None],
        abandon: Callable[[Store], None],
    ) -> None:
        self._cpu_tier = cpu_tier
        self._leases = leases
        self._stores = stores
        self._handoffs = handoffs
        self._settle = settle
        self._end_leases = end_leases
        self._abandon = abandon
        self._blocks: frozenset[Block] = frozenset()
        self._left: list[BlockLease | Store | Hold] = []
        """What may pin any of the blocks, and was not examined."""

    def begin(self, blocks: Iterable[Block]) -> bool:
        """Begins to end the pins of blocks; returns whether `end_slice` must follow.

        While it runs, it goes on with those of its blocks that are still overdue.
        """
        runs, now = bool(self._left), frozenset(blocks)
        self._blocks = self._blocks & now if runs else now
        if not self._blocks:
            self._left = []
        elif not runs:
            self._left = [*self._leases, *self._stores, *self._handoffs.all()]
        return self.end_slice()

    def end_slice(self) -> bool:
        """Ends a slice of the pins; returns whether any may be left."""
        room = SLICE
        while self._left and room > 0:
            pinning = self._left.pop()
            items = pinning.blocks if isinstance(pinning, Store) else pinning.items
            room -= _COST + len(items)
            if not self._blocks.isdisjoint(items):
                self._end(pinning)
        if self._blocks and not self._left:
            self._drop_incomplete()
            self._blocks = frozenset()
        return bool(self._left)

    def _end(self, pinning: BlockLease | Store | Hold) -> None:
        if isinstance(pinning, BlockLease):
            if self._leases.is_open(pinning):
                self._end_leases([pinning])
        elif isinstance(pinning, Hold):
            self._handoffs.give_up(pinning, self._blocks)
        elif self._stores.is_open(pinning) and pinning.failed is None:
            self._abandon(pinning)

    def _drop_incomplete(self) -> None:
        """Removes blocks that lack a part, and are not written or loaded, from the index."""
        blocks = [block for block in self._blocks if block.pins and not block.ready and not block.pending]
        blocks = sorted((block for block in blocks if not block.invalidated), key=lambda block: block.name)
        for block in blocks:
            self._cpu_tier.unlink(block)
        self._settle(blocks)
