"""Copy plans: flat lists of addresses and sizes for a driver, made from block ids and slot offsets.

Before each transfer Python code makes a plan with thousands of copies. To make this fast, `Planner`
computes the table of a layout's pieces only once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..host.pinning import PIN_CHUNK_BYTES
from .layout import BlockLayout, LayoutError

__all__ = ["Plan", "Planner"]


class Plan(NamedTuple):
    """Copy i has ``sizes[i]`` bytes, between addresses ``device[i]`` and ``host[i]``."""

    device: array[int]
    host: array[int]
    sizes: array[int]

    def split(self, max_copies: int, max_bytes: int) -> Iterator[Plan]:
        """Yields plans within these limits. A single copy of more bytes is a plan of its own."""
        start, weight = 0, 0
        for end, size in enumerate(self.sizes):
            if end > start and (end - start >= max_copies or weight + size > max_bytes):
                yield Plan(self.device[start:end], self.host[start:end], self.sizes[start:end])
                start, weight = end, 0
            weight += size
        if start < len(self.sizes):
            yield Plan(self.device[start:], self.host[start:], self.sizes[start:])


class _Column(NamedTuple):
    """One piece of every block: its place on the device and in the slot, and its size in bytes."""

    base: int
    block_stride: int
    in_slot: int
    nbytes: int


class Planner:
    """Makes plans for one layout, with buffers at ``addresses``, and one region.

    The region is pinned in chunks of ``chunk_bytes``; no copy of a plan crosses a chunk boundary.
    Raises LayoutError if ``addresses`` lacks a buffer of the layout. Any thread may call.
    """

    def __init__(
        self,
        layout: BlockLayout,
        addresses: Sequence[int],
        region_address: int,
        region_bytes: int,
        *,
        chunk_bytes: int = PIN_CHUNK_BYTES,
    ) -> None:
        if any(run.buffer >= len(addresses) for run in layout.runs):
            raise LayoutError(f"the layout needs more than the given {len(addresses)} buffers")
        self.part_bytes = layout.part_bytes
        self.num_blocks = layout.num_blocks
        self._region = region_address
        self._region_bytes = region_bytes
        self._chunk = chunk_bytes
        self._columns = list(_columns(layout, addresses))

    def plan(self, blocks: Sequence[int], offsets: Sequence[int]) -> Plan:
        """Plans copies between block ``blocks[i]`` and the slot at ``offsets[i]`` of the region.

        Copies that are adjacent on both sides are merged. Raises LayoutError for blocks and slots
        out of range, because such a copy would access other memory.
        """
        for block, offset in zip(blocks, offsets, strict=True):
            if not 0 <= block < self.num_blocks:
                raise LayoutError(f"there is no block {block} of {self.num_blocks}")
            if not 0 <= offset <= self._region_bytes - self.part_bytes:
                raise LayoutError(f"a slot of {self.part_bytes} bytes at offset {offset} is outside of the region")
        if len(self._columns) == 1:
            return self._plan_whole(blocks, offsets)
        return self._plan_pieces(blocks, offsets)

    def _plan_pieces(self, blocks: Sequence[int], offsets: Sequence[int]) -> Plan:
        plan = Plan(array("Q"), array("Q"), array("Q"))
        for block, offset in zip(blocks, offsets, strict=True):
            if offset // self._chunk != (offset + self.part_bytes - 1) // self._chunk:
                self._add_split(plan, block, offset)
                continue
            start = self._region + offset
            plan.device.extend([base + block * stride for base, stride, _, _ in self._columns])
            plan.host.extend([start + in_slot for _, _, in_slot, _ in self._columns])
            plan.sizes.extend([nbytes for _, _, _, nbytes in self._columns])
        return plan

    def _plan_whole(self, blocks: Sequence[int], offsets: Sequence[int]) -> Plan:
        """Plans copies of blocks with a single piece. Adjacent blocks are merged into one copy."""
        plan = Plan(array("Q"), array("Q"), array("Q"))
        (column,) = self._columns
        device, host, length = 0, 0, 0
        for block, offset in zip(blocks, offsets, strict=True):
            start = column.base + block * column.block_stride
            if (start, offset) == (device + length, host + length):
                length += column.nbytes
                continue
            self._add(plan, device, host, length)
            device, host, length = start, offset, column.nbytes
        self._add(plan, device, host, length)
        return plan

    def _add_split(self, plan: Plan, block: int, offset: int) -> None:
        for base, stride, in_slot, nbytes in self._columns:
            self._add(plan, base + block * stride, offset + in_slot, nbytes)

    def _add(self, plan: Plan, device: int, offset: int, nbytes: int) -> None:
        """Adds one copy, split at chunk boundaries."""
        while nbytes:
            size = min(nbytes, self._chunk - offset % self._chunk)
            plan.device.append(device)
            plan.host.append(self._region + offset)
            plan.sizes.append(size)
            device, offset, nbytes = device + size, offset + size, nbytes - size


def _columns(layout: BlockLayout, addresses: Sequence[int]) -> Iterator[_Column]:
    in_slot = 0
    for run in layout.runs:
        for piece in range(run.pieces):
            base = addresses[run.buffer] + run.offset + piece * run.piece_stride
            yield _Column(base, run.block_stride, in_slot, run.piece_bytes)
            in_slot += run.piece_bytes
