"""The CPU tier: which blocks are in the host region, and who makes room for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice

from .base import NamespaceId
from .blocks import Block, NamespaceSpec
from .history import MissReason
from .policies import EvictionPolicy
from .slots import SlotAllocator

__all__ = ["PrimaryTier"]

_EXTENT_CANDIDATES = 256
"""Victims of another class that are looked at for an extent that can be taken over."""


class PrimaryTier:
    """Index of the blocks in the host region. Moves no bytes.

    Eviction is by size class, each with a policy of its own. Memory moves between classes an extent at a time: a class
    takes over the extent of another class' next victim where that victim has been idle for longer than
    its own next victim, so that yesterday's model does not keep the region from today's.
    """

    def __init__(
        self,
        extent_bytes: int,
        new_policy: Callable[[], EvictionPolicy[Block]],
        left: Callable[[NamespaceId, bytes, MissReason], None],
    ) -> None:
        """`left` is told of every ready block that goes, and why."""
        self._left = left
        self.memory = SlotAllocator(extent_bytes)
        self.evictions = 0
        self.no_room = 0
        """Slots that were asked for and could not be had."""
        self._new_policy = new_policy
        self._policies: dict[int, EvictionPolicy[Block]] = {}
        self._blocks: dict[NamespaceId, dict[bytes, Block]] = defaultdict(dict)
        self._owners: dict[int, Block] = {}
        self._retired: dict[NamespaceId, set[Block]] = {}
        self._clock = 0

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())

    def blocks_of(self, namespace: NamespaceId) -> dict[bytes, Block]:
        """Returns the blocks of a namespace by key; for reading only."""
        return self._blocks[namespace]

    def ready_blocks(self) -> list[Block]:
        """Returns all visible blocks, the last used first."""
        ready = [block for blocks in self._blocks.values() for block in blocks.values() if block.ready]
        return sorted(ready, key=lambda block: block.last_use, reverse=True)

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
            block = Block(spec, key, part_bytes, self._policy_for(self.memory.slot_bytes_for(part_bytes)))
            blocks[key] = block
        return block

    def use(self, blocks: Iterable[Block], request: Hashable) -> None:
        """Takes note that a request used these blocks, given head first (see `EvictionPolicy.use`)."""
        self._clock += 1
        used = [block for block in dict.fromkeys(blocks) if not block.retired]
        for block in used:
            block.last_use = self._clock
        for order in self._policies.values():
            mine = used if len(self._policies) == 1 else [block for block in used if block.order is order]
            if mine:
                order.use(mine, request)

    def finish(self, request: Hashable) -> None:
        """Takes note that a request is over."""
        for order in self._policies.values():
            order.finish(request)

    def reserve(self, wanted: Sequence[tuple[Block, int]]) -> None:
        """Gives slots to (block, rank) pairs, evicting where needed; those that get none keep None.

        The blocks must be pinned, or one of them could be evicted for the sake of another.
        """
        by_class: dict[int, list[tuple[Block, int]]] = defaultdict(list)
        for block, rank in wanted:
            by_class[self.memory.slot_bytes_for(block.part_bytes)].append((block, rank))
        for slot_bytes, pairs in by_class.items():
            offsets = self._take(slot_bytes, len(pairs))
            self.no_room += len(pairs) - len(offsets)
            for (block, rank), offset in zip(pairs, offsets, strict=False):
                block.slots[rank] = offset
                self._owners[offset] = block

    def unpin(self, block: Block) -> None:
        """Drops one pin; a block that has neither pins nor slots is forgotten, and a retired one goes."""
        block.pins -= 1
        if block.pins == 0 and (block.retired or not (block.ready or any(slot is not None for slot in block.slots))):
            self.evict(block, MissReason.RESET)

    def detach_slot(self, block: Block, rank: int) -> int:
        """Takes an unwritten part's slot away from its block, without freeing it (see `release`)."""
        offset = block.slots[rank]
        if offset is None:
            raise ValueError(f"rank {rank} of {block!r} has no slot")
        block.slots[rank] = None
        del self._owners[offset]
        return offset

    def release(self, offsets: Iterable[int]) -> None:
        """Frees slots that were detached from their blocks and that nobody can write to any more."""
        self.memory.release(offsets)

    def reset(self, namespace: NamespaceId) -> int:
        """Empties the tier of a namespace; returns how many of its blocks are pinned and will go when they are not.

        Those are not found any more, and what is still being written to them is never published (B4.13).
        """
        for block in list(self._blocks[namespace].values()):
            if block.pins:
                self._retired.setdefault(namespace, set()).add(block)
                block.retired = True
                self._unlist(block)
            else:
                self.evict(block, MissReason.RESET)
        return self.retiring(namespace)

    def retiring(self, namespace: NamespaceId) -> int:
        """Returns how many blocks a reset still waits for."""
        return len(self._retired.get(namespace, ()))

    def evict(self, block: Block, reason: MissReason = MissReason.EVICTED) -> None:
        """Drops a block and frees its slots. It must not be pinned."""
        if block.ready and not block.retired:
            self._left(block.namespace, block.key, block.left_out or reason)
        offsets = [offset for offset in block.slots if offset is not None]
        for offset in offsets:
            del self._owners[offset]
        block.slots = [None] * len(block.slots)
        block.written = 0
        block.ready = False
        self._forget(block)
        self.memory.release(offsets)

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
        block.order.remove(block)

    def _policy_for(self, slot_bytes: int) -> EvictionPolicy[Block]:
        policy = self._policies.get(slot_bytes)
        if policy is None:
            policy = self._policies[slot_bytes] = self._new_policy()
        return policy

    def _take(self, slot_bytes: int, count: int) -> list[int]:
        offsets = self.memory.allocate(slot_bytes, count)
        while len(offsets) < count and self._make_room(slot_bytes, count - len(offsets)):
            offsets += self.memory.allocate(slot_bytes, count - len(offsets))
        offsets.sort()
        return offsets

    def _make_room(self, slot_bytes: int, count: int) -> bool:
        """Evicts own blocks or takes over another class' extent. Returns whether anything was freed."""
        own = list(islice(self._evictable(slot_bytes), count))
        victims = self._idle_extent(slot_bytes, at_any_time=not own) or own
        for block in victims:
            self.evict(block)
        self.evictions += len(victims)
        return bool(victims)

    def _evictable(self, slot_bytes: int) -> Iterator[Block]:
        policy = self._policies.get(slot_bytes)
        return (block for block in policy.victims() if block.pins == 0) if policy else iter(())

    def _idle_extent(self, slot_bytes: int, *, at_any_time: bool) -> list[Block] | None:
        """Returns the blocks of another class' extent that may be taken over, or None.

        Its class has a block that has been idle for longer than any of this class, unless that does not matter; it lies in
        the extent, or one of the class' next victims does; and nothing in it is pinned, being written or in quarantine.
        """
        if slot_bytes > self.memory.extent_bytes:
            return None
        own = None if at_any_time else self._policies[slot_bytes].oldest()
        others = []
        for other, policy in self._policies.items():
            oldest = policy.oldest() if other != slot_bytes else None
            if oldest is not None and (own is None or oldest.last_use < own.last_use):
                others.append((oldest.last_use, other, oldest))
        for _, other, oldest in sorted(others, key=lambda entry: entry[:2]):
            blocked: set[int] = set()
            candidates = islice(self._evictable(other), _EXTENT_CANDIDATES)
            for block in chain([oldest] if oldest.pins == 0 else [], candidates):
                blocks = self._blocks_of_extent(block, blocked)
                if blocks:
                    return blocks
        return None

    def _blocks_of_extent(self, block: Block, blocked: set[int]) -> list[Block] | None:
        """Returns all blocks of an extent that a block lies in, if all can be evicted; notes extents where that is not so."""
        for offset in block.slots:
            if offset is None:
                continue
            extent = self.memory.extent_at(offset)
            if extent.offset in blocked:
                continue
            owners = [self._owners.get(slot) for slot in extent.in_use]
            blocks = {owner for owner in owners if owner is not None and owner.pins == 0}
            if all(owner in blocks for owner in owners):
                return list(blocks)
            blocked.add(extent.offset)
        return None
