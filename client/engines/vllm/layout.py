"""Byte layout of an engine's KV tensors: positions of a block's pages, and their order in a slot.

A slot holds the pages of the group's layers in the group's order, without padding. vLLM usually
allocates all layers of a group at equal distances in one storage. A block of such a group is one
strided view and needs one copy. A state-space layer has one tensor or several (conv state, SSM
state). Each tensor gives one page, and these pages are adjacent in the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...offload import CacheGroup
from .compat import group_kernel_blocks
from .groups import Unsupported

__all__ = ["GroupLayout", "Segment", "build_layouts"]


@dataclass(frozen=True)
class Segment:
    """Layers at equal distances: `pages[block]` is a `[layers, page_bytes]` view.

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
    page_bytes: int


def build_layouts(
    groups: Sequence[CacheGroup], kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], num_blocks: int
) -> list[GroupLayout]:
    """Returns views of `kv_caches` per group. Raises Unsupported if bytes differ from the spec."""
    layouts = []
    for group in groups:
        layers = [
            pages
            for name, page_bytes in zip(group.layers, group.page_bytes, strict=True)
            for pages in _layer_pages(name, kv_caches.get(name), num_blocks, page_bytes)
        ]
        layouts.append(GroupLayout(group, tuple(_segments(layers, num_blocks))))
    return layouts


def _layer_pages(
    name: str, cache: torch.Tensor | Sequence[torch.Tensor] | None, num_blocks: int, page_bytes: int
) -> list[_LayerPages]:
    listed = cache if isinstance(cache, (list, tuple)) else [cache]
    tensors = [tensor for tensor in listed if isinstance(tensor, torch.Tensor)]
    if not tensors or len(tensors) < len(listed):
        raise Unsupported(f"layer {name} has no KV tensor")
    pages = [_pages(name, tensor, num_blocks) for tensor in tensors]
    found = sum(page.page_bytes for page in pages)
    if found != page_bytes:
        raise Unsupported(f"a block of layer {name} has {found} bytes, expected {page_bytes}")
    return pages


def _pages(name: str, tensor: torch.Tensor, num_blocks: int) -> _LayerPages:
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
    return _LayerPages(
        blocks.untyped_storage(), blocks.storage_offset() * element, blocks.stride(0) * element, page_bytes
    )


def _segments(layers: Sequence[_LayerPages], num_blocks: int) -> list[Segment]:
    segments, start, slot_offset = [], 0, 0
    while start < len(layers):
        end, distance = _even_run(layers, start)
        first = layers[start]
        raw = torch.empty(0, dtype=torch.uint8, device=first.storage.device).set_(first.storage)
        pages = raw.as_strided(
            (num_blocks, end - start, first.page_bytes), (first.block_stride, distance, 1), first.offset
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
            and (layer.block_stride, layer.page_bytes, step) == (first.block_stride, first.page_bytes, distance)
            and step > 0
        )
        if not same:
            break
        end += 1
    return end, (distance if end > start + 1 else first.page_bytes)
