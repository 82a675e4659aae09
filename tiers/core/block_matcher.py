"""Matcher of a lookup: pins the blocks that the tiers have, for the keys of one slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..types import MissReason, NamespaceSpec
from .block import Block
from .cpu_tier import CpuTier
from .presence_cache import Presence
from .residency import ResidencyIndex
from .running_lookup import RunningLookup
from .secondary_state import SecondaryTierState

__all__ = ["OTHER_COST", "BlockMatcher", "LookupMatch"]

OTHER_COST = 8
"""A key that is not ready in the CPU tier takes as long as this number of ready keys, and so does
the first block of a run of the eviction policy."""


@dataclass(slots=True)
class LookupMatch:
    """What a lookup found, block by block.

    Attributes:
        items: per examined key the pinned block, or None.
        sources: per item the position of the tier that has the block.
        found: keys that `match` turns into promotions at its end, with their tier and positions.
        promotions: position, tier and block of each promotion.
        retries: positions with an outstanding query to a shared tier.
        deferred: whether an earlier key of the prefix has an outstanding query.
        reasons: known reasons of misses, by position.
        ready: number of leading items that are ready in the CPU tier.
        counted: whether to count misses of tiers.
    """

    items: list[Block | None] = field(default_factory=list)
    sources: bytearray = field(default_factory=bytearray)
    found: dict[bytes, tuple[SecondaryTierState, list[int]]] = field(default_factory=dict)
    promotions: list[tuple[int, SecondaryTierState, Block]] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)
    deferred: bool = False
    reasons: dict[int, MissReason] = field(default_factory=dict)
    ready: int = 0
    counted: bool = True

    def add(self, block: Block | None, source: int = 0) -> None:
        if block is not None:
            block.pins += 1
        self.items.append(block)
        self.sources.append(source)


class BlockMatcher:
    def __init__(self, cpu_tier: CpuTier, residency: ResidencyIndex) -> None:
        self._cpu_tier = cpu_tier
        self._residency = residency

    def match(self, lookup: RunningLookup, keys: Sequence[bytes], match: LookupMatch, others: int) -> Sequence[bytes]:
        """Pins and adds the blocks of the next keys; sets `promoting` for what a tier must load.

        Examines leading keys that are ready in the CPU tier, at a cost of `OTHER_COST * others`,
        and then at most `others` keys. Returns the examined keys, with those behind the first miss
        of a prefix.
        """
        namespace, excluded, prefix = lookup.session.namespace, lookup.excluded, lookup.spec.prefix
        blocks, items = self._cpu_tier.blocks_of(namespace.id), match.items
        is_full = _match_ready(map(blocks.get, keys), items, OTHER_COST * others)
        match.ready = ready = len(items)
        match.sources.extend(bytes(ready))
        if ready == len(keys):
            return keys
        rest = keys[ready:ready] if is_full else keys[ready : ready + others]
        # A prefix has at most one miss.
        known = None if prefix else self._residency.keys_among(namespace.id, rest)
        absent, ends = 0, False
        for key in rest:
            block = blocks.get(key)
            if block is not None and (block.ready or block.pending):
                match.add(block)
            elif known is not None and key not in known:
                absent += 1
                match.add(None)
            elif key in match.found:
                match.found[key][1].append(len(items))
                match.add(None)
            elif not self._match_below(lookup, key, match) and prefix:
                ends = True
                break
        if match.found:
            self._add_found(namespace, match)
        if match.counted:
            self._residency.count_misses(absent, excluded)
        return keys if ends else keys[: len(items)]

    def _add_found(self, namespace: NamespaceSpec, match: LookupMatch) -> None:
        """Adds and pins the blocks that secondary tiers have."""
        added = self._cpu_tier.find_or_add(namespace, list(match.found))
        for block, (secondary, positions) in zip(added, match.found.values(), strict=True):
            block.promoting = True
            block.pins += len(positions)
            match.promotions.append((positions[0], secondary, block))
            match.sources[positions[0]] = secondary.index
            for position in positions:
                match.items[position] = block

    def _match_below(self, lookup: RunningLookup, key: bytes, match: LookupMatch) -> bool:
        """Looks for a block in the secondary tiers; returns False for a miss."""
        namespace, prefix = lookup.session.namespace, lookup.spec.prefix
        secondary, presence = self._residency.find(namespace.id, key, lookup.excluded, counted=match.counted)
        position = len(match.items)
        # Blocks behind an outstanding answer are promoted when the client repeats the lookup.
        deferred = prefix and (match.deferred or bool(match.retries))
        if presence is Presence.UNKNOWN or (secondary is not None and deferred):
            match.retries.append(position)
            match.add(None)
            return True
        if secondary is None:
            if presence is Presence.EXCLUDED:
                match.reasons[position] = MissReason.POLICY
            elif presence is Presence.STALLED:
                match.reasons[position] = MissReason.LOAD_FAILED
            if not prefix:
                match.add(None)
            return False
        match.found[key] = secondary, [position]
        match.add(None)
        return True


def _match_ready(found: Iterable[Block | None], items: list[Block | None], room: int) -> bool:
    """Pins and adds the leading blocks that are ready: the usual case.

    Returns whether it has stopped because the cost has reached `room`.
    """
    run: object = items
    for block in found:
        if block is None or not block.ready:
            return False
        if block.policy_node is not run:
            if len(items) >= room:
                return True
            room -= OTHER_COST - 1
            run = block.policy_node
        block.pins += 1
        items.append(block)
    return False
