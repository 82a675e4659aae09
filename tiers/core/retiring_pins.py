"""Pins in retiring extents: ends leases, stores and holds that pin their blocks for too long.

A lease or store ends as if it had expired. A hold gives up the blocks, so that its claims miss
them. Pins of jobs end with the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .block import Block
from .cpu_tier import CpuTier
from .handoffs import HandoffHandler
from .holds import Hold
from .in_flight_stores import InFlightStores, Store
from .leases import BlockLease, LeaseTable
from .operations import Operation
from .slot_allocator import Extent

__all__ = ["RetiringPins"]

SLICE = 65_536
"""Number of items that a slice compares: about 2 ms."""
_COST = 64
"""To examine a lease, store or hold takes as long as this number of items."""
_SLOT_COST = 8
"""To find the block of a slot takes as long as this number of items."""


class RetiringPins:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        leases: LeaseTable,
        stores: InFlightStores,
        handoffs: HandoffHandler,
        settle: Callable[[Sequence[Block]], None],
        expire: Callable[[Sequence[BlockLease], Sequence[Store]], None],
        perform: Callable[[Operation[None]], None],
    ) -> None:
        """`expire` ends leases and stores without their clients.

        `perform` performs an operation that no call waits for.
        """
        self._cpu_tier = cpu_tier
        self._retiring = cpu_tier.retiring
        self._leases = leases
        self._stores = stores
        self._handoffs = handoffs
        self._settle = settle
        self._expire = expire
        self._perform = perform
        self.runs = False
        """Whether the pins of an earlier tick are still being ended."""

    def tick(self) -> None:
        """Ends the pins in all extents that retire for too long."""
        if not self.runs and (extents := self._retiring.overdue()):
            self._perform(self._end_pins(extents))

    def _end_pins(self, extents: Sequence[Extent]) -> Operation[None]:
        self.runs, room = True, SLICE
        try:
            blocks: set[Block] = set()
            for extent in extents:
                blocks |= self._retiring.overdue_among(self._retiring.blocks_in(extent))
                room -= _SLOT_COST * extent.used
                if room <= 0:
                    yield None
                    room, blocks = SLICE, self._retiring.overdue_among(blocks)
            pinning: list[BlockLease | Store | Hold] = [*self._leases, *self._stores, *self._handoffs.all()]
            for each in pinning:
                items = each.blocks if isinstance(each, Store) else each.items
                if not blocks.isdisjoint(items):
                    self._end(each, blocks)
                room -= _COST + len(items)
                if room <= 0:
                    yield None
                    room, blocks = SLICE, self._retiring.overdue_among(blocks)
            self._drop_incomplete(blocks)
        finally:
            self.runs = False

    def _end(self, pinning: BlockLease | Store | Hold, blocks: Collection[Block]) -> None:
        if isinstance(pinning, BlockLease):
            if self._leases.is_open(pinning):
                self._expire([pinning], [])
        elif isinstance(pinning, Hold):
            self._handoffs.release_blocks(pinning, blocks)
        elif self._stores.is_open(pinning) and pinning.failed is None:
            self._expire([], [pinning])

    def _drop_incomplete(self, blocks: Collection[Block]) -> None:
        """Removes blocks that lack a part, and are not written or loaded, from the index."""
        incomplete = [block for block in blocks if block.pins and not block.ready and not block.pending]
        incomplete = sorted((block for block in incomplete if not block.invalidated), key=lambda block: block.name)
        for block in incomplete:
            self._cpu_tier.unlink(block)
        self._settle(incomplete)
