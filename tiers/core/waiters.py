"""Which leases, holds or requests wait for which pending blocks."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from .block import Block

__all__ = ["SETTLE_SLICE", "Waiters", "take_items"]

SETTLE_SLICE = 1024
"""Number of waiting items that a slice settles: at most 2 ms."""

W = TypeVar("W", bound=Hashable)


class Waiters(Generic[W]):
    """Per pending block the leases, the holds or the requests that wait for it."""

    def __init__(self) -> None:
        self._by_block: dict[Block, dict[W, None]] = {}

    def __contains__(self, block: Block) -> bool:
        return block in self._by_block

    def of(self, block: Block) -> list[W]:
        return list(self._by_block.get(block, ()))

    def add(self, waiter: W, block: Block) -> None:
        self._by_block.setdefault(block, {})[waiter] = None

    def remove(self, waiter: W, block: Block) -> None:
        waiting = self._by_block[block]
        del waiting[waiter]
        if not waiting:
            del self._by_block[block]


def take_items(awaited: dict[Block, list[int]], block: Block, most: int) -> list[int]:
    """Removes at most `most` items of a block from the items of a lease or hold, the last first."""
    items = awaited[block]
    if len(items) <= most:
        return awaited.pop(block)
    taken = items[-most:]
    del items[-most:]
    return taken
