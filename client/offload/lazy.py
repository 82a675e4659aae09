"""Lazy mode of the offload core: stores blocks shortly before the engine evicts them (B4.7).

Lazy mode copies fewer blocks than eager mode: a block that stays in use is never copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .model import BlockPool, CacheGeometry, FreeBlock
from .saves import EndedSave, store_backoff

__all__ = ["EvictionLookahead"]

# While the engine allocates the blocks of one step, workers save the blocks of the next step.
_STEPS_AHEAD = 2
# A scan costs about 1 µs per block. So a scan runs only if less than this fraction of the target
# number of blocks is stored or being stored, or after this number of steps.
_MIN_COVERAGE = 0.75
_STEPS_BETWEEN_SCANS = 16
# The server does not report evictions. So a block counts as stored only for one to two periods of
# this length. Then it is offered again. If the server still has the block, this costs only one key
# in a call.
_STORED_TTL_S = 60.0


class EvictionLookahead:
    """Chooses blocks to store: free blocks that the engine may evict in the next two steps.

    Scans the engine's free blocks in eviction order. Scans again after some steps, because prefix
    hits also remove blocks from the middle of this order. Scans earlier if many blocks of the last
    scan are no longer free. When a save ends, its blocks return to the head of the eviction order.
    """

    def __init__(self, geometry: CacheGeometry, batched_tokens: int, pool: BlockPool) -> None:
        self.target = _STEPS_AHEAD * sum(group.blocks_per_step(batched_tokens) for group in geometry.groups)
        self._pool = pool
        # Free blocks that are stored or cannot be stored, in eviction order.
        self._covered: deque[FreeBlock] = deque()
        self._in_flight: set[int] = set()
        self._steps_since_scan = 0
        # By block id, the key under which a block was stored, in this period and in the previous
        # one. If the block has another key now, the engine has reused it for other content.
        self._stored: dict[int, bytes] = {}
        self._stored_before: dict[int, bytes] = {}
        self._next_aging_at = 0.0
        self._backoff = store_backoff()

    def choose(self, limit: int, now: float) -> list[FreeBlock]:
        """Returns at most ``limit`` blocks to store now; none soon after a failed store."""
        if not self._backoff.is_over(now) or self._is_covered():
            return []
        self._age(now)
        self._covered.clear()
        self._steps_since_scan = 0
        chosen: list[FreeBlock] = []
        for block in self._pool.free_blocks():
            if len(self._covered) + len(self._in_flight) + len(chosen) >= self.target or len(chosen) >= limit:
                break
            if block.key is None or self._is_stored(block):
                self._covered.append(block)
            else:
                chosen.append(block)
        self._in_flight.update(block.block_id for block in chosen)
        return chosen

    def ended(self, save: EndedSave, now: float) -> None:
        """Records a save's result unless it is suspect. Frees the blocks that were free before."""
        job = save.job
        if save.was_free:
            self._put_back(job.block_ids)
        if save.suspect:
            return
        for index, (block_id, key) in enumerate(zip(job.block_ids, job.keys, strict=True)):
            if index not in save.not_stored:
                self._stored[block_id] = key
        if save.not_stored:
            self._backoff.grow()
            self._backoff.start(now)
        else:
            self._backoff.reset()

    def loaded(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Records loaded blocks as stored. ``blocks``: (block id, key) of each."""
        self._stored.update(blocks)

    def restart(self) -> None:
        """No block counts as stored any more: the server was emptied or replaced."""
        self._stored.clear()
        self._stored_before.clear()
        self._covered.clear()
        self._backoff.reset()

    def _put_back(self, block_ids: Sequence[int]) -> None:
        self._in_flight.difference_update(block_ids)
        self._pool.put_back(block_ids, {block.block_id for block in self._covered})
        free = [self._pool.free_block(block_id) for block_id in block_ids]
        self._covered.extend(block for block in free if block is not None)

    def _is_covered(self) -> bool:
        """Whether most of the blocks that the next steps may evict are stored or being stored."""
        while self._covered and self._pool.free_block(self._covered[0].block_id) != self._covered[0]:
            self._covered.popleft()
        self._steps_since_scan += 1
        count = len(self._covered) + len(self._in_flight)
        return count >= _MIN_COVERAGE * self.target and self._steps_since_scan < _STEPS_BETWEEN_SCANS

    def _is_stored(self, block: FreeBlock) -> bool:
        return block.key in (self._stored.get(block.block_id), self._stored_before.get(block.block_id))

    def _age(self, now: float) -> None:
        if now >= self._next_aging_at:
            self._stored_before, self._stored = self._stored, {}
            self._next_aging_at = now + _STORED_TTL_S
