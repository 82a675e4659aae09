"""Which leases, holds or requests wait for which pending blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from .block import Block
from .operations import Operation

__all__ = ["Waiters", "settle_in_slices", "take_items"]

SETTLE_SLICE = 1024
"""Number of waiting items that a slice settles: at most 2 ms."""

W = TypeVar("W", bound=Hashable)


class Waiters(Generic[W]):
    """Per pending block the leases, the holds or the requests that wait for it."""

    def __init__(self) -> None:
        self._by_block: dict[Block, dict[W, None]] = {}

    def among(self, blocks: Sequence[Block]) -> set[Block]:
        """Returns the blocks that a lease, hold or request waits for."""
        return self._by_block.keys() & blocks if self._by_block else set()

    def of(self, block: Block) -> list[W]:
        return list(self._by_block.get(block, ()))

    def add(self, waiter: W, block: Block) -> None:
        self._by_block.setdefault(block, {})[waiter] = None

    def remove(self, waiter: W, block: Block) -> None:
        waiting = self._by_block[block]
        del waiting[waiter]
        if not waiting:
            del self._by_block[block]


def settle_in_slices(waits: Iterable[tuple[Callable[[int], int], Block]]) -> Operation[None]:
    """Ends waits for blocks that are no longer pending, 1,024 items per slice.

    `waits`: per lease, hold or request and block, a function that ends the wait of at most the
    given number of items, and returns their number. Fewer than given means that none is left. A
    block that is pending again is left to its next end.
    """
    room = SETTLE_SLICE
    for settle, block in waits:
        room -= 1
        items = most = 0
        while items >= most and not block.pending:
            most = max(1, room)
            items = settle(most)
            room -= items
            if room <= 0:
                yield None
                room = SETTLE_SLICE
        if room <= 0:
            yield None
            room = SETTLE_SLICE


def take_items(awaited: dict[Block, list[int]], block: Block, most: int) -> list[int]:
    """Removes at most `most` items of a block from the items of a lease or hold, the last first."""
    items = awaited[block]
    if len(items) <= most:
        return awaited.pop(block)
    taken = items[-most:]
    del items[-most:]
    return taken
