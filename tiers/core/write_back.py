"""Write-back: which blocks of the CPU tier are queued for a store in which secondary tier."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from ..types import MissReason
from .block import Block, without_hold_only
from .catalog import EntryState
from .cpu_tier import CpuTier
from .presence_cache import Name
from .requests import Request
from .secondary_state import SecondaryTierState

__all__ = ["WriteBack"]


class WriteBack:
    """Queues blocks for write-back. A queued block is pinned until its store has ended."""

    def __init__(
        self,
        secondaries: Sequence[SecondaryTierState],
        cpu_tier: CpuTier,
        advance: Callable[[SecondaryTierState], None],
    ) -> None:
        """`advance` starts stores of queued blocks."""
        self._secondaries = secondaries
        self.storing = [secondary for secondary in secondaries if not secondary.tier.on_demand]
        """Tiers in which blocks are stored."""
        self._filtered = [secondary for secondary in self.storing if secondary.admission is not None]
        self._cpu_tier = cpu_tier
        self._advance = advance

    def cascade(self, blocks: Sequence[Block], user: Hashable, *, even_if_busy: bool = False) -> None:
        """Queues ready blocks for write-back to every tier that lacks them (B3.7, B3.10).

        `user` identifies the request for eviction policies. A block that does not fit into a tier's
        queue is not stored in this tier. A block that the tier's admission filter rejects may be
        stored at its next use (`used`). With `even_if_busy`, there is no queue limit and no filter.
        """
        blocks = without_hold_only(blocks)
        for block in blocks:
            block.skip_reason = None
        for secondary in self.storing:
            for block in blocks:
                if secondary.catalog.get(block.namespace, block.key) is None:
                    if not even_if_busy and not secondary.admits(block, user):
                        block.skip_reason = MissReason.POLICY
                        continue
                    limit = None if even_if_busy else secondary.max_queued_bytes
                    if not self._enqueue(secondary, block, limit):
                        block.skip_reason = MissReason.STORE_FAILED
                        secondary.dropped += 1
            secondary.use(blocks, user)
            self._advance(secondary)

    def used(self, blocks: Sequence[Block], user: Hashable) -> None:
        """Offers blocks that a request found in the CPU tier to tiers with an admission filter."""
        blocks = without_hold_only(blocks) if self._filtered else blocks
        for secondary in self._filtered:
            taken = []
            for block in blocks:
                if (
                    block.ready
                    and secondary.catalog.get(block.namespace, block.key) is None
                    and secondary.admits(block, user)
                ):
                    if self._enqueue(secondary, block, secondary.max_queued_bytes):
                        block.skip_reason = None
                        taken.append(block)
                    else:
                        block.skip_reason = MissReason.STORE_FAILED
                        secondary.dropped += 1
            secondary.use(taken, user)
            self._advance(secondary)

    def cascade_for(self, request: Request, blocks: Sequence[Block]) -> None:
        """Queues ready blocks for the request's REQUEST_LEVEL tiers, without a filter (B3.6).

        The request waits for the end of these stores. The queue limit is twice the usual one. If a
        block does not fit, it is not stored, and the request counts it as incomplete (B3.10).
        """
        blocks = without_hold_only(blocks)
        for secondary in self.storing:
            if secondary.index not in request.request_level_tiers:
                continue
            for block in blocks:
                entry = secondary.catalog.get(block.namespace, block.key)
                if entry is not None and entry.state is EntryState.HELD:
                    continue
                # A stalled tier may never finish the store.
                if secondary.stalled or (
                    entry is None and not self._enqueue(secondary, block, 2 * secondary.max_queued_bytes)
                ):
                    secondary.dropped += entry is None
                    request.incomplete += 1
                    continue
                waiting = secondary.pending_stores.setdefault((block.namespace, block.key), {})
                if request not in waiting:
                    request.pending_stores += 1
                    waiting[request] = None
            secondary.use(blocks, request.user)
            self._advance(secondary)

    def replay_skipped(self, tier: int, blocks: Sequence[Block]) -> None:
        """Queues blocks, given in this order, that the tier lacks, until its queue is full."""
        secondary = self._secondaries[tier - 1]
        for block in blocks if secondary in self.storing else ():
            if secondary.catalog.get(block.namespace, block.key) is not None:
                continue
            if not self._enqueue(secondary, block, secondary.max_queued_bytes):
                break
            block.skip_reason = None
            secondary.use([block], None)
        self._advance(secondary)

    def flush_queues(self) -> None:
        """Starts the stores of all queued blocks without waiting for more blocks."""
        for secondary in self._secondaries:
            secondary.is_urgent = bool(secondary.write_back_queue)
            self._advance(secondary)

    def abandon_queue(self, secondary: SecondaryTierState) -> list[Request]:
        """Discards the write-back queue; returns the requests whose pending stores it ended."""
        acknowledged: list[Request] = []
        for block in secondary.write_back_queue:
            entry = secondary.entry_of(block)
            secondary.catalog.drop(entry)
            secondary.queued_bytes -= entry.nbytes
            secondary.dropped += 1
            block.skip_reason = MissReason.STORE_FAILED
            self._cpu_tier.unpin([block])
        secondary.dequeue(list(secondary.write_back_queue))
        for name in list(secondary.pending_stores):
            acknowledged += self.acknowledge(secondary, name, stored=False)
        return acknowledged

    def acknowledge(self, secondary: SecondaryTierState, name: Name, *, stored: bool) -> list[Request]:
        """Ends the pending stores of a block; returns the requests that waited for it."""
        requests = list(secondary.pending_stores.pop(name, ()))
        for request in requests:
            request.pending_stores -= 1
            request.incomplete += not stored
        return requests

    def _enqueue(self, secondary: SecondaryTierState, block: Block, limit: int | None) -> bool:
        """Queues a block for write-back; False if queue or tier are full or the tier is stalled."""
        if secondary.stalled or (limit is not None and secondary.queued_bytes + block.nbytes > limit):
            return False
        victims = secondary.catalog.begin_store(block.namespace, block.key, block.nbytes)
        if victims is None:
            return False
        secondary.pending_removals += victims
        block.pins += 1
        secondary.enqueue(block)
        return True
