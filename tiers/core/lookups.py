"""Lookup handler: pins hits, promotes blocks from secondary tiers, records reasons of misses."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain

from ..errors import LimitExceeded
from ..stats.counters import HitCounters
from ..stats.eviction_history import EvictionHistory
from ..stats.miss_ratio_curve import MissRatioCurves
from ..stats.request_log import LookupRecord, OutcomeRun, RequestLog, limit_runs, without_hits
from ..types import EngineSession, MissReason, Owner
from .block import Block
from .block_matcher import OTHER_COST, BlockMatcher, LookupMatch
from .call_specs import LookupSpec
from .commands import Command, EndReaders, LeaseSettled
from .conversations import Conversation, ConversationTable
from .cpu_tier import CpuTier
from .leases import BlockLease, LeaseTable
from .lookup_room import LookupRoom
from .miss_explainer import MissExplainer
from .operations import Operation
from .pin_budget import PinBudget
from .prefetches import PrefetchAnswer, PrefetchProgress
from .presence_cache import Presence
from .room_queue import RoomQueue
from .running_lookup import LOOKUP_SLICE, LookupAnswer, RunningLookup
from .sliced_work import UnpinQueue
from .tier_jobs import TierJobs

__all__ = ["LookupHandler"]

MAX_LEASED_ITEMS = 4 << 20
"""Limit for the items of a session's leases, plus `LEASE_COST` each. Then lookups are refused."""
MAX_TENANT_LEASED_ITEMS = 32 << 20
"""The same for all sessions of a tenant, about 300 to 450 MiB. Pending items cost more."""

WAITING_SLICE = 16
"""Keys per slice of a lookup that waits: later blocks of a slice are not evicted for it."""


