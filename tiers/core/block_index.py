"""Block index of the CPU tier: blocks by namespace and key, with invalidation for resets.

A reset removes the index of a whole namespace in constant time, so lookups no longer find the
blocks. The blocks are then dropped in slices, because dropping a million blocks takes seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from ..secondary_tier import NamespaceId
from .block import Block, NamespaceIndex

__all__ = ["KEPT_EMPTY", "BlockIndex"]

KEPT_EMPTY = 1024
"""Number of namespaces without blocks that may stay in a tier's index, about 350 bytes each."""

_RESET = NamespaceIndex(invalidated=True)
"""Marks pinned blocks from before a reset, which waits for the end of their pins."""
_UNLINKED = NamespaceIndex(invalidated=True)
"""Marks other pinned blocks that are in no index any more."""


class BlockIndex:
    def __init__(self, on_end: Callable[[NamespaceIndex], object] = lambda _: None) -> None:
        """`on_end` gets each index of a namespace that lookups will not find any more."""
        self._on_end = on_end
        self._by_namespace: dict[NamespaceId, NamespaceIndex] = defaultdict(NamespaceIndex)
        self._invalidated: dict[NamespaceId, deque[NamespaceIndex]] = {}
        """Indexes that a reset has invalidated and whose blocks are not dropped yet."""
        self._reset: dict[NamespaceId, set[Block]] = {}
        """Pinned blocks that a reset has removed from their index."""
        self._unlinked: dict[NamespaceId, set[Block]] = {}
        """Other pinned blocks that were removed from their index."""
        self._sweep_at = KEPT_EMPTY

    def __len__(self) -> int:
        return sum(len(index.blocks) for index in self._by_namespace.values())

    def __iter__(self) -> Iterator[Block]:
        return (block for index in self._by_namespace.values() for block in index.blocks.values())

    def counts(self) -> Iterator[tuple[NamespaceId, int]]:
        return ((namespace, len(index.blocks)) for namespace, index in self._by_namespace.items() if index.blocks)

    def of(self, namespace: NamespaceId) -> NamespaceIndex:
        return self._by_namespace[namespace]

    def get(self, namespace: NamespaceId, key: bytes) -> Block | None:
        index = self._by_namespace.get(namespace)
        return index.blocks.get(key) if index else None

    def forget_empty(self) -> None:
        """Removes the namespaces without blocks if there may be many. Call it between events."""
        if len(self._by_namespace) > self._sweep_at:
            for namespace in [each for each, index in self._by_namespace.items() if not index.blocks]:
                self._on_end(self._by_namespace.pop(namespace))
            self._sweep_at = 2 * len(self._by_namespace) + KEPT_EMPTY

    def invalidate(self, namespace: NamespaceId) -> None:
        index = self._by_namespace.pop(namespace, None)
        if index is not None:
            self._on_end(index)
        if index and index.blocks:
            index.invalidated = True
            self._invalidated.setdefault(namespace, deque()).append(index)
        for block in self._unlinked.pop(namespace, ()):
            self._keep(block, _RESET)

    def take_invalidated(self, most: int) -> list[Block]:
        """Unlinks up to `most` blocks of invalidated indexes, latest first, and returns them.

        The caller must drop blocks without pins. Pinned blocks are dropped when the last pin ends.
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
            self._keep(block, _RESET)
        return taken

    @property
    def resetting(self) -> bool:
        return bool(self._invalidated)

    def pending_reset_blocks(self, namespace: NamespaceId) -> int:
        """Returns how many blocks a reset must still drop, except those in a stalled tier's job."""
        if not self._invalidated and not self._reset:  # the usual case, for each slice of a lookup
            return 0
        waited = sum(len(index.blocks) for index in self._invalidated.get(namespace, ()))
        return waited + sum(not block.stalled for block in self._reset.get(namespace, ()))

    def unlink(self, block: Block) -> None:
        """Removes a pinned block from the index. The block is dropped when its last pin ends."""
        del block.namespace_index.blocks[block.key]
        self._keep(block, _UNLINKED)

    def remove(self, block: Block) -> bool:
        """Removes a block; returns whether it was in an index, valid or invalidated."""
        index = block.namespace_index
        if index is not _UNLINKED and index is not _RESET:
            del index.blocks[block.key]
            return True
        kept = self._reset if index is _RESET else self._unlinked
        pinned = kept[block.namespace]
        pinned.remove(block)
        if not pinned:
            del kept[block.namespace]
        return False

    def _keep(self, block: Block, mark: NamespaceIndex) -> None:
        block.namespace_index = mark
        kept = self._reset if mark is _RESET else self._unlinked
        kept.setdefault(block.namespace, set()).add(block)
