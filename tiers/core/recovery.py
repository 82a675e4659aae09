"""Recovery of the CPU tier's blocks from the records of an earlier server.

Slots to which a client of the earlier server may still write stay out of use until its process
does not map the region any more (`FormerWriters`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter

from ..types import GROUP_INDEX_BYTES, NamespaceSpec
from .block import Block
from .cpu_tier import CpuTier
from .operations import Operation
from .slot_records import ExtentRecords, PartRecord, SlotRecords
from .tier_jobs import TierJobs

__all__ = ["FormerWriters", "RecoveredBlocks", "recover_blocks", "store_missing"]

_SLICE = 256
"""Number of blocks of which one slice examines whether the tiers have them: 0.1 ms, or 2 ms if a
tier lacks all of them."""


@dataclass(slots=True)
class RecoveredBlocks:
    """Result of a recovery.

    Attributes:
        blocks: the recovered blocks, in the order in which they became complete.
        lost: number of blocks that lack a part or their namespace, because it is damaged or a reset
            was running, and of torn records.
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
            freed.sort()
            self._cpu_tier.records.free(freed)
            memory.release(freed)
            self._cpu_tier.made_room()


def recover_blocks(records: SlotRecords, cpu_tier: CpuTier, writers: FormerWriters) -> RecoveredBlocks:
    """Adds the recorded extents and their blocks to a new CPU tier, which has none.

    Clears all other records. Takes 5 µs per block.
    """
    result = RecoveredBlocks()
    extents = list(records.extents())
    found: dict[int, list[PartRecord]] = defaultdict(list)
    for extent in extents:
        for part in extent.parts:
            found[part.number].append(part)
    blocks: list[tuple[int, int, Block]] = []
    used: set[int] = set()
    for number, spec in records.namespaces():
        parts = found.pop(number, [])
        whole = _whole(cpu_tier, spec, parts)
        result.lost += len({part.key for part in parts}) - len(whole)
        added = cpu_tier.recover(spec, number, {key: slots for key, (_, slots) in whole.items()})
        blocks += [(age, slots[0], block) for (age, slots), block in zip(whole.values(), added, strict=True)]
        used.update(*(slots for _, slots in whole.values()))
    result.lost += sum(len({part.key for part in parts}) for parts in found.values())
    blocks.sort(key=itemgetter(0, 1))
    _recover_extents(records, cpu_tier, writers, extents, used)
    for _, same_age in groupby(blocks, key=itemgetter(0)):
        cpu_tier.use([block for _, _, block in same_age], None)
    if blocks:
        records.continue_after(blocks[-1][0])
    result.blocks = [block for _, _, block in blocks]
    result.lost += sum(len(extent.torn) for extent in extents)
    result.unusable_bytes = writers.nbytes
    return result


def _whole(
    cpu_tier: CpuTier, spec: NamespaceSpec, parts: Iterable[PartRecord]
) -> dict[bytes, tuple[int, tuple[int, ...]]]:
    """Returns age and slots of the blocks that have all parts and fit the namespace, by key.

    A part outside of the memory pool of the block's tenant does not fit.
    """
    pool = cpu_tier.queues.shares.of(spec.id).pool
    slot_bytes_of = {nbytes: cpu_tier.memory.slot_bytes_for(nbytes, spec.world_size) for nbytes in spec.part_bytes}
    slot_bytes = [slot_bytes_of[nbytes] for nbytes in spec.part_bytes]
    of_key: dict[bytes, list[PartRecord]] = defaultdict(list)
    whole: dict[bytes, tuple[int, tuple[int, ...]]] = {}
    for part in parts:
        age, _, key, rank, offset, size = part
        group = int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")
        if group >= len(slot_bytes) or slot_bytes[group] != size or cpu_tier.memory.pool_at(offset) != pool:
            continue
        if spec.world_size > 1:
            of_key[key].append(part)
        elif not rank:
            whole[key] = age, (offset,)
    for key, several in of_key.items():
        several.sort(key=attrgetter("rank"))
        if [part.rank for part in several] == list(range(spec.world_size)) and len({part.age for part in several}) == 1:
            whole[key] = several[0].age, tuple(part.offset for part in several)
    return whole


def _recover_extents(
    records: SlotRecords,
    cpu_tier: CpuTier,
    writers: FormerWriters,
    extents: Iterable[ExtentRecords],
    used: Collection[int],
) -> None:
    """Adds extents; `used`: slots of the recovered blocks. Clears the records of other slots."""
    for extent in extents:
        recorded = {part.offset for part in extent.parts}
        own, kept = recorded.intersection(used), writers.keep(extent)
        recorded.update((slot for slot, _ in extent.granted), extent.torn)
        records.free(sorted(recorded.difference(own, kept)))
        cpu_tier.memory.recover(extent.offset, extent.slot_bytes, own.union(kept))


def store_missing(blocks: Sequence[Block], tier_jobs: TierJobs) -> Operation[None]:
    """Stores recovered blocks in the local tiers that lack them and have room for them.

    The earlier server may have ended before it stored them. A tier without room may have evicted
    them.
    """
    for start in range(0, len(blocks), _SLICE):
        yield None
        tier_jobs.store_missing(blocks[start : start + _SLICE])
