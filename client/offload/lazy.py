"""Storing blocks just before the engine would evict them (B4.7): fewer copies than storing all, none for what stays in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .model import Backoff, BlockPool, CacheGeometry, FreeBlock
from .saves import EndedSave

__all__ = ["LazyWalk"]

# Two steps' worth: while one step's blocks are taken the next one's are being copied.
_STEPS_AHEAD = 2
# A walk costs a microsecond per block: not in every step.
_ENOUGH = 0.75
_STEPS_BETWEEN_WALKS = 16
# The server does not say what it evicts, so what is stored is believed so long, and up to twice as long. Then it is offered again:
# where the server still has it, that costs a name in a call.
_BELIEVED_S = 60.0


class LazyWalk:
    """Sees to it that the next blocks to be evicted are stored: so many as the next steps may take, and no more.

    It walks the engine's free blocks from the eviction end when many of those that it found there are gone, or a few steps have
    passed: blocks also leave from the middle, by prefix hits. What it has stored goes back to where it was taken from.
    """

    def __init__(self, geometry: CacheGeometry, batched_tokens: int, pool: BlockPool) -> None:
        self.target = _STEPS_AHEAD * sum(group.blocks_per_step(batched_tokens) for group in geometry.groups)
        self._pool = pool
        # From the eviction end on: what the last walk found that need not be stored (again); and what is being stored.
        self._ahead: deque[FreeBlock] = deque()
        self._in_flight: set[int] = set()
        self._steps_since = 0
        # By block: the content that the store is known to have. The engine's own blocks bound it, and a block that was reused
        # has another key. What was learned last, and what before.
        self._stored: dict[int, bytes] = {}
        self._stored_before: dict[int, bytes] = {}
        self._age_at = 0.0
        self._backoff = Backoff()

    def choose(self, room: int, now: float) -> list[FreeBlock]:
        """Returns the blocks to store now, ``room`` of them at most; after the server took none, nothing for a while."""
        if not self._backoff.is_over(now) or self._is_far_enough():
            return []
        self._age(now)
        self._ahead.clear()
        self._steps_since = 0
        chosen: list[FreeBlock] = []
        for block in self._pool.free_blocks():
            if len(self._ahead) + len(self._in_flight) + len(chosen) >= self.target or len(chosen) >= room:
                break
            if block.key is None or self._is_stored(block):
                self._ahead.append(block)
            else:
                chosen.append(block)
        self._in_flight.update(block.block_id for block in chosen)
        return chosen

    def ended(self, save: EndedSave, now: float) -> None:
        """Put its blocks back, and note what a save came to; of one from before a restart, nothing is known."""
        job = save.job
        if save.were_free:
            self._put_back(job.block_ids)
        if save.doubtful:
            return
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
        self._ahead.clear()
        self._backoff.reset()

    def _put_back(self, block_ids: Sequence[int]) -> None:
        self._in_flight.difference_update(block_ids)
        self._pool.put_back(block_ids, {block.block_id for block in self._ahead})
        free = [self._pool.free_block(block_id) for block_id in block_ids]
        self._ahead.extend(block for block in free if block is not None)

    def _is_far_enough(self) -> bool:
        """Whether most of what the next steps may take was seen to lately."""
        while self._ahead and self._pool.free_block(self._ahead[0].block_id) != self._ahead[0]:
            self._ahead.popleft()
        self._steps_since += 1
        covered = len(self._ahead) + len(self._in_flight)
        return covered >= _ENOUGH * self.target and self._steps_since < _STEPS_BETWEEN_WALKS

    def _is_stored(self, block: FreeBlock) -> bool:
        return block.key in (self._stored.get(block.block_id), self._stored_before.get(block.block_id))

    def _age(self, now: float) -> None:
        if now >= self._age_at:
            self._stored_before, self._stored = self._stored, {}
            self._age_at = now + _BELIEVED_S
