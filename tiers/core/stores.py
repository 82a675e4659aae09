"""Store handler: grants slots to writers, publishes blocks, quarantines slots of lost writers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from ..errors import InvalidItem
from ..stats.eviction_history import EvictionHistory
from ..stats.miss_ratio_curve import MissRatioCurves
from ..types import EngineSession, MissReason, Owner, StoreAnswer, StoreId, StoreStatus
from .block import Block, parts_written
from .completions import CompletionHandler
from .conversations import ConversationTable
from .cpu_tier import CpuTier
from .in_flight_stores import STORE_SLICE, InFlightStores, Preparation, Store
from .operations import Operation
from .pin_budget import PinBudget
from .requests import Request, RequestTable
from .sliced_work import UnpinQueue
from .tier_jobs import TierJobs

__all__ = ["StoreHandler"]


_UNPIN_COST = 8
"""Cost of a pin in the unpin queue: 0.2 µs, or 3 µs if the block is dropped."""


class StoreHandler:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        tier_jobs: TierJobs,
        requests: RequestTable,
        conversations: ConversationTable,
        completions: CompletionHandler,
        history: EvictionHistory,
        miss_ratio_curves: MissRatioCurves | None,
        pin_budget: PinBudget,
        new_ids: Iterator[int],
        unpins: UnpinQueue,
        continue_if: Callable[[bool], None],
    ) -> None:
        """`continue_if`: if its argument is True, the CPU tier makes spare room later."""
        self.table = InFlightStores(cpu_tier, new_ids, pin_budget.stored)
        self._pin_budget = pin_budget
        self._cpu_tier = cpu_tier
        self._tier_jobs = tier_jobs
        self._requests = requests
        self._conversations = conversations
        self._history = history
        self._completions = completions
        self._miss_ratio_curves = miss_ratio_curves
        self._unpins = unpins
        self._continue_if = continue_if

    def prepare(self, preparation: Preparation, now: float) -> Operation[StoreAnswer]:
        """Grants slots for the missing parts of the session's rank.

        If it ends early, no store remains. Raises InvalidKey if a key names an unknown group,
        LimitExceeded if the tenant has too many stores, StoreNotFound if the store has ended, and
        InvalidItem if the session has no rank, or if the client has withdrawn the grant or uses
        its id already.
        """
        keys, most = preparation.keys, preparation.slice_keys
        try:
            for start in range(0, len(keys) or 1, most):
                if len(keys) > most:
                    now = yield None
                self._prepare_slice(preparation, keys[start : start + most], now, more=start + most < len(keys))
        except BaseException:
            store = preparation.store
            if store is not None and self.table.is_open(store) and store.failed is None:
                self.abandon([store])  # no client knows its slots
            raise
        return preparation.answer()

    def _prepare_slice(self, preparation: Preparation, keys: Sequence[bytes], now: float, *, more: bool) -> None:
        """Grants slots. `more`: the next slice follows.

        Until the last slice the store also pins blocks that need no slot, as far as the tenant may.
        """
        session, owner, store = preparation.session, preparation.owner, preparation.store
        rank, expires_at = session.own_rank(), now + preparation.spec.lease_seconds
        session.check_wanted(owner.grant_id)
        self.table.check(store, owner)
        blocks = self._cpu_tier.find_or_add(session.namespace, keys)
        found = list(dict.fromkeys(blocks))
        for block in found:
            block.pins += 1  # no block of this store may be evicted to make room for another
        statuses, wanted = self._claim(blocks, rank)
        request = self._requests.get(session.engine, owner.request_id)
        retain_until = max(preparation.retain_until, self._add_to_conversation(request, keys))
        if store is None and more:
            store = preparation.store = self._begin(owner, rank, expires_at, request, now)
            store.user = owner.user or store
        user = owner.user if store is None else store.user
        declined = self._declined(found, wanted, owner) if not retain_until else None
        admitted = [block for block in wanted if block not in declined] if declined else list(wanted)
        self._cpu_tier.reserve(self._affordable(session, admitted), rank)
        granted, slots = self._grant(wanted, rank)
        refused = self._refused(wanted, rank, declined or ())
        for block in refused:
            statuses[wanted[block]] = StoreStatus.NO_ROOM
        used = [block for block in found if block not in refused] if refused else found
        if declined is None:
            preparation.not_retained += self._cpu_tier.use(used, user, retain_until)
        if retain_until:
            self._tier_jobs.retain(used)
        if request is not None and request.request_level_tiers:
            self._cascade_present(request, found, set(granted))
        if self._miss_ratio_curves is not None:
            self._miss_ratio_curves.stored(granted)
        preparation.statuses += statuses
        preparation.slots += slots
        if store is None and granted:
            store = preparation.store = self._begin(owner, rank, expires_at, request, now)
        # The store keeps the pins of the granted blocks.
        own = set(granted) if len(granted) < len(found) else ()
        others = [block for block in found if block not in own] if own or not granted else []
        if store is not None:
            store.expires_at = max(store.expires_at, expires_at)
            self.table.add_blocks(store, granted)
            kept = self._keep(store, others) if more else 0
            self._unpin(others[kept:])
            preparation.store = store if more else self._end_prepare(store)
        else:
            self._unpin(others)
        self._continue_if(self._cpu_tier.needs_spare_room)

    def _add_to_conversation(self, request: Request | None, keys: Sequence[bytes]) -> float:
        """Records the keys; returns until when the conversation is retained, or 0."""
        if request is None or request.conversation is None:
            return 0.0
        self._conversations.add(request.conversation, keys)
        return request.conversation.retain_until

    def _refused(self, wanted: Iterable[Block], rank: int, declined: Collection[Block]) -> dict[Block, None]:
        """Returns the wanted blocks without a slot; records why they are not stored."""
        refused = dict.fromkeys(block for block in wanted if block.slots[rank] is None)
        for block in refused:
            reason = MissReason.POLICY if block in declined else MissReason.STORE_FAILED
            self._history.record(block.namespace, block.key, reason)
            self._cpu_tier.not_stored(block)
        return refused

    def _affordable(self, session: EngineSession, blocks: list[Block]) -> list[Block]:
        """Returns the leading blocks that the tenant's stores may pin; counts the others."""
        if not blocks or not self._pin_budget.is_limited:
            return blocks
        left, count = self._pin_budget.left_for_stores(session.namespace.id), 0
        for block in blocks:
            left -= block.queue.size_class
            if left < 0:
                break
            count += 1
        self._cpu_tier.no_room += len(blocks) - count
        return blocks[:count]

    def _keep(self, store: Store, blocks: Sequence[Block]) -> int:
        """Keeps leading blocks pinned until the last slice of a call; returns their number."""
        budget, count = self._pin_budget, 0
        left = budget.left_for_slices(store.owner.engine[0]) if blocks and budget.is_limited else math.inf
        for block in blocks:
            if not block.held and not block.leases:
                left -= block.allocated_bytes
                if left < 0:
                    break
            budget.begin_hold(block)
            count += 1
        store.others += blocks[:count]
        return count

    def _take_others(self, store: Store) -> list[Block]:
        others, store.others = store.others, []
        for block in others:
            self._pin_budget.end_hold(block)
        return others

    def _begin(self, owner: Owner, rank: int, expires_at: float, request: Request | None, now: float) -> Store:
        if request is not None:
            request.stores += 1
        store = self.table.begin(owner, rank, expires_at, [], request, now=now)
        store.user = owner.user
        return store

    def _end_prepare(self, store: Store) -> Store | None:
        """Unpins the blocks that need no slot. Ends a store without blocks, and returns None."""
        self._unpin(self._take_others(store))
        if store.blocks:
            return store
        self.table.end(store)
        self._ended(store)
        return None

    def _unpin(self, blocks: Sequence[Block]) -> None:
        """Removes pins, in slices."""
        if blocks:
            self._unpins.add(blocks[0].namespace, self._unpin_tail_first, blocks, _UNPIN_COST)
            self._unpins.start()

    def _unpin_tail_first(self, blocks: Sequence[Block]) -> None:
        """A policy needs this order to know which positions leave ghosts."""
        self._cpu_tier.unpin(reversed(blocks))

    def complete(
        self,
        session: EngineSession,
        store_id: StoreId,
        failed: Collection[int] = (),
        *,
        slice_blocks: int = STORE_SLICE,
    ) -> Operation[Sequence[int]]:
        """Completes a store. `failed`: positions of the blocks that the client did not write.

        From the first step on, no call of a client finds the store. If its session ends, the rest
        is abandoned. If the operation ends early, the rest fails. Returns the positions of the
        further blocks that are not stored: the server has not received their bytes, and the
        session does not map the region. Raises StoreNotFound, NotOwner, InvalidItem.
        """
        store = self._begin_completion(session, store_id, failed)
        try:
            if len(store.blocks) > slice_blocks:
                yield None
            while self.table.is_open(store):
                self._complete(store, store.blocks[:slice_blocks])
                if store.blocks:
                    yield None
        finally:
            if self.table.is_open(store):
                self.abandon([store])
        return store.unreceived or ()

    def _begin_completion(self, session: EngineSession, store_id: StoreId, failed: Collection[int]) -> Store:
        store = self.table.get(store_id, session.engine)
        if max(failed, default=-1) >= len(store.blocks):
            raise InvalidItem(f"store {store_id} has {len(store.blocks)} blocks")
        store.failed = failed if isinstance(failed, range) else frozenset(failed)
        if store.is_streamed or store.number >= session.unmapped_from:
            store.unreceived = []
        return store

    def _complete(self, store: Store, blocks: Sequence[Block]) -> None:
        missing, first = store.missing_of(blocks), store.completed
        self.table.take_blocks(store, blocks)
        store.completed += len(blocks)
        if not store.blocks:
            self.table.end(store)
            self._unpin(self._take_others(store))
        written, origin = [], store.origin
        for number, block in enumerate(blocks, start=first):
            block.writers -= 1
            if number in missing or block.namespace_index.invalidated:
                self._record_failure(block)
                self._cpu_tier.release([self._cpu_tier.detach_slot(block, store.rank)])
                continue
            self._cpu_tier.stored_bytes += block.part_bytes
            block.origin = origin
            written.append(block)
        complete = parts_written(written, store.rank)
        self._cpu_tier.became_ready(complete)
        request = store.request
        if request is not None:
            self._tier_jobs.write_back.cascade_for(request, complete)
        self._tier_jobs.write_back.cascade(complete, store.user)
        self._completions.settle(blocks)
        self._cpu_tier.unpin(blocks)
        if not store.blocks:
            self._ended(store)

    def abandon(self, stores: Iterable[Store]) -> None:
        """Ends stores of lost clients; quarantines slots until no client can write to them."""
        is_first = not self._unpins
        for store in stores:
            self.table.end(store)
            self.table.quarantine(store)
            if store.blocks:
                remove = partial(self._abandon_blocks, store)
                self._unpins.add(store.owner.engine[0], remove, list(store.blocks), _UNPIN_COST)
            else:
                self._end_abandoned(store)
        if is_first:
            self._unpins.start()
        else:
            self._continue_if(True)

    def _abandon_blocks(self, store: Store, blocks: Sequence[Block]) -> None:
        """Releases the last blocks of a store, because policies remove a tail faster."""
        self.table.take_blocks(store, blocks, tail=True)
        offsets = []
        for block in blocks:
            block.writers -= 1
            self._record_failure(block)
            offsets.append(self._cpu_tier.detach_slot(block, store.rank))
        self.table.add_to_quarantine(store, offsets, sum(block.part_bytes for block in blocks))
        self._completions.settle_later(blocks)
        self._cpu_tier.unpin(reversed(blocks))
        if not store.blocks:
            self._end_abandoned(store)

    def _end_abandoned(self, store: Store) -> None:
        self._unpins.add(store.owner.engine[0], self._unpin_tail_first, self._take_others(store), _UNPIN_COST)
        self._ended(store)

    def _declined(self, found: Sequence[Block], wanted: Iterable[Block], owner: Owner) -> set[Block] | None:
        """Returns the wanted blocks that are worth less than the blocks that they would replace.

        Returns None, and records no use, if the tier must not decline a block: if there is enough
        room, or if there is another tier, because only the CPU tier passes blocks to it. A block
        that has a part of another rank is never declined.
        """
        if self._tier_jobs.write_back.storing or owner.user is None:
            return None
        new = [block for block in wanted if block.slots.count(None) == len(block.slots)]
        if not self._cpu_tier.may_decline(new):
            return None
        self._cpu_tier.use(found, owner.user)  # the policy orders the new blocks among the others
        return set(self._cpu_tier.declined(new))

    @staticmethod
    def _claim(blocks: Sequence[Block], rank: int) -> tuple[bytearray, dict[Block, int]]:
        """Returns a status per block, and the position of each block that needs a slot."""
        granted, present, in_progress = map(int, (StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.IN_PROGRESS))
        statuses = bytearray([granted]) * len(blocks)
        wanted: dict[Block, int] = {}
        for number, block in enumerate(blocks):
            if block.ready or block.written >> rank & 1:
                statuses[number] = present
            elif block.promoting or block.slots[rank] is not None or wanted.setdefault(block, number) != number:
                statuses[number] = in_progress
        return statuses, wanted

    @staticmethod
    def _grant(wanted: Iterable[Block], rank: int) -> tuple[list[Block], list[int]]:
        """Marks blocks with a slot as being written; returns these blocks and their slots."""
        granted, slots = [], []
        for block in wanted:
            offset = block.slots[rank]
            if offset is not None:
                block.writers += 1
                granted.append(block)
                slots.append(offset)
        return granted, slots

    def _record_failure(self, block: Block) -> None:
        reason = MissReason.RESET if block.invalidated else MissReason.STORE_FAILED
        self._history.record(block.namespace, block.key, reason)
        self._cpu_tier.not_stored(block)

    def _cascade_present(self, request: Request, blocks: Sequence[Block], own: Collection[Block]) -> None:
        """Stores ready blocks in the REQUEST_LEVEL tiers, pending ones when ready (B3.6, B3.9)."""
        self._tier_jobs.write_back.cascade_for(request, [block for block in blocks if block.ready])
        for block in blocks:
            if block.pending and block not in own and not block.hold_only:
                self._requests.wait_for(request, block)

    def _ended(self, store: Store) -> None:
        if store.user is store:
            self._cpu_tier.finish(store)
            self._tier_jobs.request_finished(store)
        if store.request is not None:
            store.request.stores -= 1
            self._requests.end_if_settled(store.request)
