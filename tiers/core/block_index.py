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

_UNLINKED = NamespaceIndex(invalidated=True)
"""Where blocks are that are out of the index one by one."""


class BlockIndex:
    """The blocks of the CPU tier by namespace and key; and, beside these, those that go as soon as nobody pins them."""

    def __init__(self) -> None:
        self._by_namespace: dict[NamespaceId, NamespaceIndex] = defaultdict(NamespaceIndex)
        self._invalidated: dict[NamespaceId, deque[NamespaceIndex]] = {}
        """Shelves that a reset took away, and that are not cleared yet."""
        self._unlinked: dict[NamespaceId, set[Block]] = {}
        """Blocks on none of these, that were pinned when they were taken from there."""

    def __len__(self) -> int:
        return sum(len(index.blocks) for index in self._by_namespace.values())

    def __iter__(self) -> Iterator[Block]:
        """Iterates over the blocks that can be found."""
        return (block for index in self._by_namespace.values() for block in index.blocks.values())

    def counts(self) -> Iterator[tuple[NamespaceId, int]]:
        """Yields the namespaces that have blocks that can be found, and how many."""
        return ((namespace, len(index.blocks)) for namespace, index in self._by_namespace.items() if index.blocks)

    def of(self, namespace: NamespaceId) -> NamespaceIndex:
        """Returns the shelf of a namespace."""
        return self._by_namespace[namespace]

    def get(self, namespace: NamespaceId, key: bytes) -> Block | None:
        """Returns a block that can be found."""
        index = self._by_namespace.get(namespace)
        return index.blocks.get(key) if index else None

    def invalidate(self, namespace: NamespaceId) -> None:
        """Takes the shelf of a namespace away with all that is on it: nothing of it is found any more."""
        index = self._by_namespace.pop(namespace, None)
        if index and index.blocks:
            index.invalidated = True
            self._invalidated.setdefault(namespace, deque()).append(index)

    def take_invalidated(self, most: int) -> list[Block]:
        """Takes so many blocks at most from shelves that were taken away, the last first; none where these are empty.

        The caller lets go of those that are not pinned; the others are on no shelf from now on, and go when nobody pins them.
        """
        taken: list[Block] = []
        while self._invalidated and len(taken) < most:
            namespace, indexes = next(iter(self._invalidated.items()))
            blocks = indexes[0].blocks
            taken += [blocks.popitem()[1] for _ in range(min(most - len(taken), len(blocks)))]
            if not blocks:
                indexes.popleft()
            if not indexes:
                del self._invalidated[namespace]
        for block in taken:
            self._keep_unlinked(block)
        return taken

    @property
    def resetting(self) -> bool:
        """Whether there is a shelf that was taken away and is not cleared yet."""
        return bool(self._invalidated)

    def pending_reset_blocks(self, namespace: NamespaceId) -> int:
        """Returns how many blocks a reset still waits for; not for those that a tier does not come back from."""
        waited = sum(len(index.blocks) for index in self._invalidated.get(namespace, ()))
        return waited + sum(not block.stalled for block in self._unlinked.get(namespace, ()))

    def unlink(self, block: Block) -> None:
        """Takes a pinned block off its shelf: it goes when nobody pins it any more."""
        del block.namespace_index.blocks[block.key]
        self._keep_unlinked(block)

    def remove(self, block: Block) -> bool:
        """Forgets a block; returns whether it was on a shelf, be it one that a reset took away."""
        index = block.namespace_index
        if index is not _UNLINKED:
            del index.blocks[block.key]
            return True
        pinned = self._unlinked[block.namespace]
        pinned.remove(block)
        if not pinned:
            del self._unlinked[block.namespace]
        return False

    def _keep_unlinked(self, block: Block) -> None:
        block.namespace_index = _UNLINKED
        self._unlinked.setdefault(block.namespace, set()).add(block)
