"""Parts of the core: creates the event handlers, and collects their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from ..secondary_tier import NamespaceId, SecondaryTier
from ..stats.counters import HitCounters
from ..stats.eviction_history import EvictionHistory, history_size
from ..stats.miss_ratio_curve import MissRatioCurves
from ..stats.request_log import RequestLog
from ..stats.snapshots import ManagerStats, NamespaceStats, TierStats
from ..types import EngineSession
from .commands import Command
from .completions import CompletionHandler, Durability
from .conversation_actions import ConversationTasks
from .cpu_tier import CpuTier
from .endings import Endings
from .event_log import EventLog
from .event_replay import EventReplay
from .handoff_log import HandoffLog
from .handoffs import HandoffHandler
from .lookups import LookupHandler
from .recovery import FormerWriters
from .requests import Request, RequestTable
from .residency import SharedTierQueries
from .retiring_pins import RetiringPins
from .settings import CPU_TIER, TierSettings
from .sliced_work import IncrementalWork
from .slot_records import SlotRecords
from .stores import StoreHandler
from .tier_jobs import TierJobs

__all__ = ["CoreParts", "cpu_stats"]


class CoreParts:
    """Base of `TierManager`: its parts, and those of its methods that a part has alone."""

    def __init__(
        self,
        region_bytes: int,
        extent_bytes: int,
        tiers: Sequence[SecondaryTier],
        *,
        max_queued_bytes: int | None = None,
        new_ids: Iterator[int] | None = None,
        settings: TierSettings | None = None,
        now: float = 0.0,
        records: SlotRecords | None = None,
    ) -> None:
        """Builds the core and recovers the blocks that the tiers kept from an earlier run.

        Args:
            region_bytes: final size of the region; memory is added with `add_memory`.
            extent_bytes: unit in which size classes claim memory; also the largest part of a block.
            tiers: the secondary tiers, in lookup order.
            max_queued_bytes: limit of each write-back queue; default: a quarter of the region.
            new_ids: ids of leases and stores, not 0. Random ids tell a client nothing about other
                clients, and differ from those of an earlier run. Default: counted from 1.
            settings: policies, quotas and times per tier.
            now: the time, in seconds of the clock that `tick` uses.
            records: where the slots are recorded for the next server; None: nowhere.

        Raises ValueError if the settings are inconsistent.
        """
        settings = settings or TierSettings()
        settings.check({CPU_TIER, *(tier.name for tier in tiers)})
        self._region_bytes, self._now, self._records = region_bytes, now, records
        self._commands: list[Command] = []
        self._sessions: dict[bytes, EngineSession] = {}
        self._namespaces: set[NamespaceId] = set()
        self._create_statistics(settings, [tier.capacity_bytes for tier in tiers])
        self._create_tiers(settings, extent_bytes, tiers, max_queued_bytes or region_bytes // 4)
        self._create_handlers(settings, tiers, count(1) if new_ids is None else new_ids)
        self._tier_jobs.recover()

    def _create_statistics(self, settings: TierSettings, capacities: Sequence[int]) -> None:
        """Creates the records of requests and misses. No decision depends on them."""
        self._history = EvictionHistory(history_size(self._region_bytes))
        self._request_log = RequestLog()
        self._counters = HitCounters(len(capacities), {tenant.tag: tenant.name for tenant in settings.tenants})
        sizes = [self._region_bytes, *capacities]
        self._miss_ratio_curves = MissRatioCurves(sizes, self._tier_of) if settings.estimates else None

    def _create_tiers(
        self, settings: TierSettings, extent_bytes: int, tiers: Sequence[SecondaryTier], max_queued_bytes: int
    ) -> None:
        events = self._events = EventLog(self._commands, settings.content_bytes)
        self.watch_events, self.unwatch_events = events.watch, events.unwatch
        self.replay_events = partial(EventReplay, events)
        self.describe, self.content_of = events.describe, events.contents.get
        self._cpu_tier = CpuTier(
            extent_bytes=extent_bytes,
            pool_starts=settings.pool_starts,
            queues=settings.new_queues(CPU_TIER, self._region_bytes, self._now),
            history=self._history,
            spare_part=settings.spare_part,
            events=events,
            records=self._records,
        )
        self._former_writers = FormerWriters(self._cpu_tier)
        self._tier_jobs = TierJobs(
            tiers=tiers,
            settings=settings,
            now=self._now,
            max_queued_bytes=max_queued_bytes,
            cpu_tier=self._cpu_tier,
            history=self._history,
            commands=self._commands,
            events=events,
        )
        shared_tiers = self._shared_tiers = SharedTierQueries(self._tier_jobs.residency, self._cpu_tier)
        self.excluded, self.query_shared_tiers = self._tier_jobs.residency.excluded, shared_tiers.query
        self.lacking, self.locate, self.withdraw = shared_tiers.lacking, shared_tiers.locate, shared_tiers.withdraw
        durability = self._durability = Durability(cpu_tier=self._cpu_tier, tier_jobs=self._tier_jobs)
        self.flush, self.store_skipped, self.flush_queues = (
            durability.flush,
            durability.store_skipped,
            durability.flush_queues,
        )

    def _create_handlers(self, settings: TierSettings, tiers: Sequence[SecondaryTier], new_ids: Iterator[int]) -> None:
        """Creates the event handlers. A handler refers only to handlers created before it."""
        self._requests = RequestTable(tiers=tiers, on_end=self._request_ended)
        self._sliced_work = IncrementalWork(cpu_tier=self._cpu_tier, tier_jobs=self._tier_jobs, commands=self._commands)
        conversations = self._conversations = ConversationTasks(
            self._cpu_tier, self._tier_jobs, self._sliced_work.perform
        )
        self.act_on_conversations, self.act_on_keys = conversations.act, conversations.act_on_keys
        self.use_of_conversation = conversations.use_of
        self.conversations_named, self.page_of_conversations = conversations.table.named, conversations.table.page
        self.count_conversations, self.prompts = conversations.table.count_of, conversations.table.prompts
        self._lookups = LookupHandler(
            cpu_tier=self._cpu_tier,
            tier_jobs=self._tier_jobs,
            conversations=conversations.table,
            history=self._history,
            request_log=self._request_log,
            counters=self._counters,
            miss_ratio_curves=self._miss_ratio_curves,
            new_ids=new_ids,
            unpins=self._sliced_work.unpins,
            commands=self._commands,
            region_bytes=self._region_bytes,
            leased_part=settings.leased_part,
        )
        self.end_reader, self.take_back_hits = self._lookups.end_reader, self._lookups.take_back_hits
        self.lease_of_grant = self._lookups.leases.by_grant.get
        handoffs = self._handoffs = HandoffHandler(
            cpu_tier=self._cpu_tier,
            lookups=self._lookups,
            settings=settings,
            region_bytes=self._region_bytes,
            commands=self._commands,
            log=HandoffLog(self._request_log, self._history),
            unpins=self._sliced_work.hold_unpins,
            perform=self._sliced_work.perform,
        )
        self.publish, self.claim, self.not_claimed = handoffs.publish, handoffs.claim, handoffs.claims.not_claimed
        self.holds, self.find_hold, self.is_settled = handoffs.all, handoffs.find, handoffs.is_settled
        self.may_come, self.renew_hold, self.release_hold = handoffs.may_come, handoffs.renew, handoffs.release
        self._create_store_handlers(new_ids)

    def _create_store_handlers(self, new_ids: Iterator[int]) -> None:
        self._completions = CompletionHandler(
            cpu_tier=self._cpu_tier,
            tier_jobs=self._tier_jobs,
            requests=self._requests,
            lookups=self._lookups,
            handoffs=self._handoffs,
            history=self._history,
            commands=self._commands,
            work=self._sliced_work,
        )
        self._stores = StoreHandler(
            cpu_tier=self._cpu_tier,
            tier_jobs=self._tier_jobs,
            requests=self._requests,
            conversations=self._conversations.table,
            completions=self._completions,
            history=self._history,
            miss_ratio_curves=self._miss_ratio_curves,
            pin_budget=self._lookups.pin_budget,
            new_ids=new_ids,
            unpins=self._sliced_work.unpins,
            continue_if=self._sliced_work.continue_if,
        )
        self._endings = Endings(
            sessions=self._sessions,
            lookups=self._lookups,
            stores=self._stores,
            requests=self._requests,
            perform=self._sliced_work.perform,
        )
        self._retiring_pins = RetiringPins(
            cpu_tier=self._cpu_tier,
            leases=self._lookups.leases,
            stores=self._stores.table,
            handoffs=self._handoffs,
            settle=self._completions.settle,
            expire=self._endings.expire,
            perform=self._sliced_work.perform,
        )

        self.store_of_grant, self.is_quarantined = self._stores.table.by_grant.get, self._stores.table.is_quarantined

    def stats(self) -> ManagerStats:
        hits, misses = self._counters.hits, self._counters.misses
        keys = sum(hits) + misses.total()
        cpu = cpu_stats(self._cpu_tier, self._region_bytes, hits=hits[0], misses=keys - hits[0])
        tiers = (cpu, *(secondary.stats(hits[secondary.index]) for secondary in self._tier_jobs.secondaries))
        if self._miss_ratio_curves is not None:
            tiers = tuple(replace(tier, estimates=self._miss_ratio_curves.of(n)) for n, tier in enumerate(tiers))
        return ManagerStats(
            tiers=tiers,
            leases=len(self._lookups.leases),
            oldest_lease_seconds=self._lookups.leases.oldest_age(self._now),
            room=self._lookups.room.stats(),
            expired_leases=self._endings.expired_leases,
            expired_stores=self._endings.expired_stores,
            stores=len(self._stores.table),
            quarantined_bytes=self._stores.table.quarantined_bytes + self._former_writers.nbytes,
            sessions=len(self._sessions),
            namespaces=len(self._namespaces),
            holds=len(self._handoffs),
            held_bytes=self._handoffs.held_bytes,
            handoffs=self._handoffs.stats(),
            conversations=self._conversations.stats(),
            claims_missed=dict(self._handoffs.claims.missed),
            lookup_keys=keys,
            lookup_misses=misses.total(),
            misses_by_reason=dict(misses),
        )

    def namespace_stats(self) -> list[NamespaceStats]:
        below = (secondary.catalog.counts() for secondary in self._tier_jobs.secondaries)
        return self._counters.namespace_stats([self._cpu_tier.counts(), *below])

    def _tier_of(self, namespace: NamespaceId, key: bytes) -> int | None:
        block = self._cpu_tier.blocks_of(namespace).get(key)
        return 0 if block is not None and block.ready else self._tier_jobs.residency.position_of(namespace, key)

    def _request_ended(self, request: Request) -> None:
        if request.id:
            self._request_log.finish(request.session.engine, request.id, self._now, request.incomplete)
        self._cpu_tier.finish(request.user)
        self._tier_jobs.request_finished(request.user)
        for secondary in self._tier_jobs.secondaries:
            secondary.tier.on_request_finished(request.id)


def cpu_stats(cpu_tier: CpuTier, capacity_bytes: int, *, hits: int, misses: int) -> TierStats:
    queues = cpu_tier.queues
    return TierStats(
        name=CPU_TIER,
        type=CPU_TIER,
        capacity_bytes=capacity_bytes,
        available_bytes=cpu_tier.memory.available_bytes(),
        used_bytes=cpu_tier.memory.used_bytes(),
        blocks=len(cpu_tier),
        hits=hits,
        misses=misses,
        evictions=cpu_tier.evictions,
        dropped=cpu_tier.no_room,
        expired=queues.expired,
        not_retained=queues.not_retained,
        stored_bytes=cpu_tier.stored_bytes,
        loaded_bytes=cpu_tier.loaded_bytes,
        shares=queues.stats(),
        declined=cpu_tier.declines,
    )
