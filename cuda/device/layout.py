"""How the bytes of one block lie in an engine's KV tensors: one descriptor for all layouts that engines have.

A block's part is made of pieces. In slot order they are the pieces of run after run, and within a run at one distance from each
other. That covers what vLLM has: a tensor per layer with K and V of a block together (one piece per layer), K and V apart (two
pieces, half a tensor from each other), layers carved out of one allocation (a run of all layers), and all layers of a block in
one piece. Pure arithmetic: nothing here knows a tensor, an address or a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

__all__ = ["BlockLayout", "LayoutError", "LayoutPiece", "LayoutRun", "TensorShape", "describe"]


class LayoutError(ValueError):
    """No block can lie like that."""


class LayoutPiece(NamedTuple):
    """One contiguous piece of a block: where it is (bytes from the start of a buffer) and its size."""

    buffer: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class LayoutRun:
    """Evenly spaced pieces in one buffer: piece p of block b is at ``offset + b * block_stride + p * piece_stride``; in bytes.

    Raises LayoutError where pieces would overlap, or do not nest (blocks within pieces' distance, or pieces within blocks').
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
            raise LayoutError(f"sizes and strides of {self} are not positive")

    def check(self, num_blocks: int) -> None:
        """Raises LayoutError where two pieces of ``num_blocks`` blocks have bytes in common."""
        distances = [(self.block_stride, num_blocks), (self.piece_stride, self.pieces)]
        covered = self.piece_bytes
        for stride, count in sorted(pair for pair in distances if pair[1] > 1):
            if stride < covered:
                raise LayoutError(f"pieces of {self} overlap in {num_blocks} blocks")
            covered += (count - 1) * stride

    def end(self, num_blocks: int) -> int:
        """Where the last piece of the last block ends, in bytes from the start of the buffer."""
        return (
            self.offset
            + (num_blocks - 1) * self.block_stride
            + (self.pieces - 1) * self.piece_stride
            + self.piece_bytes
        )

    def joined(self) -> LayoutRun:
        """The same bytes in as few pieces as possible."""
        if self.pieces == 1 or self.piece_stride == self.piece_bytes:
            return LayoutRun(self.buffer, self.offset, self.block_stride, self.pieces * self.piece_bytes)
        return self


@dataclass(frozen=True)
class BlockLayout:
    """Where the bytes of each of ``num_blocks`` blocks are, in slot order. Raises LayoutError for what cannot be."""

    num_blocks: int
    runs: tuple[LayoutRun, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or not self.runs:
            raise LayoutError("a layout has blocks, and a block has pieces")
        for run in self.runs:
            run.check(self.num_blocks)

    @property
    def part_bytes(self) -> int:
        """The size of one block's part, and so of its bytes in a slot."""
        return sum(run.pieces * run.piece_bytes for run in self.runs)

    def pieces(self, block: int) -> Iterator[LayoutPiece]:
        """Yields the pieces of a block in slot order. Raises LayoutError for a block that is not there."""
        if not 0 <= block < self.num_blocks:
            raise LayoutError(f"there is no block {block} of {self.num_blocks}")
        for run in self.runs:
            start = run.offset + block * run.block_stride
            for piece in range(run.pieces):
                yield LayoutPiece(run.buffer, start + piece * run.piece_stride, run.piece_bytes)

    def end(self, buffer: int) -> int:
        """How many bytes of a buffer the layout reaches into; 0 if it does not use it."""
        return max((run.end(self.num_blocks) for run in self.runs if run.buffer == buffer), default=0)

    def moved(self, places: Sequence[tuple[int, int]]) -> BlockLayout:
        """The same blocks where buffer i starts ``places[i][1]`` bytes into buffer ``places[i][0]``."""
        runs = tuple(
            LayoutRun(buffer, run.offset + start, run.block_stride, run.piece_bytes, run.pieces, run.piece_stride)
            for run in self.runs
            for buffer, start in (places[run.buffer],)
        )
        return BlockLayout(self.num_blocks, tuple(_carved(runs)))


class TensorShape(NamedTuple):
    """A tensor as its framework describes it: sizes and strides count elements; ``block_axis`` is the one that blocks are on."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    block_axis: int = 0


def describe(tensors: Iterable[TensorShape]) -> BlockLayout:
    """The layout of one group whose layers have these tensors, buffer i being tensor i.

    A slot holds tensor after tensor, and of each the elements of the block in the order of their addresses: whatever the order of
    its axes, so that K and V come one after the other where they are apart. Raises LayoutError where the tensors differ in their
    number of blocks, or a tensor repeats elements.
    """
    shapes = list(tensors)
    counts = {shape.sizes[shape.block_axis] for shape in shapes}
    if len(counts) != 1:
        raise LayoutError(f"tensors of one group have {sorted(counts)} blocks")
    runs = tuple(run for buffer, shape in enumerate(shapes) for run in _runs(buffer, shape))
    return BlockLayout(counts.pop(), tuple(_carved(runs)))


def _runs(buffer: int, shape: TensorShape) -> Iterator[LayoutRun]:
    """The runs of one tensor: its innermost dense axes are a piece, the next one repeats it, those outside of it make runs."""
    axes = [
        (stride * shape.item_bytes, size)
        for axis, (size, stride) in enumerate(zip(shape.sizes, shape.strides, strict=True))
        if axis != shape.block_axis and size != 1
    ]
    if any(stride <= 0 for stride, _ in axes):
        raise LayoutError("a tensor repeats elements, or runs backwards")
    axes.sort()
    piece_bytes = shape.item_bytes
    while axes and axes[0][0] == piece_bytes:
        piece_bytes *= axes.pop(0)[1]
    if math.prod(size for _, size in axes) == 0 or piece_bytes == 0:
        raise LayoutError("a tensor without elements holds no blocks")
    stride, count = axes.pop(0) if axes else (0, 1)
    while axes and axes[0][0] == stride * count:
        count *= axes.pop(0)[1]
    one_block = shape.sizes[shape.block_axis] == 1  # whose stride says nothing
    block_stride = 1 if one_block else shape.strides[shape.block_axis] * shape.item_bytes
    outer = [range(0, size * step, step) for step, size in reversed(axes)]
    for steps in product(*outer):
        yield LayoutRun(buffer, sum(steps), block_stride, piece_bytes, count, stride)


def _carved(runs: Iterable[LayoutRun]) -> Iterator[LayoutRun]:
    """Joins runs of single pieces at even distances in one buffer into runs of many: layers carved out of one allocation."""
    pending: LayoutRun | None = None
    for run in (run.joined() for run in runs):
        if pending is not None:
            longer = _continued(pending, run)
            if longer is not None:
                pending = longer
                continue
            yield pending.joined()
        pending = run
    if pending is not None:
        yield pending.joined()


def _continued(run: LayoutRun, following: LayoutRun) -> LayoutRun | None:
    distance = following.offset - run.offset - (run.pieces - 1) * run.piece_stride
    alike = (run.buffer, run.block_stride, run.piece_bytes) == (
        following.buffer,
        following.block_stride,
        following.piece_bytes,
    )
    if not alike or following.pieces > 1 or distance <= 0 or (run.pieces > 1 and distance != run.piece_stride):
        return None
    return LayoutRun(run.buffer, run.offset, run.block_stride, run.piece_bytes, run.pieces + 1, distance)
