"""Small KV tensors in vLLM's layouts, and their blocks as slots hold them (NumPy gather)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.cuda.device.layout import BlockLayout, TensorShape, describe
from kvtier.cuda.host.region import HostRegion

__all__ = [
    "BLOCKS",
    "JOINED",
    "JOINED_LAYERS",
    "LAYOUTS",
    "STEP",
    "Array",
    "Kv",
    "gather",
    "pieces_of",
    "shape_of",
    "slots",
]

Array = NDArray[Any]

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 6, 16, 4, 8, 3


def shape_of(tensor: Array, block_axis: int = 0) -> TensorShape:
    strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
    return TensorShape(tensor.shape, strides, tensor.itemsize, block_axis)


def gather(tensors: Sequence[Array], block: int) -> bytes:
    """The bytes of a block as its slot holds them: tensor after tensor, elements in address order.

    The blocks are on the first axis.
    """
    parts = []
    for tensor in tensors:
        page = tensor[block]
        order = sorted(range(page.ndim), key=lambda axis: -page.strides[axis] if page.shape[axis] > 1 else 0)
        parts.append(page.transpose(order).tobytes())
    return b"".join(parts)


class Piece(NamedTuple):
    """One contiguous piece of a block: its offset in a buffer and its size, in bytes."""

    buffer: int
    offset: int
    nbytes: int


def pieces_of(layout: BlockLayout, block: int) -> Iterator[Piece]:
    """Yields a block's pieces in slot order."""
    for run in layout.runs:
        start = run.offset + block * run.block_stride
        for piece in range(run.pieces):
            yield Piece(run.buffer, start + piece * run.piece_stride, run.piece_bytes)


@dataclass(frozen=True)
class Kv:
    """``count`` equal tensors, allocated separately or all ``carved`` out of one allocation."""

    shape: tuple[int, ...]
    block_axis: int
    count: int = 1
    carved: bool = False

    def tensors(self, seed: int) -> list[Array]:
        random = np.random.default_rng(seed)
        return [random.integers(0, 1 << 16, self.shape, np.uint16) for _ in range(self.count)]

    def layout(self) -> BlockLayout:
        return describe([shape_of(np.empty(self.shape, np.uint16), self.block_axis)] * self.count)

    def parts(self, seed: int) -> list[bytes]:
        tensors = [np.moveaxis(tensor, self.block_axis, 0) for tensor in self.tensors(seed)]
        return [gather(tensors, block) for block in range(self.shape[self.block_axis])]


LAYOUTS = {
    "a tensor per layer, K and V joined": Kv((BLOCKS, 2, TOKENS, HEADS, DIM), 0, LAYERS),
    "a tensor per layer, K and V apart": Kv((2, BLOCKS, TOKENS, HEADS, DIM), 1, LAYERS),
    "layers carved out of one allocation": Kv((BLOCKS, 2, TOKENS, HEADS, DIM), 0, LAYERS, carved=True),
    "K and V apart, carved": Kv((2, BLOCKS, TOKENS, HEADS, DIM), 1, LAYERS, carved=True),
    "all layers of a block together": Kv((BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM), 0),
    "layers outermost": Kv((LAYERS, BLOCKS, 2, TOKENS, HEADS, DIM), 1),
    "heads outside of blocks": Kv((2, HEADS, BLOCKS, TOKENS, DIM), 2, LAYERS),
}

JOINED = LAYOUTS["a tensor per layer, K and V joined"]
JOINED_LAYERS = LAYOUTS["all layers of a block together"]

STEP = 96 << 10
"""Distance of two slots: larger than any part, and not a multiple of a page."""


def slots(region: HostRegion, offsets: Sequence[int], size: int) -> list[bytes]:
    return [bytes(region.memory[offset : offset + size]) for offset in offsets]
