"""Storing blocks just before the engine would evict them (B4.7): fewer copies than storing all, none for what stays in use."""

from __future__ import annotations

from collections.abc import Iterable

from .backoff import Backoff
from .engine import BlockPool, FreeBlock
from .groups import CacheGeometry
from .saves import EndedSave

__all__ = ["LazyWalk"]

# Two steps' worth: while one step's blocks are taken the next one's are being copied.
_STEPS_AHEAD = 2
# The server does not say what it evicts, so what is stored is believed so long, and up to twice as long. Then a block that was used
# meanwhile is offered again: where the server still has it, that costs a name in a call.
_BELIEVED_S = 60.0


class LazyWalk:
    """Walks the engine's free blocks from the eviction end, so many per step as the next steps may take.

    The cursor is the last block that was visited and stayed free: those before it are stored, on their way, or not worth storing.
    What the engine frees joins the queue behind it.
    """

    def __init__(self, geometry: CacheGeometry, batched_tokens: int, pool: BlockPool) -> None:
        self.target = _STEPS_AHEAD * sum(group.blocks_per_step(batched_tokens) for group in geometry.groups)
        self._pool = pool
        self._cursor: FreeBlock | None = None
        # By block: the content that the store is known to have. The engine's own blocks bound it, and a block that was reused
        # has another key. What was learned last, and what before.
        self._stored: dict[int, bytes] = {}
        self._stored_before: dict[int, bytes] = {}
        self._age_at = 0.0
        self._backoff = Backoff()

    def choose(self, room: int, now: float) -> list[FreeBlock]:
        """Returns the blocks to store now, ``room`` of them at most; after the server took none, nothing for a while."""
        if not self._backoff.is_over(now):
            return []
        self._check_cursor()
        self._age(now)
        chosen: list[FreeBlock] = []
        after = self._cursor.block_id if self._cursor is not None else None
        for visited, block in enumerate(self._pool.free_blocks(after)):
            if visited >= self.target or len(chosen) >= room:
                break
            if block.key is None or self._is_stored(block):
                self._cursor = block
            else:
                chosen.append(block)
        return chosen

    def ended(self, save: EndedSave, now: float) -> None:
        """Note what a save came to; of one from before a restart, nothing is known."""
        if save.doubtful:
            return
        job = save.job
        for index, (block_id, key) in enumerate(zip(job.block_ids, job.keys, strict=True)):
            if index not in save.not_stored:
                self._stored[block_id] = key
        if save.not_stored:
            self._backoff.grow(now)
        else:
            self._backoff.reset()

    def loaded(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Note what came from the store, as (block id, key)."""
        self._stored.update(blocks)

    def restart(self) -> None:
        """The store was emptied, or is another: it has nothing."""
        self._stored.clear()
        self._stored_before.clear()
        self._cursor = None
        self._backoff.reset()

    def _is_stored(self, block: FreeBlock) -> bool:
        return block.key in (self._stored.get(block.block_id), self._stored_before.get(block.block_id))

    def _age(self, now: float) -> None:
        if now >= self._age_at:
            self._stored_before, self._stored = self._stored, {}
            self._age_at = now + _BELIEVED_S

    def _check_cursor(self) -> None:
        """A cursor whose block came back into use, or was used meanwhile, says nothing about those before it any more."""
        if self._cursor is not None and self._pool.free_block(self._cursor.block_id) != self._cursor:
            self._cursor = None
