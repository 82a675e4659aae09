"""Shelves: the index of the CPU tier, and what a reset has taken out of it.

A reset takes the whole shelf of a namespace away, which costs nothing however full it is: from then on nobody finds what is on
it. What is on it goes afterwards, in slices, for the loop is not to be held up: a million blocks take seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from ..base import NamespaceId
from .block import Block, NamespaceIndex

__all__ = ["BlockIndex"]

_NOWHERE = NamespaceIndex(retired=True)
"""Where blocks are that are out of the index one by one."""


class BlockIndex:
    """The blocks of the CPU tier by namespace and key; and, beside these, those that go as soon as nobody pins them."""

    def __init__(self) -> None:
        self._of: dict[NamespaceId, NamespaceIndex] = defaultdict(NamespaceIndex)
        self._resetting: dict[NamespaceId, deque[NamespaceIndex]] = {}
        """Shelves that a reset took away, and that are not cleared yet."""
        self._pinned: dict[NamespaceId, set[Block]] = {}
        """Blocks on none of these, that were pinned when they were taken from there."""

    def __len__(self) -> int:
        return sum(len(shelf.blocks) for shelf in self._of.values())

    def __iter__(self) -> Iterator[Block]:
        """Iterates over the blocks that can be found."""
        return (block for shelf in self._of.values() for block in shelf.blocks.values())

    def counts(self) -> Iterator[tuple[NamespaceId, int]]:
        """Yields the namespaces that have blocks that can be found, and how many."""
        return ((namespace, len(shelf.blocks)) for namespace, shelf in self._of.items() if shelf.blocks)

    def of(self, namespace: NamespaceId) -> NamespaceIndex:
        """Returns the shelf of a namespace."""
        return self._of[namespace]

    def get(self, namespace: NamespaceId, key: bytes) -> Block | None:
        """Returns a block that can be found."""
        shelf = self._of.get(namespace)
        return shelf.blocks.get(key) if shelf else None

    def take_away(self, namespace: NamespaceId) -> None:
        """Takes the shelf of a namespace away with all that is on it: nothing of it is found any more."""
        shelf = self._of.pop(namespace, None)
        if shelf and shelf.blocks:
            shelf.retired = True
            self._resetting.setdefault(namespace, deque()).append(shelf)

    def take_from_reset(self, most: int) -> list[Block]:
        """Takes so many blocks at most from shelves that were taken away, the last first; none where these are empty.

        The caller lets go of those that are not pinned; the others are on no shelf from now on, and go when nobody pins them.
        """
        taken: list[Block] = []
        while self._resetting and len(taken) < most:
            namespace, shelves = next(iter(self._resetting.items()))
            blocks = shelves[0].blocks
            taken += [blocks.popitem()[1] for _ in range(min(most - len(taken), len(blocks)))]
            if not blocks:
                shelves.popleft()
            if not shelves:
                del self._resetting[namespace]
        for block in taken:
            self._pin_down(block)
        return taken

    @property
    def resetting(self) -> bool:
        """Whether there is a shelf that was taken away and is not cleared yet."""
        return bool(self._resetting)

    def retiring(self, namespace: NamespaceId) -> int:
        """Returns how many blocks a reset still waits for; not for those that a tier does not come back from."""
        waited = sum(len(shelf.blocks) for shelf in self._resetting.get(namespace, ()))
        return waited + sum(not block.stuck for block in self._pinned.get(namespace, ()))

    def disown(self, block: Block) -> None:
        """Takes a pinned block off its shelf: it goes when nobody pins it any more."""
        del block.shelf.blocks[block.key]
        self._pin_down(block)

    def remove(self, block: Block) -> bool:
        """Forgets a block; returns whether it was on a shelf, be it one that a reset took away."""
        shelf = block.shelf
        if shelf is not _NOWHERE:
            del shelf.blocks[block.key]
            return True
        pinned = self._pinned[block.namespace]
        pinned.remove(block)
        if not pinned:
            del self._pinned[block.namespace]
        return False

    def _pin_down(self, block: Block) -> None:
        block.shelf = _NOWHERE
        self._pinned.setdefault(block.namespace, set()).add(block)
