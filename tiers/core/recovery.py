"""Recovery of the CPU tier's blocks from the records of an earlier server.

Slots to which a client of the earlier server may still write stay out of use until its process
does not map the region any more (`FormerWriters`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..errors import InvalidKey
from ..types import NamespaceSpec
from .block import Block
from .cpu_tier import CpuTier
from .operations import Operation
from .slot_records import ExtentRecords, PartRecord, SlotRecords
from .tier_jobs import TierJobs

__all__ = ["FormerWriters", "Recovered", "recover_blocks", "store_missing"]

_SLICE = 256
"""Number of blocks of which one slice examines whether the tiers have them: 0.1 ms, or 2 ms if a
tier lacks all of them."""


@dataclass(slots=True)
class Recovered:
    """Result of a recovery.

    Attributes:
        blocks: the recovered blocks, in the order in which they became complete.
        lost: number of blocks whose record or namespace is damaged, or that lack a part.
        unusable_bytes: bytes of the slots to which clients of the earlier server may write.
    """

    blocks: list[Block] = field(default_factory=list)
    lost: int = 0
    unusable_bytes: int = 0


class FormerWriters:
    """Slots to which clients of an earlier server may still write."""

    def __init__(self, cpu_tier: CpuTier, tags: Iterable[int] = ()) -> None:
        """`tags`: of the sessions whose clients may map the region."""
        self._cpu_tier = cpu_tier
        self._tags = set(tags)
        self._slots: dict[int, list[int]] = defaultdict(list)
        self._torn: list[int] = []
        """Slots of unknown sessions."""
        self.nbytes = 0

    def keep(self, extent: ExtentRecords) -> list[int]:
        """Keeps the slots of an extent that clients may write to, and returns them."""
        kept = []
        for offset, tag in extent.granted:
            if tag in self._tags:
                self._slots[tag].append(offset)
                kept.append(offset)
        if self._tags:
            self._torn += extent.torn
            kept += extent.torn
        self.nbytes += len(kept) * extent.slot_bytes
        return kept

    def gone(self, tag: int) -> None:
        """Called when the client of a session does not map the region any more."""
        self._tags.discard(tag)
        freed = self._slots.pop(tag, [])
        if not self._tags:
            freed, self._torn = freed + self._torn, []
        if freed:
            memory = self._cpu_tier.memory
            self.nbytes -= memory.slot_bytes_of(freed)
            self._cpu_tier.records.free(freed)
            memory.release(sorted(freed))
            self._cpu_tier.made_room()


def recover_blocks(records: SlotRecords, cpu_tier: CpuTier, writers: FormerWriters) -> Recovered:
    """Adds the recorded extents and their blocks to a new CPU tier, which has none.

    Clears all other records.
    """
    result = Recovered()
    extents = list(records.extents())
    found: dict[int, dict[bytes, list[PartRecord]]] = defaultdict(lambda: defaultdict(list))
    for extent in extents:
        for part in extent.parts:
            found[part.number][part.key].append(part)
    blocks: list[tuple[int, int, Block]] = []
    for number, spec in records.namespaces():
        parts = _complete(cpu_tier, spec, found.pop(number, {}), result)
        blocks += _add(cpu_tier, spec, number, parts)
    result.lost += sum(map(len, found.values()))
    blocks.sort(key=lambda each: each[:2])
    used = {slot for _, _, block in blocks for slot in block.slots}
    for extent in extents:
        kept = writers.keep(extent)
        own = used.intersection([part.offset for part in extent.parts])
        recorded = {*(part.offset for part in extent.parts), *(slot for slot, _ in extent.granted), *extent.torn}
        records.free(recorded.difference(own, kept))
        cpu_tier.memory.recover(extent.offset, extent.slot_bytes, own.union(kept))
        result.lost += len(extent.torn)
    for _, same_age in groupby(blocks, key=lambda each: each[0]):
        cpu_tier.use([block for _, _, block in same_age], None)
    if blocks:
        records.continue_after(blocks[-1][0])
    result.blocks = [block for _, _, block in blocks]
    result.unusable_bytes = writers.nbytes
    return result


def _complete(
    cpu_tier: CpuTier, spec: NamespaceSpec, found: dict[bytes, list[PartRecord]], result: Recovered
) -> dict[bytes, list[PartRecord]]:
    """Returns the parts of the blocks that are complete and fit the namespace; counts the others."""
    complete = {}
    for key, parts in found.items():
        parts.sort(key=lambda part: part.rank)
        try:
            slot_bytes = cpu_tier.memory.slot_bytes_for(spec.part_bytes_of(key), spec.world_size)
        except InvalidKey:
            slot_bytes = 0
        ranks = [part.rank for part in parts]
        if ranks == list(range(spec.world_size)) and {(part.age, part.slot_bytes) for part in parts} == {
            (parts[0].age, slot_bytes)
        }:
            complete[key] = parts
        else:
            result.lost += 1
    return complete


def _add(
    cpu_tier: CpuTier, spec: NamespaceSpec, number: int, found: dict[bytes, list[PartRecord]]
) -> list[tuple[int, int, Block]]:
    """Adds blocks; returns them with their age and first offset. Without blocks, forgets `number`."""
    blocks = cpu_tier.recover(spec, number, {key: [part.offset for part in parts] for key, parts in found.items()})
    return [(parts[0].age, parts[0].offset, block) for parts, block in zip(found.values(), blocks, strict=True)]


def store_missing(blocks: Sequence[Block], tier_jobs: TierJobs) -> Operation[None]:
    """Stores recovered blocks in the local tiers that lack them and have room for them.

    The earlier server may have ended before it stored them. A tier without room may have evicted
    them.
    """
    for start in range(0, len(blocks), _SLICE):
        yield None
        tier_jobs.store_missing(blocks[start : start + _SLICE])
