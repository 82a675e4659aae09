"""Completion handler: after a job or store, notifies waiting leases, holds and requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..secondary_tier import NamespaceId, Outcome
from ..stats.eviction_history import EvictionHistory
from ..types import DurableStatus, JobId, MissReason, tenant_of
from .block import Block
from .commands import Change, Command, LeaseSettled, RequestsSettled
from .cpu_tier import CpuTier
from .handoffs import HandoffHandler
from .leases import BlockLease
from .lookups import LookupHandler
from .operations import Operation
from .requests import Request, RequestTable
from .sliced_work import IncrementalWork
from .tier_jobs import JobKind, TierJobs
from .waiters import settle_in_slices

__all__ = ["CompletionHandler", "Durability"]

FLUSH_SLICE = 256
"""A flush takes 2 to 8 µs per key."""
_ANSWER_SLICE = 2048
_REQUEST_COST = 32
"""To store a block for a request takes as long as to settle this number of items."""


class Durability:
    """Tells which blocks a durable tier has or is storing; starts missing stores."""

    def __init__(self, cpu_tier: CpuTier, tier_jobs: TierJobs) -> None:
        self._cpu_tier = cpu_tier
        self._tier_jobs = tier_jobs
        self._residency = tier_jobs.residency

    def flush(
        self,
        namespace: NamespaceId,
        keys: Sequence[bytes],
        *,
        deadline: float = 0.0,
        now: float = 0.0,
        slice_keys: int = FLUSH_SLICE,
    ) -> Operation[bytes]:
        """Starts storing blocks that no durable tier has; waits for it, at most until `deadline`.

        Returns a `DurableStatus` per key.
        """
        statuses: dict[bytes, int] = {}
        pending: deque[bytes] = deque()
        for start in range(0, len(keys), slice_keys):
            if len(keys) > slice_keys:
                now = yield None
            new = [key for key in dict.fromkeys(keys[start : start + slice_keys]) if key not in statuses]
            self._store_missing(namespace, new)
            statuses.update((key, int(self.of(namespace, key))) for key in new)
            pending.extend(key for key in new if statuses[key] == DurableStatus.PENDING)
        if pending and now < deadline:
            while pending and now < deadline:
                now = yield None  # each change continues all waiting flushes
                now = yield from self._drop_settled(namespace, pending, statuses, slice_keys, now)
                if pending:
                    now = yield Change(deadline)
            yield from self._drop_settled(namespace, pending, statuses, slice_keys, now, even_if_pending=True)
        answer = b""
        for start in range(0, len(keys), _ANSWER_SLICE):
            if len(keys) > _ANSWER_SLICE:
                yield None
            answer += bytes(map(statuses.__getitem__, keys[start : start + _ANSWER_SLICE]))
        return answer

    def _drop_settled(
        self,
        namespace: NamespaceId,
        pending: deque[bytes],
        statuses: dict[bytes, int],
        slice_keys: int,
        now: float,
        *,
        even_if_pending: bool = False,
    ) -> Operation[float]:
        """Updates the statuses of the first pending keys, and drops these keys.

        Stops at the first key that is still pending. So each change costs only one key and the keys
        that it has settled.
        """
        for number in range(1, len(pending) + 1):
            key = pending[0]
            statuses[key] = self.of(namespace, key)
            if statuses[key] == DurableStatus.PENDING and not even_if_pending:
                break
            pending.popleft()
            if not number % slice_keys:
                now = yield None
        return now

    def _store_missing(self, namespace: NamespaceId, keys: Sequence[bytes]) -> None:
        blocks = self._cpu_tier.blocks_of(namespace)
        waiting = [
            block
            for key in keys
            if (block := blocks.get(key)) and block.ready and not self._residency.is_becoming_durable(namespace, key)
        ]
        self._tier_jobs.write_back.cascade(waiting, None, even_if_busy=True)

    def store_skipped(self) -> None:
        """Stores the blocks whose earlier store in a tier failed or found the queue full.

        The most recently used blocks are stored first. Blocks that a tier has evicted are not
        stored again, because they would displace the current blocks of the tier.
        """
        self._tier_jobs.write_back.cascade(self._cpu_tier.skipped_blocks(), None, even_if_busy=True)

    def flush_queues(self) -> None:
        """Starts the stores that wait for more blocks."""
        self._tier_jobs.write_back.flush_queues()

    def of(self, namespace: NamespaceId, key: bytes) -> DurableStatus:
        if self._residency.is_durable(namespace, key):
            return DurableStatus.DURABLE
        block = self._cpu_tier.blocks_of(namespace).get(key)
        being_written = block is not None and block.pending
        on_its_way = being_written or self._residency.is_becoming_durable(namespace, key)
        return DurableStatus.PENDING if on_its_way else DurableStatus.VOLATILE


class CompletionHandler:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        tier_jobs: TierJobs,
        requests: RequestTable,
        lookups: LookupHandler,
        handoffs: HandoffHandler,
        history: EvictionHistory,
        commands: list[Command],
        work: IncrementalWork,
    ) -> None:
        self._work = work
        self._cpu_tier = cpu_tier
        self._tier_jobs = tier_jobs
        self._requests = requests
        self._lookups = lookups
        self._handoffs = handoffs
        self._history = history
        self._commands = commands

    def settle(self, blocks: Sequence[Block]) -> None:
        """Notifies leases, holds and requests that wait for those blocks that are not pending.

        The first slice runs now, the others run later.
        """
        for tenant, operation in self._settling(blocks):
            self._work.perform(operation, tenant)

    def settle_later(self, blocks: Sequence[Block]) -> None:
        """As `settle`, but the first slice runs later, too: thousands of stores can end at once."""
        for tenant, operation in self._settling(blocks):
            self._work.perform_later(operation, tenant)

    def _settling(self, blocks: Sequence[Block]) -> Iterator[tuple[bytes, Operation[None]]]:
        """Yields an operation for each tenant that waits for blocks."""
        of_requests = self._requests.waiters.among(blocks)
        any_awaited = of_requests | self._lookups.leases.waiters.among(blocks) | self._handoffs.awaited_among(blocks)
        if not any_awaited:  # the usual case
            return
        found: dict[bytes, list[Block]] = {}
        for block in blocks:
            if block in any_awaited:
                found.setdefault(tenant_of(block.namespace), []).append(block)
        for tenant, awaited in found.items():
            kept = [block for block in awaited if block in of_requests]
            for block in kept:  # requests do not pin the blocks that they wait for
                block.pins += 1
            yield tenant, self._settle(awaited, kept)

    def _settle(self, blocks: Sequence[Block], kept: Sequence[Block]) -> Operation[None]:
        """`kept`: blocks that are pinned until the operation ends."""
        slices = 0
        try:
            for _ in settle_in_slices(self._waits_for(blocks)):
                slices += 1
                yield None
        finally:
            self._cpu_tier.unpin(kept)
            if slices and kept:
                self._commands.append(RequestsSettled())

    def _waits_for(self, blocks: Sequence[Block]) -> Iterator[tuple[Callable[[int], int], Block]]:
        """Yields, per lease, hold or request and block, what settles a number of its items."""
        for block in blocks:
            for lease in self._lookups.leases.waiters.of(block):
                yield partial(self._settle_lease, lease, block), block
            for hold in self._handoffs.awaiting(block):
                yield partial(self._handoffs.settle, hold, block), block
            for request in self._requests.waiters.of(block):
                yield partial(self._settle_request, request, block), block

    def _settle_lease(self, lease: BlockLease, block: Block, most: int) -> int:
        items = self._lookups.settle(lease, block, most)
        if items and not lease.pending:
            self._commands.append(LeaseSettled(lease.id))
        return items

    def _settle_request(self, request: Request, block: Block, _most: int) -> int:
        if not self._requests.settle(request, block):
            return 0
        if block.ready:
            self._tier_jobs.write_back.cascade_for(request, [block])
        else:
            request.incomplete += 1
        self._requests.end_if_settled(request)
        return _REQUEST_COST

    def job_finished(self, job_id: JobId, outcomes: Sequence[Outcome]) -> None:
        finished = self._tier_jobs.finish(job_id, outcomes)
        if finished is None:
            return
        for request in finished.acknowledged:
            self._requests.end_if_settled(request)
        if finished.kind is JobKind.STORE:
            return
        blocks = [block for block, _ in finished.results]
        self._lookups.prefetches.ended(blocks)
        loaded = [block for block, done in finished.results if done and not block.invalidated]
        failed = [block for block, done in finished.results if not done or block.invalidated]
        for block in loaded:
            block.promoted()
        self._cpu_tier.became_ready(loaded)
        for block in failed:
            reason = MissReason.RESET if block.invalidated else MissReason.LOAD_FAILED
            self._history.record(block.namespace, block.key, reason)
            self._lookups.drop_promotion(block)
        self.settle(blocks)
        self._cpu_tier.unpin(blocks)

    def tier_stalled(self, tier: int, *, stalled: bool) -> None:
        """Called when a tier stalls or recovers. Clients do not wait for loads of a stalled one."""
        change = self._tier_jobs.stall(tier, stalled=stalled)
        for block in change.abandoned:
            self._history.record(block.namespace, block.key, MissReason.LOAD_FAILED)
            block.promoting = False
            self._cpu_tier.unlink(block)
        self.settle(change.abandoned)
        for request in change.acknowledged:
            self._requests.end_if_settled(request)
        if change.is_back:
            self._tier_jobs.write_back.replay_skipped(tier, self._cpu_tier.skipped_blocks())
