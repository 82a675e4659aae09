"""Copies between an engine's KV tensors and slots. Runs on the worker's background threads only.

On a CPU engine NumPy makes the copies. NumPy releases the GIL and uses only the calling thread, but
torch would start OpenMP threads that compete with the engine's threads. On a CUDA engine the pages
of a block are first gathered on the device, so that one block is one contiguous transfer.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .....cuda.host.pinning import split_at_chunks
from ..layout import GroupLayout, Segment

__all__ = ["BlockCopier", "CpuCopier", "CudaCopier", "make_copier"]

_Bytes: TypeAlias = NDArray[np.uint8]


class _BlockRun(NamedTuple):
    """Consecutive blocks in slots that are `distance` bytes apart (0 if there is one block)."""

    block_id: int
    offset: int
    blocks: int
    distance: int


def _runs(block_ids: Sequence[int], offsets: Sequence[int]) -> Iterator[_BlockRun]:
    """Splits a batch into runs. Runs are long, because blocks and slots are mostly consecutive."""
    run: _BlockRun | None = None
    for block_id, offset in zip(block_ids, offsets, strict=True):
        if run is not None:
            distance = offset - (run.offset + (run.blocks - 1) * run.distance)
            if block_id == run.block_id + run.blocks and distance > 0 and run.distance in (0, distance):
                run = _BlockRun(run.block_id, run.offset, run.blocks + 1, distance)
                continue
            yield run
        run = _BlockRun(block_id, offset, 1, 0)
    if run is not None:
        yield run


class BlockCopier(Protocol):
    """Copies blocks of one group. Calls wait for the copy, and raise only if the device fails."""

    device: torch.device

    def mark(self) -> Any:
        """Marks the compute that was submitted so far. Called on the engine's thread.

        A copy whose `after` is this mark waits until that compute has ended.
        """

    def copy_out(
        self, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int], after: Any
    ) -> None:
        """Copies engine blocks to `memory` at `offsets` (bytes)."""

    def copy_in(
        self, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int], after: Any
    ) -> None:
        """Copies from `memory` at `offsets` (bytes) to engine blocks."""


def make_copier(layouts: Sequence[GroupLayout]) -> BlockCopier:
    device = next(segment.pages.device for layout in layouts for segment in layout.segments)
    return CpuCopier(layouts) if device.type == "cpu" else CudaCopier(layouts, device)


class CpuCopier:
    """Copier for KV tensors in host memory: one NumPy copy per segment and run of blocks."""

    device = torch.device("cpu")

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        self._segments = {
            layout.group.index: [
                (segment.pages.numpy(), segment.slot_offset, segment.slot_bytes) for segment in layout.segments
            ]
            for layout in layouts
        }

    def mark(self) -> None:
        """Does nothing: a CPU engine has written the KV of a step before the call."""

    def copy_out(
        self, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int], after: None
    ) -> None:
        for pages, slots in self._pairs(group, block_ids, memory, offsets):
            np.copyto(slots, pages)

    def copy_in(
        self, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int], after: None
    ) -> None:
        for pages, slots in self._pairs(group, block_ids, memory, offsets):
            np.copyto(pages, slots)

    def _pairs(
        self, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int]
    ) -> Iterator[tuple[_Bytes, _Bytes]]:
        """Yields views of pages and of their slots, each `[blocks, *segment.pages.shape[1:]]`."""
        for run in _runs(block_ids, offsets):
            for pages, slot_offset, slot_bytes in self._segments[group]:
                inner = itertools.accumulate(reversed(pages.shape[2:]), operator.mul, initial=1)
                strides = (run.distance or slot_bytes, *reversed(list(inner)))
                slots = np.ndarray((run.blocks, *pages.shape[1:]), np.uint8, memory, run.offset + slot_offset, strides)
                yield pages[run.block_id : run.block_id + run.blocks], slots


class CudaCopier:
    """Copier for KV tensors on a GPU: gathers pages on the device, one transfer per run of slots.

    Copies use their own streams. Copies and compute overlap only if the region is pinned.
    """

    _STAGING_BYTES = 64 << 20

    def __init__(self, layouts: Sequence[GroupLayout], device: torch.device) -> None:
        self.device = device
        self._segments: dict[int, tuple[Segment, ...]] = {layout.group.index: layout.segments for layout in layouts}
        # Lowest priority, so that copies yield to the engine's kernels.
        self._out_stream = torch.cuda.Stream(device, priority=0)
        self._in_stream = torch.cuda.Stream(device, priority=0)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def copy_out(
        self, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int], after: torch.cuda.Event
    ) -> None:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.cuda.device(self.device), _synchronized(self._out_stream):
            self._out_stream.wait_event(after)
            for segment, ids, starts in self._batches(group, block_ids, offsets):
                staging = segment.pages.index_select(0, self._indices(ids)).view(len(ids), -1)
                for rows, slots in _transfers(staging, flat, starts):
                    slots.copy_(rows, non_blocking=True)

    def copy_in(
        self, group: int, block_ids: Sequence[int], memory: memoryview, offsets: Sequence[int], after: torch.cuda.Event
    ) -> None:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.cuda.device(self.device), _synchronized(self._in_stream):
            self._in_stream.wait_event(after)
            for segment, ids, starts in self._batches(group, block_ids, offsets):
                staging = torch.empty((len(ids), segment.slot_bytes), dtype=torch.uint8, device=self.device)
                for rows, slots in _transfers(staging, flat, starts):
                    rows.copy_(slots, non_blocking=True)
                pages = staging.view(len(ids), *segment.pages.shape[1:])
                segment.pages.index_copy_(0, self._indices(ids), pages)

    def _batches(
        self, group: int, block_ids: Sequence[int], offsets: Sequence[int]
    ) -> Iterator[tuple[Segment, Sequence[int], list[int]]]:
        for segment in self._segments[group]:
            count = max(1, self._STAGING_BYTES // segment.slot_bytes)
            for first in range(0, len(block_ids), count):
                ids = block_ids[first : first + count]
                yield segment, ids, [offset + segment.slot_offset for offset in offsets[first : first + count]]

    def _indices(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self.device)


@contextlib.contextmanager
def _synchronized(stream: torch.cuda.Stream) -> Iterator[None]:
    """Context whose CUDA work runs on `stream`. Waits for the stream at the end, even on errors."""
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def _transfers(
    staging: torch.Tensor, flat: torch.Tensor, starts: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields contiguous pairs of device and host memory, each within one pinned chunk."""
    slot_bytes = staging.shape[1]
    rows = staging.view(-1)
    first = 0
    for end in range(1, len(starts) + 1):
        if end == len(starts) or starts[end] != starts[end - 1] + slot_bytes:
            at = first * slot_bytes
            for start, length in split_at_chunks(starts[first], (end - first) * slot_bytes):
                yield rows[at : at + length], flat[start : start + length]
                at += length
            first = end
