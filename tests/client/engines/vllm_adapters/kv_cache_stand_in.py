"""vLLM's block pool and the specs of its KV caches, for an environment without vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "BlockPool",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
]


@dataclass(frozen=True)
class AttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads

    @property
    def unpadded_page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    num_head_slots: int | None = None
    state_content_bytes: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads if self.num_head_slots is None else self.num_head_slots

    @property
    def state_content_size_bytes(self) -> int:
        return self.state_content_bytes or 2 * self.head_size * self.dtype.itemsize

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.num_heads * self.block_size * self.state_content_size_bytes


@dataclass(frozen=True)
class MLAAttentionSpec(AttentionSpec):
    max_tp_shards: int | None = None

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Keys and values share one latent vector."""
        return super().unpadded_page_size_bytes // 2


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"

    @property
    def state_content_size_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, AttentionSpec]


@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_cache_layout: str | None = None
    kv_tp_replicas: int = 1

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.kv_cache_groups)))


# ---- block pool


@dataclass(eq=False)
class KVCacheBlock:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    block_hash_num_tokens: int | None = None
    is_null: bool = False

    def set_block_hash(self, block_hash: bytes, num_tokens: int | None = None) -> None:
        assert self.block_hash is None
        self.block_hash, self.block_hash_num_tokens = block_hash, num_tokens


class FreeKVCacheBlockQueue:
    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._blocks = list(blocks)
        self.remove = self._blocks.remove

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        first = self._blocks[:n]
        del self._blocks[:n]
        return first

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        assert not set(blocks) & set(self._blocks)
        self._blocks[:0] = blocks

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        assert not set(blocks) & set(self._blocks)
        self._blocks += blocks

    def iter_blocks_after(self, cursor: None) -> Iterator[KVCacheBlock]:
        return iter(self._blocks)


class BlockPool:
    """Frees blocks without content to the front of the queue, others to its end."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:  # noqa: FBT001 - as vLLM's
        self.num_gpu_blocks = num_gpu_blocks
        self.blocks = [KVCacheBlock(number) for number in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        (self.null_block,) = self.free_block_queue.popleft_n(1)
        self.null_block.is_null = True
        self._cached: dict[bytes, KVCacheBlock] = {}

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: Sequence[int]) -> list[KVCacheBlock] | None:
        found = [self._cached.get(block_hash + group.to_bytes(4, "big")) for group in kv_cache_group_ids]
        return [block for block in found if block is not None] if None not in found else None

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        for position in range(num_cached_blocks, num_full_blocks):
            key = request.block_hashes[position] + kv_cache_group_id.to_bytes(4, "big")
            blocks[position].set_block_hash(key, (position + 1) * block_size)
            self._cached.setdefault(key, blocks[position])

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes blocks from the front of the queue, and forgets their content."""
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if block.block_hash is not None:
                self._cached.pop(block.block_hash, None)
            block.block_hash = block.block_hash_num_tokens = None
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        free = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                free.append(block)
        self.free_block_queue.prepend_n([block for block in free if block.block_hash is None])
        self.free_block_queue.append_n([block for block in free if block.block_hash is not None])

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks
