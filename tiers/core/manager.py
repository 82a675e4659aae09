"""Decision core of the tiered cache: events in, answers and commands out.

An event is a method call. The call returns its answer at once and appends commands for the server,
which fetches them with `take_commands()`. The core does no I/O, reads no clock and uses no threads.
Calls must not overlap. `now`: monotonic seconds. A refused event (`CoreError`) changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from ..base import NamespaceId, Outcome, RequestInfo, SecondaryTier, TierFilter
from ..errors import InvalidNamespace, UnknownSession
from ..stats.counters import HitCounters
from ..stats.eviction_history import EvictionHistory, history_size
from ..stats.miss_ratio_curve import MissRatioCurves
from ..stats.request_log import RequestLog, RequestRecord
from ..stats.snapshots import ManagerStats, NamespaceStats
from ..types import EngineSession, JobId, LeaseId, NamespaceSpec, Negotiation, StoreAnswer, StoreId
from .bulk_eviction import EvictionRequest, EvictionTask
from .commands import Command, LeaseSettled
from .completions import CompletionHandler, Durability
from .conversation_tasks import ConversationTasks
from .cpu_tier import CpuTier
from .event_log import EventLog
from .handoff_log import HandoffLog
from .handoffs import HandoffHandler
from .in_flight_stores import Store
from .leases import BlockLease, LookupAnswer
from .lookups import LookupHandler
from .requests import Request, RequestTable
from .residency import SharedTierQueries
from .settings import CPU_TIER, TierSettings
from .sliced_work import IncrementalWork
from .stores import StoreHandler
from .transfers import TransferScheduler

__all__ = ["CPU_TIER", "TierManager"]

_ALL_TIERS = TierFilter()
_MAX_COUNTED_NAMESPACES = 65_536
"""Number of namespaces that the statistics can tell apart, about 120 bytes each."""


class TierManager:
    """Decides where blocks are stored, what pins them and what is evicted."""

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

        Raises ValueError if the settings are inconsistent.
        """
        settings = settings or TierSettings()
        settings.check({CPU_TIER, *(tier.name for tier in tiers)})
        self._region_bytes, self._now = region_bytes, now
        self._commands: list[Command] = []
        self._sessions: dict[bytes, EngineSession] = {}
        self._namespaces: set[NamespaceId] = set()
        self._create_statistics(settings, [tier.capacity_bytes for tier in tiers])
        self._create_tiers(settings, extent_bytes, tiers, max_queued_bytes or region_bytes // 4)
        self._create_handlers(settings, tiers, count(1) if new_ids is None else new_ids)
        self._transfers.recover()

    def _create_statistics(self, settings: TierSettings, capacities: Sequence[int]) -> None:
        """Creates the records of requests and misses. No decision depends on them."""
        self._history = EvictionHistory(history_size(self._region_bytes))
        self._request_log = RequestLog()
        self._counters = HitCounters(len(capacities), {tenant.tag: tenant.name for tenant in settings.tenants})
        sizes = [self._region_bytes, *capacities]
        self._miss_ratio_curves = MissRatioCurves(sizes, self._tier_of) if settings.estimates else None
        self._expired_leases = self._expired_stores = 0

    def _create_tiers(
        self, settings: TierSettings, extent_bytes: int, tiers: Sequence[SecondaryTier], max_queued_bytes: int
    ) -> None:
        self.events = EventLog(self._commands, settings.content_bytes)
        self._cpu_tier = CpuTier(
            extent_bytes=extent_bytes,
            queues=settings.new_queues(CPU_TIER, self._region_bytes, self._now),
            history=self._history,
            spare_part=settings.spare_part,
            events=self.events,
        )
        self._transfers = TransferScheduler(
            tiers=tiers,
            settings=settings,
            now=self._now,
            max_queued_bytes=max_queued_bytes,
            cpu_tier=self._cpu_tier,
            history=self._history,
            commands=self._commands,
            events=self.events,
        )
        self.shared_tiers = SharedTierQueries(self._transfers.residency, self._cpu_tier)
        self.durability = Durability(cpu_tier=self._cpu_tier, transfers=self._transfers)

    def _create_handlers(self, settings: TierSettings, tiers: Sequence[SecondaryTier], new_ids: Iterator[int]) -> None:
        """Creates the event handlers. A handler refers only to handlers created before it."""
        self.requests = self._requests = RequestTable(tiers=tiers, on_end=self._request_ended)
        self.conversations = ConversationTasks(self._cpu_tier, self._transfers)
        self._sliced_work = IncrementalWork(cpu_tier=self._cpu_tier, transfers=self._transfers, commands=self._commands)
        self.lookup_handler = self._lookups = LookupHandler(
            cpu_tier=self._cpu_tier,
            transfers=self._transfers,
            conversations=self.conversations.table,
            history=self._history,
            request_log=self._request_log,
            counters=self._counters,
            miss_ratio_curves=self._miss_ratio_curves,
            new_ids=new_ids,
            continue_if=self._sliced_work.continue_if,
            commands=self._commands,
            region_bytes=self._region_bytes,
            leased_part=settings.leased_part,
        )
        self.handoffs = HandoffHandler(
            cpu_tier=self._cpu_tier,
            lookups=self._lookups,
            settings=settings,
            region_bytes=self._region_bytes,
            commands=self._commands,
            log=HandoffLog(self._request_log, self._history),
            continue_if=self._sliced_work.continue_if,
        )
        self._completions = CompletionHandler(
            cpu_tier=self._cpu_tier,
            transfers=self._transfers,
            requests=self._requests,
            lookups=self._lookups,
            handoffs=self.handoffs,
            history=self._history,
            commands=self._commands,
        )
        self.store_handler = self._stores = StoreHandler(
            cpu_tier=self._cpu_tier,
            transfers=self._transfers,
            requests=self._requests,
            conversations=self.conversations.table,
            completions=self._completions,
            history=self._history,
            miss_ratio_curves=self._miss_ratio_curves,
            pin_budget=self._lookups.pin_budget,
            new_ids=new_ids,
            continue_if=self._sliced_work.continue_if,
        )
        self._sliced_work.pin_owners = (self._lookups.leases, self.handoffs, self._stores)

    def take_commands(self) -> list[Command]:
        self._lookups.room.offer_if_changed()
        commands, self._commands[:] = self._commands.copy(), []
        return commands

    def add_memory(self, offset: int, nbytes: int) -> None:
        self._cpu_tier.memory.add_memory(offset, nbytes)

    def open_session(
        self, session_id: bytes, engine_id: str, rank: int | None, namespace: NamespaceSpec, *, tenant: str = ""
    ) -> EngineSession:
        """Registers a client. Raises InvalidNamespace if the rank or a part is too large."""
        memory = self._cpu_tier.memory
        largest, limit = max(namespace.part_bytes), memory.extent_bytes
        if memory.slot_bytes_for(largest, namespace.world_size) > limit:
            why = f"with region_size {self._region_bytes} the limit is {limit} bytes"
            raise InvalidNamespace(f"the slot of a part of {largest} bytes (one rank of a block) is too large: {why}")
        if rank is not None and rank >= namespace.world_size:
            raise InvalidNamespace(f"rank {rank} must be less than the world size {namespace.world_size}")
        session = EngineSession(session_id, engine_id, rank, namespace, tenant)
        self._sessions[session_id] = session
        if len(self._namespaces) < _MAX_COUNTED_NAMESPACES:
            self._namespaces.add(namespace.id)
        self._lookups.remember_namespace(namespace.id, tenant)
        return session

    def session(self, session_id: bytes) -> EngineSession:
        """Returns an open session. Raises UnknownSession."""
        if (session := self._sessions.get(session_id)) is None:
            raise UnknownSession("there is no such session: it ended, or was never opened")
        return session

    def close_session(self, session_id: bytes) -> None:
        """Ends a session, its leases and stores; quarantines slots that the client may write to."""
        session = self.session(session_id)
        self._lookups.end(self._lookups.leases.of_session(session_id))
        for store in self._stores.table.owned_by(session_id):
            self._stores.abandon(store, session.writers)
        for request_id in list(session.requests):
            if (request := self._requests.get(session.engine, request_id)) is not None:
                self._requests.finish(request, give_up=True)
        self._requests.session_ended(session)
        del self._sessions[session_id]
        if all(other.engine != session.engine for other in self._sessions.values()):
            self.handoffs.engine_gone(session.engine)

    def writer_attached(self, session_id: bytes, writer: int) -> None:
        self.session(session_id).writers.add(writer)

    def writer_gone(self, session_id: bytes, writer: int) -> None:
        """Called when a writer connection has ended: the process can no longer write to slots."""
        if (session := self._sessions.get(session_id)) is not None:
            session.writers.discard(writer)
        self._stores.table.writer_gone(writer)

    def begin_request(self, session: EngineSession, request: RequestInfo) -> Negotiation:
        """Asks every tier for its vote; the policy is REQUEST_LEVEL if any tier votes so (B3.3).

        Repeats the result if the request has begun. LimitExceeded: too many unfinished requests.
        """
        if (known := self._requests.get(session.engine, request.request_id)) is not None and not known.finished:
            return known.negotiation
        self._requests.check_room(session)
        begun = self._requests.negotiate(session, request)
        if request.conversation_id:
            begun.conversation = self.conversations.table.begin_request(session, request.conversation_id, self._now)
        if request.request_id:
            self._request_log.open(session.engine, request.request_id, self._now).negotiation = begun.negotiation
        return begun.negotiation

    def finish_request(self, session: EngineSession, request_id: str) -> Request:
        """Ends a request's leases. Tiers are notified when all stores of the request have ended.

        A request that did not begin is begun first, so that every tier gets both calls (B3.13).
        """
        self._lookups.end(self._lookups.leases.of_request(session.engine, request_id))
        if (request := self._requests.get(session.engine, request_id)) is None:
            request = self._requests.negotiate(session, RequestInfo(request_id, session.namespace.id))
        self._requests.finish(request)
        return request

    def lookup(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        *,
        prefix: bool,
        request_id: str,
        expires_at: float,
        tiers: TierFilter = _ALL_TIERS,
        min_hits: int = 0,
        retain_until: float = 0.0,
    ) -> LookupAnswer:
        """Finds blocks, pins the hits and starts promotions. The lease ends at `expires_at`.

        With `prefix`, every key after the first miss is a miss. If fewer than `min_hits` leading
        keys are hits, all keys are misses. `tiers` excludes tiers. `retain_until` protects the hits
        from eviction in all tiers until that time, within the retention budget. Raises
        LimitExceeded if the session has too many leases, InvalidItem for an unknown tier.
        """
        options: dict[str, Any] = {"tiers": tiers, "min_hits": min_hits, "retain_until": retain_until}
        options["conversation"] = self.requests.conversation_of(session, request_id)
        lookup = self._lookups.begin(session, keys, prefix=prefix, request_id=request_id, **options)
        self._lookups.look_up_slice(lookup, expires_at=expires_at, now=self._now)
        return lookup.answer()

    def check_filter(self, tiers: TierFilter) -> None:
        """Raises InvalidItem if the filter names an unknown tier or the CPU tier."""
        self._transfers.residency.excluded(tiers)

    def lease(self, session: EngineSession, lease_id: LeaseId) -> BlockLease:
        """Returns a lease of this session's engine. Raises LeaseNotFound, NotOwner."""
        return self._lookups.leases.get(lease_id, session.engine)

    def renew(self, session: EngineSession, lease_id: LeaseId, expires_at: float) -> None:
        """Extends a lease; never shortens it. Raises like `lease`."""
        lease = self._lookups.leases.get(lease_id, session.engine)
        lease.expires_at = max(lease.expires_at, expires_at)

    def release(self, session: EngineSession, lease_id: LeaseId) -> None:
        self._lookups.end([self._lookups.leases.get(lease_id, session.engine)])

    def prepare_store(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        *,
        expires_at: float,
        now: float = 0,
        **options: Any,
    ) -> StoreAnswer:
        """Grants slots for the missing parts of this session's rank. See `StoreHandler.prepare`.

        Raises InvalidKey if a key names an unknown group, InvalidItem if the session has no rank.
        """
        now = max(now, self._now)
        answer = self._stores.prepare(session, keys, expires_at=expires_at, now=now, **options)
        self._sliced_work.continue_if(self._cpu_tier.needs_spare_room)
        return answer

    def store(self, session: EngineSession, store_id: StoreId) -> Store:
        """Returns a store in flight of this session's engine. Raises StoreNotFound, NotOwner."""
        return self._stores.table.get(store_id, session.engine)

    def renew_store(self, session: EngineSession, store_id: StoreId, expires_at: float) -> Store:
        """Extends a store in flight and returns it; never shortens it. Raises like `store`."""
        store = self._stores.table.get(store_id, session.engine)
        store.expires_at = max(store.expires_at, expires_at)
        return store

    def complete_store(self, session: EngineSession, store_id: StoreId, failed: Collection[int] = ()) -> None:
        """Ends a store; `failed`: positions of the blocks not written. Raises like `store`."""
        self._stores.complete_slice(self._stores.begin_completion(session, store_id, failed))

    def writer_done(self, session: EngineSession, store_id: StoreId) -> None:
        """Called when a client completes an ended store. Frees the store's quarantined slots."""
        self._stores.table.writer_done(store_id, session.engine)

    def tick(self, now: float) -> None:
        """Advances the time and ends everything that has expired. Called about once per second.

        If `now` is earlier than in the last call, the core keeps the later time.
        """
        now = self._now = max(now, self._now)
        self._request_log.tick(now)
        self.events.tick(now)
        self._sliced_work.expire(now)
        self.handoffs.tick(now)
        expired = self._lookups.leases.expired(now)
        self._expired_leases += len(expired)
        self._lookups.end(expired)
        self._commands += (LeaseSettled(lease.id) for lease in expired)
        for store in self._stores.table.expired(now):
            self._expired_stores += 1
            session = self._sessions.get(store.owner.session_id)
            self._stores.abandon(store, session.writers if session else set())

    def work(self) -> None:
        """Runs the next slice of incremental work. Called once for each `ContinueWork` command."""
        self._sliced_work.work(self._now)

    def job_finished(self, job_id: JobId, outcomes: Sequence[Outcome]) -> None:
        """Handles the result of a job, one outcome per block. An unknown job is ignored."""
        self._completions.job_finished(job_id, outcomes)

    def lookup_finished(self, job_id: JobId, answers: Sequence[bool]) -> None:
        """Handles a shared tier's answers to a `LookupInTier`. An unknown job is ignored."""
        self._transfers.residency.record_answers(job_id, answers, self._now)

    def reset(self, session: EngineSession, *, retire: bool = False) -> int:
        """Drops a session's namespace from the CPU tier; secondary tiers keep their blocks (B3.19).

        Blocks are dropped in slices; a pinned block is dropped when its last pin ends. Until all
        are dropped, every lookup of the namespace misses. Pending stores of the namespace are never
        published (B4.13). Returns the number of blocks that are not dropped yet. While a reset
        runs, another call only returns this number. With `retire`, secondary tiers evict the blocks
        of the namespace before all others.
        """
        if retire:
            self._transfers.retire(session.namespace.id)
        if resetting := self.resetting(session):
            return resetting
        self.handoffs.reset(session.namespace.id, self._now)
        self._transfers.hurry()  # queued blocks are pinned
        self._sliced_work.continue_if(self._cpu_tier.reset(session.namespace.id))
        return self.resetting(session)

    def resetting(self, session: EngineSession) -> int:
        return self._cpu_tier.pending_reset_blocks(session.namespace.id)

    def evict(self, wanted: EvictionRequest) -> EvictionTask:
        """Queues an operator's eviction. It runs in slices, after all evictions queued earlier."""
        return self._sliced_work.evict(wanted, self._now)

    def leases(self) -> list[BlockLease]:
        return list(self._lookups.leases)

    def stores(self) -> list[Store]:
        return list(self._stores.table)

    def explain(self, request_id: str) -> list[RequestRecord]:
        """Returns the recent records of a request, of any engine; the latest first."""
        return self._request_log.find(request_id)

    def entries_lost(self, tier: int, names: Iterable[tuple[NamespaceId, bytes]]) -> None:
        """Drops the entries of damaged blocks that the tier at this position has quarantined."""
        self._transfers.lost(tier, names)

    def tier_stalled(self, tier: int, *, stalled: bool) -> None:
        """Called when a job of the tier at this position takes too long, and when the job returns.

        A stalled tier gets no jobs, and its write-back queue is discarded. Blocks that the tier is
        loading keep their slots, because the tier may still write to them. These blocks are
        unlinked from the index, so that clients can store new blocks with the same keys.
        """
        self._completions.tier_stalled(tier, stalled=stalled)

    def stats(self) -> ManagerStats:
        hits, misses = self._counters.hits, self._counters.misses
        keys = sum(hits) + misses.total()
        cpu = self._cpu_tier.stats(CPU_TIER, self._region_bytes, hits=hits[0], misses=keys - hits[0])
        tiers = (cpu, *(secondary.stats(hits[secondary.index]) for secondary in self._transfers.secondaries))
        if self._miss_ratio_curves is not None:
            tiers = tuple(replace(tier, estimates=self._miss_ratio_curves.of(n)) for n, tier in enumerate(tiers))
        return ManagerStats(
            tiers=tiers,
            leases=len(self._lookups.leases),
            oldest_lease_seconds=self._lookups.leases.oldest_age(self._now),
            room=self._lookups.room.stats(),
            expired_leases=self._expired_leases,
            expired_stores=self._expired_stores,
            stores=len(self._stores.table),
            quarantined_bytes=self._stores.table.quarantined_bytes,
            sessions=len(self._sessions),
            namespaces=len(self._namespaces),
            holds=len(self.handoffs),
            held_bytes=self.handoffs.held_bytes,
            handoffs=self.handoffs.stats(),
            conversations=self.conversations.stats(),
            claims_missed=dict(self.handoffs.claims.missed),
            lookup_keys=keys,
            lookup_misses=misses.total(),
            misses_by_reason=dict(misses),
        )

    def namespace_stats(self) -> list[NamespaceStats]:
        below = (secondary.catalog.counts() for secondary in self._transfers.secondaries)
        return self._counters.namespace_stats([self._cpu_tier.counts(), *below])

    def _tier_of(self, namespace: NamespaceId, key: bytes) -> int | None:
        block = self._cpu_tier.blocks_of(namespace).get(key)
        return 0 if block is not None and block.ready else self._transfers.residency.position_of(namespace, key)

    def _request_ended(self, request: Request) -> None:
        if request.id:
            self._request_log.finish(request.session.engine, request.id, self._now, request.incomplete)
        self._cpu_tier.finish(request.user)
        self._transfers.request_finished(request.user)
        for secondary in self._transfers.secondaries:
            secondary.tier.on_request_finished(request.id)
