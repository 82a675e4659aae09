"""Adapter of vLLM's block pool for `client/offload` and `client/handoff`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from .... import make_key
from ....handoff import HandoffRequest
from ....offload import CacheGeometry, CacheGroup, FreeBlock
from ..compat import get_block_hash, get_group_id
from .requests import VllmRequest

__all__ = ["VllmBlockPool"]


class VllmBlockPool:
    """vLLM's block pool: `BlockPool` and `PrefixCache`. Before `bind` no block is saved."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._geometry = geometry
        self._pool: Any = None
        # By block hash of a request with a LoRA adapter: the adapter's tag; None: not to be saved.
        # Without its tag, such a block gets a key that no lookup names.
        self._tags: dict[bytes, bytes | None] = {}

    def bind(self, pool: Any) -> None:
        self._pool = pool

    def cached_tokens(self, request: VllmRequest) -> int:
        """Estimates how many leading tokens the engine still has in its own blocks."""
        group = self._geometry.leading_group
        hashes, count = request.hashes(group), 0
        if self._pool is not None:
            while count < len(hashes) and self._pool.get_cached_block(hashes[count], [group.index]):
                count += 1
        return count * group.block_tokens // self._geometry.step_tokens * self._geometry.step_tokens

    def cached_block(self, request: HandoffRequest, group: CacheGroup, position: int) -> int | None:
        assert isinstance(request, VllmRequest)
        pool, block_hash = self._pool, request.hashes(group)[position]
        cached = pool.get_cached_block(block_hash, [group.index]) if pool is not None else None
        return int(cached[0].block_id) if cached else None

    def learn_tag(self, request: VllmRequest, tag: bytes | None) -> None:
        """Records the tag of the blocks of a request with a LoRA adapter, for lazy mode.

        Called at the request's arrival and end. Hashes that the pool no longer has are forgotten.
        """
        groups = self._geometry.groups
        if len(self._tags) > 4 * max(self.num_blocks, 1024):
            cached = self._pool.get_cached_block if self._pool is not None else lambda *_: None
            self._tags = {
                block_hash: known
                for block_hash, known in self._tags.items()
                if any(cached(block_hash, [group.index]) for group in groups)
            }
        for group in groups:
            self._tags.update(dict.fromkeys(request.hashes(group), tag))

    @property
    def unused(self) -> bool:
        """Whether no request and no save uses a block. vLLM's null block is always in use."""
        return self._pool is None or self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks) if self._pool is not None else 0

    def hold(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        """Removes one reference from each block, and moves freed blocks with content in the queue.

        They move near the front: behind the blocks there without content or in `behind`.
        """
        queue, blocks = self._pool.free_block_queue, [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.free_blocks(blocks)
        stay = itertools.takewhile(
            lambda block: block.block_hash is None or block.block_id in behind, queue.iter_blocks_after(None)
        )
        first = list(stay) + [block for block in blocks if not block.ref_cnt and block.block_hash is not None]
        for block in first:
            queue.remove(block)
        queue.prepend_n(first)

    def references(self, block_id: int) -> int:
        return int(self._pool.blocks[block_id].ref_cnt)

    def cached_key(self, block_id: int) -> bytes | None:
        """Returns the block's key; None before the step that fills the block."""
        return self._name(self._pool.blocks[block_id]).key

    def free_block(self, block_id: int) -> FreeBlock | None:
        return None if self.references(block_id) else self._name(self._pool.blocks[block_id])

    def free_blocks(self) -> Iterator[FreeBlock]:
        if self._pool is not None:
            for block in self._pool.free_block_queue.iter_blocks_after(None):
                yield self._name(block)

    def _name(self, block: Any) -> FreeBlock:
        block_hash, tokens = block.block_hash, block.block_hash_num_tokens
        if block_hash is None or tokens is None:
            return FreeBlock(block.block_id, 0, None)
        group = self._geometry.groups[get_group_id(block_hash)]
        # A hash may cover only the first tokens of a block. Such a block has no key.
        content = get_block_hash(block_hash)
        tag = self._tags.get(content, b"")
        key = make_key(content + tag, group.index) if tokens % group.block_tokens == 0 and tag is not None else None
        return FreeBlock(block.block_id, group.index, key)