class LookupHandler:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        tier_jobs: TierJobs,
        conversations: ConversationTable,
        history: EvictionHistory,
        request_log: RequestLog,
        counters: HitCounters,
        miss_ratio_curves: MissRatioCurves | None,
        new_ids: Iterator[int],
        unpins: UnpinQueue,
        commands: list[Command],
        region_bytes: int,
        leased_part: float,
    ) -> None:
        """For `leased_part` see `PinBudget`."""
        self.leases = LeaseTable(cpu_tier, new_ids, unpins)
        self.room = RoomQueue(cpu_tier, commands)
        pinned = (self.leases.leased_bytes, self.leases.only_held_bytes)
        self.pin_budget = PinBudget(cpu_tier.queues.shares, region_bytes, leased_part, *pinned)
        self._lookup_room = LookupRoom(
            cpu_tier=cpu_tier, tier_jobs=tier_jobs, room=self.room, pin_budget=self.pin_budget
        )
        self.prefetches = self._lookup_room.prefetches
        self.fetch = self._lookup_room.fetch
        self.drop_promotion = self._lookup_room.drop_promotion
        self.must_queue = self._lookup_room.must_queue
        self.counters = counters
        self._cpu_tier = cpu_tier
        self._tier_jobs = tier_jobs
        self._conversations = conversations
        self._residency = tier_jobs.residency
        self._history = history
        self._request_log = request_log
        self._miss_ratio_curves = miss_ratio_curves
        self._unpins = unpins
        self._commands = commands
        self._matcher = BlockMatcher(cpu_tier, self._residency)
        self._misses = MissExplainer(cpu_tier, self._residency, history)
        self.remember_namespace = self._misses.remember_namespace

    def begin(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        spec: LookupSpec,
        retain_until: float,
        *,
        conversation: Conversation | None = None,
        slice_keys: int = LOOKUP_SLICE,
    ) -> RunningLookup:
        """Checks and returns a lookup, which `run` performs. Raises InvalidItem, LimitExceeded."""
        excluded = self._residency.excluded(spec.tiers)
        self.check_room(session, len(keys))
        owner = Owner(session.engine, session.id, spec.request_id, spec.grant_id)
        self.leases.check_grant(session, owner)
        if conversation is not None:
            retain_until = max(retain_until, conversation.retain_until)
        return RunningLookup(
            session,
            owner,
            keys,
            spec,
            excluded,
            retain_until,
            slice_keys,
            conversation=conversation,
            user=owner.user,
        )

    def run(self, lookup: RunningLookup, now: float) -> Operation[LookupAnswer]:
        """Performs a lookup. If it ends early, no lease remains.

        If the lease of the earlier slices has ended meanwhile, no key is a hit. Raises
        LimitExceeded, or InvalidItem if the client has withdrawn the lookup.
        """
        try:
            lookup.may_wait = lookup.spec.deadline > now
            if lookup.may_wait and self.must_queue(lookup):
                now = yield from self.room.wait(lookup, now)
            if len(lookup.keys) > lookup.slice_keys:
                now = yield None
            while self._is_wanted(lookup, now) and self._next_slice(lookup, now):
                now = (yield from self.room.wait(lookup, now)) if lookup.lacks_room else (yield None)
        except BaseException:
            if lookup.lease is not None:  # no client gets its hits
                self.take_back_hits(lookup.lease, MissReason.PENDING, lookup)
            self.abandon(lookup)
            raise
        finally:
            if lookup.waiter is not None:
                self.room.leave(lookup.waiter, max(now, self._cpu_tier.queues.now))
                lookup.waiter = None
        return lookup.answer()

    def run_prefetch(self, lookup: RunningLookup, now: float) -> Operation[PrefetchAnswer]:
        """Performs a lookup that starts promotions, without a lease. It counts in no statistics."""
        progress = lookup.prefetch = PrefetchProgress()
        yield from self.run(lookup, now)
        return progress.answer(len(lookup.keys), len(lookup.retries), lookup.not_retained)

    def _is_wanted(self, lookup: RunningLookup, now: float) -> bool:
        """Returns False if the lease has ended. Raises InvalidItem after a withdrawal."""
        lookup.session.check_wanted(lookup.owner.grant_id)
        lease, rest = lookup.lease, len(lookup.keys) - lookup.position
        if lease is None or self.leases.is_open(lease):
            return True
        self._record(lookup, now, (OutcomeRun(rest, MissReason.PENDING),) if rest else (), None)
        self.counters.miss(lookup.session.namespace.id, MissReason.PENDING, len(lookup.retries))
        self.take_back_hits(lease, MissReason.PENDING, lookup)
        self.abandon(lookup)
        return False

    def _next_slice(self, lookup: RunningLookup, now: float) -> bool:
        """Looks up the next keys; returns whether slices are left."""
        lookup.lacks_room = False
        if lookup.uncounted and lookup.position == len(lookup.keys):
            return lookup.count_references(self._miss_ratio_curves)
        namespace, start = lookup.session.namespace, lookup.position
        size, others = _sizes_of_slice(lookup)
        resetting = self._cpu_tier.pending_reset_blocks(namespace.id)
        if not resetting and lookup.rest is None and self._count_hits(lookup, others):
            self._residency.send_queries()
            return True
        keys = lookup.keys[start : start + size]
        match = LookupMatch(deferred=bool(lookup.retries), counted=lookup.prefetch is None)
        if resetting:
            lookup.rest = MissReason.RESET
        elif lookup.rest is None:
            self.check_room(lookup.session, len(lookup.keys) - start)
            keys = self._find(lookup, keys, match, others)
        if lookup.conversation is not None:
            self._conversations.add(lookup.conversation, keys)
        runs, first_miss = self._misses.explain(lookup, keys, match)
        self._record(lookup, now, runs, first_miss)
        if not resetting:
            if lookup.prefetch is None:
                lookup.uncounted.append((keys, runs))
            if not self._residency.has_shared_tiers and not (lookup.spec.prefix and lookup.spec.min_hits):
                lookup.count_references(self._miss_ratio_curves)
        self._residency.send_queries()
        lookup.not_retained += self._record_use(match, lookup.user, lookup.retain_until)
        self._grant(lookup, match, now)
        lookup.retries += [start + position for position in match.retries]
        lookup.position += len(keys)
        if lookup.position < len(lookup.keys):
            return True
        self._finish(lookup)
        return bool(lookup.uncounted) and lookup.count_references(self._miss_ratio_curves)

    def abandon(self, lookup: RunningLookup) -> None:
        """Ends a lookup without hits: ends its lease, if that is still open."""
        lease, lookup.lease, lookup.retries = lookup.lease, None, []
        lookup.position = len(lookup.keys)
        if lease is not None and self.leases.is_open(lease):
            self.end([lease])
        self._finish(lookup)

    def _finish(self, lookup: RunningLookup) -> None:
        if lookup.user is lookup:
            self._cpu_tier.finish(lookup)
            self._tier_jobs.request_finished(lookup)
        lease, spec = lookup.lease, lookup.spec
        if lease is None or not spec.min_hits or not spec.prefix or lookup.retries:
            return
        if lease.found < spec.min_hits:
            # Blocks were evicted after `_count_hits`, or there was no room for all of them.
            self.take_back_hits(lease, MissReason.BELOW_THRESHOLD, lookup)
            self.abandon(lookup)

    def take_back_hits(self, lease: BlockLease, reason: MissReason, lookup: RunningLookup | None = None) -> None:
        """Counts the hits of a lookup as misses, because it answers that no key is a hit."""
        namespace, uncounted = lease.owner.engine[0], set(chain.from_iterable(lease.awaited.values()))
        found = [item for item, block in enumerate(lease.items) if block is not None]
        for source, keys in Counter(lease.sources[item] for item in found if item not in uncounted).items():
            self.counters.hit(namespace, source, -keys)
        self.counters.miss(namespace, reason, len(found))
        lease.counted = False
        if lease.record is not None:
            lease.record.found = without_hits(lease.record.found, reason)
            lease.record.first_miss = lease.items[0].key if lease.items[0] is not None else lease.record.first_miss
        if lookup is not None:
            lookup.uncounted = deque((keys, without_hits(runs, reason)) for keys, runs in lookup.uncounted)

    def check_room(self, session: EngineSession, keys: int) -> None:
        of_session, of_tenant = self.leases.items_of(session)
        if of_session + keys > MAX_LEASED_ITEMS:
            raise LimitExceeded("the session holds too many leases; release some")
        if of_tenant + keys > MAX_TENANT_LEASED_ITEMS:
            raise LimitExceeded("the sessions of the tenant hold too many leases; release some")

    def _count_hits(self, lookup: RunningLookup, most: int) -> bool:
        """Checks `min_hits` if one slice is too short for it; returns whether keys are left.

        So no promotion starts if there are too few leading hits.
        """
        spec = lookup.spec
        wanted = min(spec.min_hits, len(lookup.keys))
        if not spec.prefix or wanted <= most or lookup.counted >= wanted or lookup.is_short:
            return False
        namespace = lookup.session.namespace.id
        blocks = self._cpu_tier.blocks_of(namespace)
        for key in lookup.keys[lookup.counted : min(lookup.counted + most, wanted)]:
            lookup.counted += 1
            block = blocks.get(key)
            if block is not None and (block.ready or block.pending):
                continue
            presence = self._residency.peek(namespace, key, lookup.excluded)
            if presence is Presence.UNKNOWN:
                lookup.counted = len(lookup.keys)
                return True
            if presence is not Presence.HELD:
                lookup.is_short = True
                return True
        lookup.is_short = len(lookup.keys) < spec.min_hits and lookup.counted == wanted
        return True

    def close(self, leases: Iterable[BlockLease]) -> None:
        """Hides leases from all calls. `end` must follow, later."""
        for lease in leases:
            self.leases.close(lease)

    def end(self, leases: Iterable[BlockLease]) -> None:
        """Ends leases, and removes their pins in slices. Pending blocks count as hits.

        Calls that wait for these blocks are told.
        """
        for lease in leases:
            if lease.awaited:
                if lease.counted:
                    self._count_pending(lease)
                self._commands.append(LeaseSettled(lease.id))
            self.leases.end(lease)
            if lease.readers:
                self._commands.append(EndReaders(lease.id))
        self._unpins.start()

    def end_reader(self, lease: BlockLease) -> None:
        """Called when a process of the server has ended a copy from a lease's slots."""
        self.leases.end_reader(lease)
        self._unpins.start()

    def _count_pending(self, lease: BlockLease) -> None:
        items = chain.from_iterable(lease.awaited.values())
        for source, count in Counter(map(lease.sources.__getitem__, items)).items():
            self.counters.hit(lease.owner.engine[0], source, count)

    def settle(self, lease: BlockLease, block: Block, most: int) -> int:
        """Called when a block is no longer pending; returns how many items no longer wait."""
        items = self.leases.settle(lease, block, most)
        if not lease.counted or not items:
            return len(items)
        if block.ready:
            hits = self.counters.of(block.namespace).hits
            for item in items:
                hits[lease.sources[item]] += 1
            return len(items)
        sources = Counter(map(lease.sources.__getitem__, items))
        reason = self._history.reason_for(block.namespace, block.key) or MissReason.LOAD_FAILED
        self.counters.miss(block.namespace, reason, len(items))
        for secondary in self._tier_jobs.secondaries:
            secondary.misses += sources[secondary.index]
        if lease.record is not None:
            for item in items:
                lease.record.fail(item, reason)
        return len(items)

    def _find(self, lookup: RunningLookup, keys: Sequence[bytes], match: LookupMatch, others: int) -> Sequence[bytes]:
        """Pins the hits among the next keys of a lookup, and starts promotions.

        Returns the keys that it has looked up: leading hits of the CPU tier, and at most this
        number of others. If the lookup waits for room, only those before the first block without
        room.
        """
        spec = lookup.spec
        keys = self._matcher.match(lookup, keys, match, others)
        if lookup.user is None and lookup.position + len(keys) < len(lookup.keys):
            lookup.user = lookup
        if spec.prefix and not match.retries and not match.deferred:
            found = lookup.position + len(match.items)
            if lookup.is_short or (found < spec.min_hits and not lookup.counted):
                self._discard_hits(match)
        self._lookup_room.place(lookup, match)
        if not lookup.lacks_room:
            return keys
        lookup.user = lookup if lookup.user is None else lookup.user
        return keys[: len(match.items)]

    def _discard_hits(self, match: LookupMatch) -> None:
        for _, _, block in match.promotions:
            block.promoting = False
        match.promotions.clear()
        match.ready = 0
        for position, found in enumerate(match.items):
            if found is not None:
                match.reasons[position] = MissReason.BELOW_THRESHOLD
                match.items[position] = None
                self._cpu_tier.unpin([found])

    def _record_use(self, match: LookupMatch, user: Hashable, retain_until: float) -> int:
        """Records the use of the hits; returns how many could not be retained."""
        hits = list(filter(None, dict.fromkeys(match.items)))
        if not hits:
            return 0
        not_retained = self._cpu_tier.use(hits, user, retain_until)
        self._tier_jobs.write_back.used(hits, user)
        if retain_until:
            self._tier_jobs.retain(hits)
        return not_retained

    def _grant(self, lookup: RunningLookup, match: LookupMatch, now: float) -> None:
        """Adds the hits to the lookup's lease; grants the lease at the first hit."""
        if lookup.prefetch is not None:  # it pins only what it loads
            had_room = self._cpu_tier.has_more_room
            self._cpu_tier.unpin(list(filter(None, match.items)))
            self._cpu_tier.has_more_room = had_room  # these blocks could be evicted before
            return
        lease, expires_at = lookup.lease, now + lookup.spec.lease_seconds
        if lease is None and any(match.items):
            earlier, sources = [None] * lookup.position, bytes(lookup.position)
            lease = lookup.lease = self.leases.grant(
                lookup.owner,
                expires_at,
                list[Block | None](earlier),
                sources,
                keys=len(lookup.keys),
                now=now,
                record=lookup.record,
                all_ready=True,
            )
        if lease is None:
            return
        lease.expires_at = max(lease.expires_at, expires_at)
        is_ready = match.ready == len(match.items)
        self.leases.extend(lease, match.items, bytes(match.sources), all_ready=is_ready)
        for block, source in () if is_ready or not lease.counted else zip(match.items, match.sources, strict=True):
            if block is not None and not block.ready:
                self.counters.hit(block.namespace, source, -1)

    def _record(
        self, lookup: RunningLookup, now: float, runs: tuple[OutcomeRun, ...], first_miss: bytes | None
    ) -> None:
        if lookup.prefetch is not None:
            return
        owner = lookup.owner
        self.counters.count(owner.engine[0], runs)
        if lookup.record is None:
            lookup.record = LookupRecord(now, limit_runs(runs), first_miss)
            self._request_log.record_lookup(owner.engine, owner.request_id, lookup.record)
        else:
            lookup.record.extend(runs, first_miss)


def _sizes_of_slice(lookup: RunningLookup) -> tuple[int, int]:
    """Returns how many keys a slice may have, and how many of them are not ready."""
    size, others = lookup.slice_keys, max(1, lookup.slice_keys // OTHER_COST)
    if lookup.waiter is not None:
        size = others = min(others, WAITING_SLICE)
    elif lookup.retain_until or lookup.conversation is not None:  # both record each key
        size = max(others, size // 4)
    return size, others
