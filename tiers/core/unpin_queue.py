"""Unpin queue: blocks that ended leases, holds and stores leave pinned; pins are removed in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .block import Block

__all__ = ["UnpinQueue"]

SLICE = 2048
"""Cost of a slice: about 1 ms. The pin of a lease costs 1."""
_ENTRY_COST = 16
"""To end a lease, hold or store takes as long as this number of pins."""


@dataclass(slots=True)
class _Entry:
    remove: Callable[[list[Block]], object]
    blocks: Sequence[Block | None]
    left: int
    """Number of leading blocks that are still pinned."""
    cost: int


class UnpinQueue:
    """The latest entry is first, so that a call pays for its own pins, not for those of others."""

    def __init__(self, continue_if: Callable[[bool], None]) -> None:
        """`continue_if`: if its argument is True, `unpin_slice` is called later."""
        self._continue_if = continue_if
        self._entries: list[_Entry] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, remove: Callable[[list[Block]], object], blocks: Sequence[Block | None], cost: int = 1) -> None:
        """Adds blocks. `remove` removes a pin of each block that it gets, and is called tail first.

        `cost`: of each block.
        """
        if blocks:
            self._entries.append(_Entry(remove, blocks, len(blocks), cost))

    def start(self) -> None:
        """Removes a slice of the pins now, and the others later."""
        self._continue_if(self.unpin_slice())

    def unpin_slice(self) -> bool:
        """Removes a slice of the pins; returns whether pins are left."""
        room = SLICE
        while self._entries and room > 0:
            entry = self._entries[-1]
            end, entry.left = entry.left, max(0, entry.left - max(1, room // entry.cost))
            if not entry.left:
                self._entries.pop()
            room -= _ENTRY_COST + entry.cost * (end - entry.left)
            entry.remove([block for block in entry.blocks[entry.left : end] if block is not None])
        return bool(self._entries)
