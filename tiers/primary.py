"""The CPU tier: which blocks are in the host region, and who has which part of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from .base import NamespaceId
from .blocks import Block, NamespaceSpec
from .history import Left, MissReason
from .lines import Line, Lines
from .region_room import RegionRoom
from .shares import Share
from .slots import SlotAllocator
from .stats import TierStats

__all__ = ["PrimaryTier"]

_TICKS_PER_SECOND = 1e6


class PrimaryTier:
    """Index of the blocks in the host region. Moves no bytes.

    A share has used what the slots of its blocks take, and slots that its writers may still write to.
    """

    def __init__(self, extent_bytes: int, lines: Lines[Block], left: Left) -> None:
        """`left` is told of every ready block that goes, and why."""
        self.memory = SlotAllocator(extent_bytes)
        self.lines = lines
        self.evictions = 0
        self.no_room = 0
        """Slots that were asked for and could not be had."""
        self._left = left
        self._blocks: dict[NamespaceId, dict[bytes, Block]] = defaultdict(dict)
        self._retired: dict[NamespaceId, set[Block]] = {}
        self._owners: dict[int, Block] = {}
        self._detached: dict[int, Share] = {}
        """Slots without a block, by offset, and whose they were."""
        self._room = RegionRoom(self.memory, lines, self._owners)
        self._line_of: dict[tuple[NamespaceId, int], Line[Block]] = {}
        self._clock = 0
        """Counts uses, and moves on with time: in millionths of a second, or beyond."""

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())

    def blocks_of(self, namespace: NamespaceId) -> dict[bytes, Block]:
        """Returns the blocks of a namespace by key; for reading only."""
        return self._blocks[namespace]

    def ready_blocks(self) -> list[Block]:
        """Returns all visible blocks, the last used first."""
        ready = [block for blocks in self._blocks.values() for block in blocks.values() if block.ready]
        return sorted(ready, key=lambda block: block.last_use, reverse=True)

    def left_out_blocks(self) -> list[Block]:
        """Returns the visible blocks that a tier below should have got, and did not, the last used first."""
        return [block for block in self.ready_blocks() if block.left_out is MissReason.STORE_FAILED]

    def find_or_add(self, spec: NamespaceSpec, key: bytes) -> Block:
        """Returns the block with this key, adding an empty one where there is none.

        The caller pins it: a block without slots and pins must not stay (`unpin` takes care of that). Where it comes to
        stay, the caller says who uses it (`use`).

        Raises:
            InvalidKey: the key names a group that the namespace lacks.
        """
        blocks = self._blocks[spec.id]
        block = blocks.get(key)
        if block is None:
            part_bytes = spec.part_bytes_of(key)
            line = self._line_of.get((spec.id, part_bytes)) or self._new_line(spec.id, part_bytes)
            block = blocks[key] = Block(spec, key, part_bytes, line)
        return block

    def use(self, blocks: Iterable[Block], request: Hashable, retain_until: float = 0.0) -> int:
        """Takes note that a request used these blocks, given head first. Arguments and result as of `Lines.use`."""
        self._clock += 1
        used = [block for block in dict.fromkeys(blocks) if not block.retired]
        for block in used:
            block.last_use = self._clock
        if retain_until:
            for block in used:
                block.retain_until = max(block.retain_until, retain_until)
        return self.lines.use(used, request, retain_until)

    def finish(self, request: Hashable) -> None:
        """Takes note that a request is over."""
        self.lines.finish(request)

    def used_at(self, namespace: NamespaceId, key: bytes) -> float | None:
        """Returns when a visible block was used the last time, in seconds and a second too early at most; None for others."""
        block = self._blocks[namespace].get(key) if namespace in self._blocks else None
        return block.last_use / _TICKS_PER_SECOND if block is not None and block.ready else None

    def tick(self, now: float) -> None:
        """Lets time pass: drops blocks that were not used for as long as the tier's `ttl`."""
        self._clock = max(self._clock, int(now * _TICKS_PER_SECOND))
        for block in self.lines.tick(now):
            if block.pins or block.retained:
                self.lines.postpone(block)
            else:
                self.evict(block, MissReason.EXPIRED)
                self.lines.expired += 1

    def reserve(self, wanted: Sequence[tuple[Block, int]]) -> None:
        """Gives slots to (block, rank) pairs, evicting where needed; those that get none keep None.

        The blocks must be pinned, or one of them could be evicted for the sake of another.
        """
        by_line: dict[Line[Block], list[tuple[Block, int]]] = defaultdict(list)
        for pair in wanted:
            by_line[pair[0].line].append(pair)
        for line, pairs in by_line.items():
            offsets = self._take(line.share, line.size_class, len(pairs))
            self.no_room += len(pairs) - len(offsets)
            for (block, rank), offset in zip(pairs, offsets, strict=False):
                block.slots[rank] = offset
                self._owners[offset] = block

    def unpin(self, block: Block) -> None:
        """Drops one pin; a block that has neither pins nor slots is forgotten, a retired or fleeting one goes."""
        block.pins -= 1
        if block.pins:
            return
        if block.retired or block.fleeting or not (block.ready or any(slot is not None for slot in block.slots)):
            self.evict(block, MissReason.EXPIRED if block.fleeting else MissReason.RESET)

    def detach_slot(self, block: Block, rank: int) -> int:
        """Takes an unwritten part's slot away from its block, without freeing it (see `release`)."""
        offset = block.slots[rank]
        if offset is None:
            raise ValueError(f"rank {rank} of {block!r} has no slot")
        block.slots[rank] = None
        del self._owners[offset]
        self._detached[offset] = block.line.share
        return offset

    def release(self, offsets: Iterable[int]) -> None:
        """Frees slots that were detached from their blocks and that nobody can write to any more."""
        for offset in offsets:
            self._detached.pop(offset).used -= self.memory.extent_at(offset).slot_bytes
            self.memory.release([offset])

    def reset(self, namespace: NamespaceId) -> int:
        """Empties the tier of a namespace; returns how many of its blocks are pinned and will go when they are not.

        Those are not found any more, and what is still being written to them is never published (B4.13).
        """
        for block in reversed(list(self._blocks[namespace].values())):  # policies find a tail sooner
            if block.pins:
                if block.ready:
                    self._left(block.namespace, block.key, MissReason.RESET)
                self.disown(block)
            else:
                self.evict(block, MissReason.RESET)
        return self.retiring(namespace)

    def retiring(self, namespace: NamespaceId) -> int:
        """Returns how many blocks a reset still waits for; not for those that a tier does not come back from."""
        return sum(not block.stuck for block in self._retired.get(namespace, ()))

    def disown(self, block: Block) -> None:
        """Takes a pinned block out of the index: nobody finds it any more, and it goes when nobody pins it any more."""
        self._retired.setdefault(block.namespace, set()).add(block)
        block.retired = True
        self._unlist(block)

    def evict(self, block: Block, reason: MissReason = MissReason.EVICTED) -> None:
        """Drops a block and frees its slots. It must not be pinned. The one place where a block leaves the tier."""
        if block.ready and not block.retired:
            self._left(block.namespace, block.key, block.left_out or reason)
        offsets = [offset for offset in block.slots if offset is not None]
        for offset in offsets:
            del self._owners[offset]
        block.slots = [None] * len(block.slots)
        block.written = 0
        block.ready = False
        self._forget(block)
        block.line.share.used -= block.line.size_class * len(offsets)
        self.memory.release(offsets)

    def stats(self, name: str, capacity_bytes: int, *, hits: int, misses: int) -> TierStats:
        """Returns the figures of this moment; hits and misses are counted by who looks up."""
        return TierStats(
            name=name,
            type=name,
            capacity_bytes=capacity_bytes,
            available_bytes=self.memory.available_bytes,
            used_bytes=self.memory.used_bytes(),
            blocks=len(self),
            hits=hits,
            misses=misses,
            evictions=self.evictions,
            dropped=self.no_room,
            expired=self.lines.expired,
            not_retained=self.lines.not_retained,
            shares=self.lines.stats(),
        )

    def _forget(self, block: Block) -> None:
        if not block.retired:
            self._unlist(block)
            return
        retired = self._retired[block.namespace]
        retired.remove(block)
        if not retired:
            del self._retired[block.namespace]

    def _unlist(self, block: Block) -> None:
        del self._blocks[block.namespace][block.key]
        self.lines.remove(block)

    def _new_line(self, namespace: NamespaceId, part_bytes: int) -> Line[Block]:
        line = self.lines.line(namespace, self.memory.slot_bytes_for(part_bytes))
        self._line_of[namespace, part_bytes] = line
        return line

    def _take(self, share: Share, slot_bytes: int, count: int) -> list[int]:
        """Returns up to so many free slots for a share, in ascending order."""
        count = self._within_limit(share, slot_bytes, count)
        offsets = self.memory.allocate(slot_bytes, count)
        share.used += slot_bytes * len(offsets)
        while len(offsets) < count and self._make_room(share, slot_bytes, count - len(offsets)):
            fresh = self.memory.allocate(slot_bytes, count - len(offsets))
            share.used += slot_bytes * len(fresh)
            offsets += fresh
        offsets.sort()
        return offsets

    def _within_limit(self, share: Share, slot_bytes: int, count: int) -> int:
        """Makes room below a share's limit, at its own cost; returns how many slots it may have."""
        over = share.over_limit(slot_bytes * count)
        if share.limit is None or not over:
            return count
        self._evict(self._room.own_victims(share, slot_bytes, over))
        return min(count, max(0, share.limit - share.used) // slot_bytes)

    def _make_room(self, share: Share, slot_bytes: int, count: int) -> bool:
        """Evicts blocks for a share, or takes over another class' extent. Returns whether anything was freed."""
        victims = self._room.victims(share, slot_bytes, count)
        if not victims and self.lines.come_back():
            victims = self._room.victims(share, slot_bytes, count)
        self._evict(victims)
        return bool(victims)

    def _evict(self, victims: Sequence[Block]) -> None:
        for block in victims:
            self.evict(block)
        self.evictions += len(victims)
