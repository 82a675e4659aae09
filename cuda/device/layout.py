"""Layout of a block's bytes in an engine's KV tensors.

A part is the bytes of a block that one rank has. A part consists of pieces: contiguous bytes of a
tensor. A slot contains the pieces one after another. Pieces at equal distances in a buffer form a
run. vLLM's layouts have these pieces:

- one tensor per layer, K and V of a block adjacent: one piece per layer;
- K and V apart: two pieces per layer, at a distance of half a tensor;
- layers allocated together: one run of all layers;
- all layers of a block adjacent: one piece.

This module only computes numbers: it uses no tensors, addresses or devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

__all__ = ["BlockLayout", "LayoutError", "LayoutRun", "TensorShape", "describe"]


class LayoutError(ValueError):
    """A layout is invalid, or a block or slot is out of range."""


@dataclass(frozen=True)
class LayoutRun:
    """Pieces at equal distances in one buffer; all sizes in bytes.

    Piece p of block b is at ``offset + b * block_stride + p * piece_stride``. Raises LayoutError
    if a size or stride is invalid.
    """

    buffer: int
    offset: int
    block_stride: int
    piece_bytes: int
    pieces: int = 1
    piece_stride: int = 0

    def __post_init__(self) -> None:
        if (
            min(self.buffer, self.offset, self.piece_stride) < 0
            or min(self.block_stride, self.piece_bytes, self.pieces) < 1
        ):
            raise LayoutError(f"a size or stride of {self} is too small")

    def check(self, num_blocks: int) -> None:
        """Raises LayoutError if pieces of ``num_blocks`` blocks overlap or interleave."""
        distances = [(self.block_stride, num_blocks), (self.piece_stride, self.pieces)]
        covered = self.piece_bytes
        for stride, count in sorted(pair for pair in distances if pair[1] > 1):
            if stride < covered:
                raise LayoutError(f"pieces of {self} overlap in {num_blocks} blocks")
            covered += (count - 1) * stride

    def end(self, num_blocks: int) -> int:
        """End of the last piece of the last block, in bytes from the start of the buffer."""
        return (
            self.offset
            + (num_blocks - 1) * self.block_stride
            + (self.pieces - 1) * self.piece_stride
            + self.piece_bytes
        )

    def merged(self) -> LayoutRun:
        """The same bytes in as few pieces as possible."""
        if self.pieces == 1 or self.piece_stride == self.piece_bytes:
            return LayoutRun(self.buffer, self.offset, self.block_stride, self.pieces * self.piece_bytes)
        return self


@dataclass(frozen=True)
class BlockLayout:
    """The runs of ``num_blocks`` blocks, in slot order. Raises LayoutError if invalid."""

    num_blocks: int
    runs: tuple[LayoutRun, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or not self.runs:
            raise LayoutError("the layout has no blocks or no pieces")
        for run in self.runs:
            run.check(self.num_blocks)

    @property
    def part_bytes(self) -> int:
        """Size of one block's part, which is the size of its slot."""
        return sum(run.pieces * run.piece_bytes for run in self.runs)

    def end(self, buffer: int) -> int:
        """End of the layout's last byte in a buffer; 0 if the layout does not use the buffer."""
        return max((run.end(self.num_blocks) for run in self.runs if run.buffer == buffer), default=0)

    def rebased(self, places: Sequence[tuple[int, int]]) -> BlockLayout:
        """The layout with buffer i at offset ``places[i][1]`` of new buffer ``places[i][0]``."""
        runs = tuple(
            LayoutRun(buffer, run.offset + start, run.block_stride, run.piece_bytes, run.pieces, run.piece_stride)
            for run in self.runs
            for buffer, start in (places[run.buffer],)
        )
        return BlockLayout(self.num_blocks, tuple(_merged_runs(runs)))


class TensorShape(NamedTuple):
    """Shape of a tensor: sizes and strides in elements; ``block_axis`` is the axis of blocks."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    block_axis: int = 0


def describe(tensors: Iterable[TensorShape]) -> BlockLayout:
    """The layout of one group whose layers have these tensors; buffer i is tensor i.

    A slot holds a block's bytes tensor by tensor. The bytes of a tensor are in address order, so K
    precedes V if K and V are apart. Raises LayoutError if the tensors have different numbers of
    blocks or a tensor repeats elements.
    """
    shapes = list(tensors)
    counts = {shape.sizes[shape.block_axis] for shape in shapes}
    if len(counts) != 1:
        raise LayoutError(f"tensors of one group have different numbers of blocks: {sorted(counts)}")
    runs = tuple(run for buffer, shape in enumerate(shapes) for run in _runs(buffer, shape))
    return BlockLayout(counts.pop(), tuple(_merged_runs(runs)))


def _runs(buffer: int, shape: TensorShape) -> Iterator[LayoutRun]:
    """The runs of one tensor: its dense inner axes form a piece, the next axis forms a run."""
    axes = [
        (stride * shape.item_bytes, size)
        for axis, (size, stride) in enumerate(zip(shape.sizes, shape.strides, strict=True))
        if axis != shape.block_axis and size != 1
    ]
    if any(stride <= 0 for stride, _ in axes):
        raise LayoutError("a tensor has a stride of 0 or a negative stride")
    axes.sort()
    piece_bytes = shape.item_bytes
    while axes and axes[0][0] == piece_bytes:
        piece_bytes *= axes.pop(0)[1]
    if math.prod(size for _, size in axes) == 0 or piece_bytes == 0:
        raise LayoutError("a tensor has no elements")
    stride, count = axes.pop(0) if axes else (0, 1)
    while axes and axes[0][0] == stride * count:
        count *= axes.pop(0)[1]
    one_block = shape.sizes[shape.block_axis] == 1  # then the stride is arbitrary
    block_stride = 1 if one_block else shape.strides[shape.block_axis] * shape.item_bytes
    outer = [range(0, size * step, step) for step, size in reversed(axes)]
    for steps in product(*outer):
        yield LayoutRun(buffer, sum(steps), block_stride, piece_bytes, count, stride)


def _merged_runs(runs: Iterable[LayoutRun]) -> Iterator[LayoutRun]:
    """Merges single pieces at equal distances in one buffer into one run."""
    pending: LayoutRun | None = None
    for run in (run.merged() for run in runs):
        if pending is not None:
            longer = _extended(pending, run)
            if longer is not None:
                pending = longer
                continue
            yield pending.merged()
        pending = run
    if pending is not None:
        yield pending.merged()


def _extended(run: LayoutRun, following: LayoutRun) -> LayoutRun | None:
    distance = following.offset - run.offset - (run.pieces - 1) * run.piece_stride
    alike = (run.buffer, run.block_stride, run.piece_bytes) == (
        following.buffer,
        following.block_stride,
        following.piece_bytes,
    )
    if not alike or following.pieces > 1 or distance <= 0 or (run.pieces > 1 and distance != run.piece_stride):
        return None
    return LayoutRun(run.buffer, run.offset, run.block_stride, run.piece_bytes, run.pieces + 1, distance)
