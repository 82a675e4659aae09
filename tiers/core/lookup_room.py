"""Room of a lookup: slots and pins for the blocks that a lookup has found.

A lookup finds no room for a block if no slot can be freed for its promotion, if other lookups take
room before it, or if the leases of its tenant pin as much memory as they may.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..secondary_tier import NamespaceId
from ..types import MissReason
from .block import Block
from .block_matcher import LookupMatch
from .cpu_tier import CpuTier
from .pin_budget import PinBudget
from .prefetches import PrefetchBudget
from .presence_cache import Presence
from .room_queue import RoomQueue
from .running_lookup import RunningLookup
from .secondary_state import SecondaryTierState
from .tier_jobs import TierJobs

__all__ = ["LookupRoom"]

_PEEKED_KEYS = 4096
"""Number of leading keys that are examined for a promotion before a lookup: 0.1 µs per key."""


class LookupRoom:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        tier_jobs: TierJobs,
        room: RoomQueue,
        pin_budget: PinBudget,
    ) -> None:
        self.prefetches = PrefetchBudget(cpu_tier.memory)
        self._cpu_tier = cpu_tier
        self._tier_jobs = tier_jobs
        self._residency = tier_jobs.residency
        self._room = room
        self._pin_budget = pin_budget

    def must_queue(self, lookup: RunningLookup) -> bool:
        """Returns whether a lookup that needs room comes after lookups that wait."""
        if self._room.may_take(lookup.session.namespace.id, lookup.waiter, may_wait=True):
            return False
        needs_room = self._needs_room(lookup)
        self._residency.send_queries()
        return needs_room

    def _needs_room(self, lookup: RunningLookup) -> bool:
        namespace = lookup.session.namespace.id
        blocks = self._cpu_tier.blocks_of(namespace)
        for key in lookup.keys[:_PEEKED_KEYS]:
            block = blocks.get(key)
            if block is not None and (block.ready or block.pending):
                continue
            if self._residency.peek(namespace, key, lookup.excluded) is Presence.HELD:
                return True
            if lookup.spec.prefix:
                return False
        return False

    def place(self, lookup: RunningLookup, match: LookupMatch) -> None:
        """Allocates slots for promotions and starts them (B3.16).

        If there is no room for all blocks, a lookup that may wait keeps those before the first
        block without room. For other lookups, blocks without room become misses.
        """
        started, has_room = 0, True
        limit = self._first_over_budget(lookup, match)
        if match.promotions or limit is not None:
            started, has_room = self._start_promotions(lookup, match, limit)
        if lookup.prefetch is not None:
            hits = len(match.items) - match.items.count(None)
            lookup.prefetch.add(present=hits - started, started=started, has_room=has_room)

    def _start_promotions(self, lookup: RunningLookup, match: LookupMatch, limit: int | None) -> tuple[int, bool]:
        """Starts the promotions before the position `limit`.

        Returns how many it has started, and whether there was room for all blocks.
        """
        had_room = self._cpu_tier.has_more_room
        is_prefetch, stops = lookup.prefetch is not None, lookup.spec.prefix or lookup.may_wait
        fitting = [block for position, _, block in match.promotions if limit is None or position < limit]
        namespace, may_wait = lookup.session.namespace.id, lookup.may_wait
        wanted = fitting if self._room.may_take(namespace, lookup.waiter, may_wait=may_wait) else []
        self._cpu_tier.reserve(self.prefetches.admitted(wanted) if is_prefetch else wanted)
        started = []
        failed: dict[Block, int] = {}
        for position, secondary, block in match.promotions:
            if None not in block.slots and not (stops and failed):
                started.append((secondary, block))
            else:
                self.drop_promotion(block)
                failed.setdefault(block, position)
        first = min(failed.values(), default=limit)
        first = limit if first is None or (limit is not None and limit < first) else first
        if first is not None:
            lookup.may_wait = lookup.may_wait and not match.retries and self._may_fit(lookup, match, first)
            if lookup.may_wait:
                self._truncate(match, first)
                lookup.lacks_room, lookup.is_over_budget = True, first == limit
            else:
                self._drop_unplaced(match, failed, first if lookup.spec.prefix else limit)
            # The blocks that this lookup drops make no room for the waiting lookups.
            self._cpu_tier.has_more_room = had_room
        self._tier_jobs.promote(started, lookup.user)
        if is_prefetch:
            self.prefetches.started(block for _, block in started)
        return len(started), first is None

    def fetch(self, namespace: NamespaceId, blocks: Iterable[Block]) -> None:
        """Promotes pinned blocks that only a secondary tier has, except during a reset (B3.19)."""
        if self._cpu_tier.pending_reset_blocks(namespace):
            return
        found: list[tuple[SecondaryTierState, Block]] = []
        for block in blocks:
            if block.ready or block.pending or block.hold_only:
                continue
            # A publication does not come again after the answers of shared tiers.
            secondary, _ = self._residency.find(block.namespace, block.key, counted=False, waits=False)
            if secondary is not None:
                block.promoting = True
                found.append((secondary, block))
        self._cpu_tier.reserve([block for _, block in found])
        for _, block in found:
            if None in block.slots:
                self.drop_promotion(block)
        self._tier_jobs.promote([(secondary, block) for secondary, block in found if block.promoting], None)
        self._residency.send_queries()

    def drop_promotion(self, block: Block) -> None:
        """Frees all slots of a failed promotion. No client can write to such slots."""
        block.promoting = False
        ranks = [rank for rank, slot in enumerate(block.slots) if slot is not None]
        block.written = 0
        self._cpu_tier.release([self._cpu_tier.detach_slot(block, rank) for rank in ranks])

    def _first_over_budget(self, lookup: RunningLookup, match: LookupMatch) -> int | None:
        """Returns the position of the first block that the tenant's leases must not pin, if any."""
        if not self._pin_budget.is_limited or lookup.prefetch is not None or not match.items:
            return None
        left = self._pin_budget.left_for_leases(lookup.session.namespace.id)
        spec = lookup.session.namespace
        largest = self._cpu_tier.memory.slot_bytes_for(max(spec.part_bytes), spec.world_size) * spec.world_size
        if left >= largest * len(match.items):
            return None
        counted: set[Block] = set()  # a key may occur more than once
        for position, block in enumerate(match.items):
            if block is not None and not block.leases and block not in counted:
                counted.add(block)
                left -= block.allocated_bytes
                if left < 0:
                    return position
        return None

    def _may_fit(self, lookup: RunningLookup, match: LookupMatch, first: int) -> bool:
        """Returns whether the hits up to the first one without room would fit without other leases.

        Otherwise the lookup would wait in vain.
        """
        mine = {*match.items[: first + 1], *(lookup.lease.items if lookup.lease is not None else ())}
        namespace = lookup.session.namespace.id
        share = self._cpu_tier.queues.shares.of(namespace)
        most = min(self._pin_budget.lease_bound(namespace), self._cpu_tier.memory.available_bytes(share.pool))
        nbytes: int = sum(block.allocated_bytes for block in mine if block is not None)
        return nbytes <= most and not (share.limit is not None and nbytes > share.limit)

    def _truncate(self, match: LookupMatch, first: int) -> None:
        """Forgets the blocks from a position on, as if the lookup had not come to them."""
        rest = match.items[first:]
        del match.items[first:], match.sources[first:]
        match.ready = min(match.ready, first)
        match.reasons = {position: reason for position, reason in match.reasons.items() if position < first}
        self._cpu_tier.unpin(list(filter(None, rest)))

    def _drop_unplaced(self, match: LookupMatch, failed: Collection[Block], first: int | None) -> None:
        """Turns blocks without room into misses, and all blocks from the position `first` on."""
        if first is not None:
            match.reasons |= dict.fromkeys((p for p in match.retries if p >= first), MissReason.NO_ROOM)
            match.retries = [position for position in match.retries if position < first]
            match.ready = min(match.ready, first)
        dropped: list[Block] = []
        for position, block in enumerate(match.items):
            if block is not None and (block in failed or (first is not None and position >= first)):
                match.items[position] = None
                match.reasons[position] = MissReason.NO_ROOM
                dropped.append(block)
        self._cpu_tier.unpin(dropped)
