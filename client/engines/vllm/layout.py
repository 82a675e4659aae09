"""Byte layout of an engine's KV tensors: positions of a block's pages, and their order in a slot.

A slot holds the pages of the group's layers in the group's order, without padding. vLLM usually
allocates all layers of a group at equal distances in one storage. A block of such a group is one
strided view and needs one copy. A state-space layer has one tensor or several (conv state, SSM
state). Each tensor gives one page, and these pages are adjacent in the slot.

If a worker holds several parts of a block, each part has a share of the KV heads of every page. The
bytes of a head are contiguous in the page, or once per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...offload import CacheGroup
from ..failures import Unsupported
from .compat import group_kernel_blocks

__all__ = ["GroupLayout", "Segment", "build_layouts"]


@dataclass(frozen=True)
class Segment:
    """Layers at equal distances: `pages[block]` is a `[layers, *page_shape]` view of bytes.

    `page_shape` is `[page_bytes]` for whole pages and `[..., contiguous_bytes]` for parts of pages.
    In the slot these pages fill `slot_bytes` bytes from `slot_offset` on.
    """

    pages: torch.Tensor
    slot_offset: int
    slot_bytes: int


@dataclass(frozen=True)
class GroupLayout:
    """The segments of one group, in slot order."""

    group: CacheGroup
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class _LayerPages:
    storage: torch.UntypedStorage
    offset: int
    block_stride: int
    shape: tuple[int, ...]
    """Contiguous bytes of a page are the last dimension."""
    strides: tuple[int, ...]

    @property
    def page_bytes(self) -> int:
        return math.prod(self.shape)


def build_layouts(
    groups: Sequence[CacheGroup],
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    num_blocks: int,
    piece: int = 0,
    pieces: int = 1,
) -> list[GroupLayout]:
    """Returns views of `kv_caches` per group: piece number `piece` of `pieces` of the KV heads.

    Raises Unsupported if the bytes differ from the groups' page sizes, or if the heads cannot be
    divided.
    """
    layouts = []
    for group in groups:
        layers = [
            pages
            for name, page_bytes in zip(group.layers, group.page_bytes, strict=True)
            for pages in _layer_pages(name, kv_caches.get(name), num_blocks, page_bytes, piece, pieces)
        ]
        layouts.append(GroupLayout(group, tuple(_segments(layers, num_blocks))))
    return layouts


def _layer_pages(
    name: str,
    cache: torch.Tensor | Sequence[torch.Tensor] | None,
    num_blocks: int,
    page_bytes: int,
    piece: int,
    pieces: int,
) -> list[_LayerPages]:
    listed = cache if isinstance(cache, (list, tuple)) else [cache]
    tensors = [tensor for tensor in listed if isinstance(tensor, torch.Tensor)]
    if not tensors or len(tensors) < len(listed):
        raise Unsupported(f"layer {name} has no KV tensor")
    pages = [_pages(name, tensor, num_blocks, piece, pieces) for tensor in tensors]
    found = sum(page.page_bytes for page in pages)
    if found != page_bytes:
        raise Unsupported(f"a block of layer {name} has {found} bytes, expected {page_bytes}")
    return pages


def _pages(name: str, tensor: torch.Tensor, num_blocks: int, piece: int, pieces: int) -> _LayerPages:
    if tensor.shape[0] % num_blocks:
        raise Unsupported(
            f"first dimension {tensor.shape[0]} of layer {name} is not a multiple of the {num_blocks} blocks"
        )
    blocks = group_kernel_blocks(tensor, num_blocks)
    element = blocks.element_size()
    block = blocks[0]
    span = 1 + sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True))
    page_bytes = block.numel() * element
    if span != block.numel():
        raise Unsupported(
            f"a block of layer {name} is not contiguous: its {page_bytes} bytes are spread over {span * element} bytes."
            " Probably the KV cache layout has the head dimension before the block dimension"
        )
    if pieces > 1:
        # vLLM's tensors have the dimensions [blocks, heads, tokens, content], in any memory order.
        # A block of several kernel blocks has one dimension more.
        if blocks.dim() < 4 or blocks.shape[-3] % pieces:
            raise Unsupported(
                f"the KV heads of layer {name} cannot be divided into {pieces} parts: {list(blocks.shape)}"
            )
        heads = blocks.shape[-3] // pieces
        blocks = blocks.narrow(-3, piece * heads, heads)
    shape, strides = _contiguous_runs(blocks[0])
    return _LayerPages(
        blocks.untyped_storage(), blocks.storage_offset() * element, blocks.stride(0) * element, shape, strides
    )


def _contiguous_runs(block: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns shape and strides of a block in bytes and in memory order.

    The number of dimensions is as small as possible. The last one has the contiguous bytes.
    """
    element = block.element_size()
    shape, strides = [element], [1]
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size == 1:
            continue
        if stride * element == shape[0] * strides[0]:
            shape[0] *= size
        else:
            shape.insert(0, size)
            strides.insert(0, stride * element)
    return tuple(shape), tuple(strides)


def _segments(layers: Sequence[_LayerPages], num_blocks: int) -> list[Segment]:
    segments, start, slot_offset = [], 0, 0
    while start < len(layers):
        end, distance = _even_run(layers, start)
        first = layers[start]
        raw = torch.empty(0, dtype=torch.uint8, device=first.storage.device).set_(first.storage)
        pages = raw.as_strided(
            (num_blocks, end - start, *first.shape), (first.block_stride, distance, *first.strides), first.offset
        )
        slot_bytes = (end - start) * first.page_bytes
        segments.append(Segment(pages, slot_offset, slot_bytes))
        slot_offset += slot_bytes
        start = end
    return segments


def _even_run(layers: Sequence[_LayerPages], start: int) -> tuple[int, int]:
    """Returns the end of the longest run of equally spaced layers, and the layers' distance."""
    first = layers[start]
    distance = first.page_bytes
    end = start + 1
    while end < len(layers):
        layer, step = layers[end], layers[end].offset - layers[end - 1].offset
        if end == start + 1:
            distance = step
        same = (
            layer.storage.data_ptr() == first.storage.data_ptr()
            and (layer.block_stride, layer.shape, layer.strides, step)
            == (first.block_stride, first.shape, first.strides, distance)
            and step > 0
        )
        if not same:
            break
        end += 1
    return end, (distance if end > start + 1 else first.page_bytes)
