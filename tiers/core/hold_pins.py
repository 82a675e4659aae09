"""Pins of held blocks, and the hold budgets that these blocks use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..base import NamespaceId
from ..eviction.quotas import RetentionBudget, TenantShare
from .block import Block
from .cpu_tier import CpuTier
from .pin_budget import PinBudget
from .sliced_work import UnpinQueue

__all__ = ["HoldPins"]

_UNPIN_COST = 8
"""Cost of a pin of an ended hold: 0.5 µs, or 3 µs if its removal drops the block."""


class HoldPins:
    """Pins of holds. A block counts once for its budget, however many holds pin it."""

    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        pin_budget: PinBudget,
        unpins: UnpinQueue,
        budgets: Mapping[TenantShare, RetentionBudget],
    ) -> None:
        self._cpu_tier = cpu_tier
        self._pin_budget = pin_budget
        self._unpins = unpins
        self._budgets = budgets
        self._counts: dict[Block, int] = {}
        """Number of pins per block."""

    @property
    def held_bytes(self) -> int:
        return sum(budget.used for budget in set(self._budgets.values()))

    def budget(self, block: Block) -> RetentionBudget:
        return self._budgets[block.queue.share]

    def pin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.pins += 1
            if block not in self._counts:
                self.budget(block).used += block.allocated_bytes
                self._pin_budget.begin_hold(block)
                block.evict_on_unpin = False
            self._counts[block] = self._counts.get(block, 0) + 1

    def unpin(self, namespace: NamespaceId, blocks: Sequence[Block | None]) -> None:
        """Adds pins to the unpin queue. A hold-only block is dropped with its last pin."""
        self._unpins.add(namespace, self._unpin, blocks, _UNPIN_COST)

    def unpin_later(self, namespace: NamespaceId, blocks: Sequence[Block]) -> None:
        """As `unpin`, and requests a slice of the queue."""
        self.unpin(namespace, blocks)
        self._unpins.continue_if(bool(blocks))

    def _unpin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                self.budget(block).used -= block.allocated_bytes
                self._pin_budget.end_hold(block)
                block.evict_on_unpin = block.hold_only
        if not self._counts:
            self._counts = {}  # a dict keeps the memory of its largest size
        self._cpu_tier.queues.unprotect(block for block in blocks if block not in self._counts)
        self._cpu_tier.unpin(blocks)
