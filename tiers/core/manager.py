"""The decision core: events in, answers and commands out.

An event is a method call. It returns its answer at once and leaves in `take_commands()` what the shell is to do. The core
does no I/O, reads no clock (`now` comes with the event, in seconds of any monotonic clock) and knows no threads:
one caller at a time. An event that is refused raises a `CoreError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..base import NamespaceId, OffloadPolicy, Outcome, RequestInfo, SecondaryTier, TierFilter
from ..errors import InvalidNamespace, UnknownSession
from ..stats.counters import HitCounters
from ..stats.eviction_history import EvictionHistory, names_for
from ..stats.miss_ratio_curve import MissRatioCurves
from ..stats.request_log import RequestLog, RequestRecord
from ..stats.snapshots import ManagerStats, NamespaceStats
from ..types import DurableStatus, JobId, LeaseId, NamespaceSpec, Negotiation, Session, StoreAnswer, StoreId
from .bulk_eviction import EvictionRequest, EvictionTask
from .commands import Command, LeaseSettled
from .completions import CompletionHandler, Durability
from .cpu_tier import CpuTier
from .figures import Figures
from .handoffs import HandoffHandler, HandoffLog
from .leases import Lease, LookupAnswer
from .lookups import LookupHandler
from .requests import Request, RequestTable
from .settings import CPU_TIER, TierSettings
from .sliced_work import IncrementalWork
from .stores import Store, StoreHandler
from .transfers import TransferScheduler

__all__ = ["CPU_TIER", "TierManager"]

_ALL_TIERS = TierFilter()


class TierManager:
    """Decides where blocks are, who pins them and what goes next."""

    def __init__(
        self,
        region_bytes: int,
        extent_bytes: int,
        tiers: Sequence[SecondaryTier],
        *,
        max_queued_bytes: int | None = None,
        first_id: int = 1,
        settings: TierSettings | None = None,
        now: float = 0.0,
    ) -> None:
        """Recovers what the tiers kept from an earlier life.

        Args:
            region_bytes: what the region will have at last; memory arrives with `add_memory`.
            extent_bytes: what a size class claims at a time, and the largest part of a block.
            tiers: the tiers below the CPU tier, in lookup order.
            max_queued_bytes: bounds what waits to be stored in one of them; a quarter of the region by default.
            first_id: where ids of leases and stores start. The shell picks it at random, so that an id from an earlier
                life is never taken for one of this life.
            settings: how tiers keep blocks, and for whom; by default for everybody alike.
            now: the time, in seconds of the clock that `tick` goes by.

        Raises:
            ValueError: `settings` contradicts itself, or names a tier or a policy that does not exist.
        """
        settings = settings or TierSettings()
        settings.check({CPU_TIER, *(tier.name for tier in tiers)})
        self._commands: list[Command] = []
        self._now = now
        self._sessions: dict[bytes, Session] = {}
        self._namespaces: set[NamespaceId] = set()
        self._history = EvictionHistory(names_for(region_bytes))
        self._request_log = RequestLog()
        queues = settings.new_queues(CPU_TIER, region_bytes, now)
        self._cpu_tier = CpuTier(extent_bytes, queues, self._history.record_all, settings.spare_part)
        self._transfers = TransferScheduler(
            tiers,
            settings,
            now,
            max_queued_bytes or region_bytes // 4,
            self._cpu_tier.unpin,
            self._commands.append,
            self._history,
        )
        self._requests = RequestTable(self._tell_tiers)
        sizes = [region_bytes, *(tier.capacity_bytes for tier in tiers)]
        self._miss_ratio_curves = MissRatioCurves(sizes, self._position_of) if settings.estimates else None
        counters = HitCounters(len(tiers), {tenant.tag: tenant.name for tenant in settings.tenants})
        self._lookups = LookupHandler(
            self._cpu_tier,
            self._transfers,
            self._history,
            self._request_log,
            counters,
            first_id,
            self._miss_ratio_curves,
        )
        notes = HandoffLog(self._request_log, self._history)
        self.handoffs = HandoffHandler(
            self._cpu_tier, self._lookups, settings, region_bytes, self._commands.append, notes
        )
        """Requests that are held for another engine."""
        self._completions = CompletionHandler(
            self._cpu_tier,
            self._transfers,
            self._requests,
            self._lookups,
            self.handoffs,
            self._history,
            self._commands.append,
        )
        self._stores = StoreHandler(
            self._cpu_tier,
            self._transfers,
            self._requests,
            self._history,
            self._completions.settle,
            first_id,
            self._miss_ratio_curves,
        )
        self._durability = Durability(self._cpu_tier, self._transfers)
        self._slices = IncrementalWork(self._cpu_tier, self._transfers, self._lookups.leases, self._commands.append)
        self._figures = Figures(
            region_bytes,
            self._cpu_tier,
            self._transfers,
            self._lookups,
            self._stores,
            self.handoffs,
            self._miss_ratio_curves,
        )
        self._transfers.recover()

    def take_commands(self) -> list[Command]:
        """Returns the commands since the last call, in order."""
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def add_memory(self, offset: int, nbytes: int) -> None:
        """Takes note that a piece of the region is backed by pages and may be used."""
        self._cpu_tier.memory.add_memory(offset, nbytes)

    def open_session(
        self, session_id: bytes, engine_id: str, rank: int | None, namespace: NamespaceSpec, *, tenant: str = ""
    ) -> Session:
        """Registers a client process.

        Raises:
            InvalidNamespace: its rank lies outside of the world, or its parts do not fit an extent.
        """
        largest = max(namespace.part_bytes)
        if largest > self._cpu_tier.memory.extent_bytes:
            limit = self._cpu_tier.memory.extent_bytes
            raise InvalidNamespace(f"a part of {largest} bytes is larger than this server takes ({limit} bytes)")
        if rank is not None and rank >= namespace.world_size:
            raise InvalidNamespace(f"rank {rank} is not within a world of {namespace.world_size}")
        session = Session(session_id, engine_id, rank, namespace, tenant)
        self._sessions[session_id] = session
        self._namespaces.add(namespace.id)
        self._lookups.namespace_opened(namespace.id, tenant)
        return session

    def session(self, session_id: bytes) -> Session:
        """Returns an open session.

        Raises:
            UnknownSession: there is none with this id.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession("there is no such session: it fell, or was never opened")
        return session

    def close_session(self, session_id: bytes) -> None:
        """Lets everything fall that the session holds. Slots that it may still write to are quarantined."""
        session = self.session(session_id)
        self._slices.ask(self._lookups.end(self._lookups.leases.of_session(session_id)))
        for store in self._stores.table.owned_by(session_id):
            self._stores.abandon(store, session.writers)
        for request_id in list(session.requests):
            request = self._requests.get(session.engine, request_id)
            if request is not None:
                self._requests.finish(request, give_up=True)
        del self._sessions[session_id]
        if all(other.engine != session.engine for other in self._sessions.values()):
            self.handoffs.engine_gone(session.engine)

    def writer_attached(self, session_id: bytes, writer: int) -> None:
        """Takes note of a connection that maps the region on behalf of a session."""
        self.session(session_id).writers.add(writer)

    def writer_gone(self, session_id: bytes, writer: int) -> None:
        """Takes note that such a connection has ended: through it nobody writes any more."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.writers.discard(writer)
        self._stores.table.writer_gone(writer)

    def begin_request(self, session: Session, request: RequestInfo) -> Negotiation:
        """Asks every tier how it wants this request offloaded; REQUEST_LEVEL if any asks for it (B3.3).

        A request that was begun already keeps what was negotiated then.

        Raises:
            LimitExceeded: the session has begun too many that it never finished.
        """
        known = self._requests.get(session.engine, request.request_id)
        if known is not None and not known.finished:
            return known.negotiation
        self._requests.check_room(session)
        negotiation = self._negotiate(session, request).negotiation
        if request.request_id:
            self._request_log.open(session.engine, request.request_id, self._now).negotiation = negotiation
        return negotiation

    def retention_of(self, session: Session, request_id: str) -> float:
        """Returns for how long a request that was begun wants its blocks to stay, in seconds."""
        request = self._requests.get(session.engine, request_id)
        return request.retain_for if request is not None else 0.0

    def finish_request(self, session: Session, request_id: str) -> Request:
        """Takes note that an engine has finished a request: its leases fall, and its tiers are told once it has settled.

        One that was never announced is announced first, so that tiers see both calls, in order (B3.13).
        """
        for lease in self._lookups.leases.of_request(session.engine, request_id):
            self._lookups.release(lease)
        request = self._requests.get(session.engine, request_id)
        if request is None:
            request = self._negotiate(session, RequestInfo(request_id, session.namespace.id))
        self._cpu_tier.finish(request.user)
        self._transfers.user_finished(request.user)
        self._requests.finish(request)
        return request

    def lookup(
        self,
        session: Session,
        keys: Sequence[bytes],
        *,
        prefix: bool,
        request_id: str,
        expires_at: float,
        tiers: TierFilter = _ALL_TIERS,
        min_hits: int = 0,
        retain_until: float = 0.0,
    ) -> LookupAnswer:
        """Finds blocks, pins what it finds, and starts promotions.

        Args:
            session: who asks.
            keys: what for.
            prefix: whether whatever follows the first miss is a miss.
            request_id: on whose behalf; may be empty.
            expires_at: when the lease ends.
            tiers: leaves tiers out.
            min_hits: with `prefix`, how many leading hits are worth having; fewer are misses.
            retain_until: until when hits are not evicted, in any tier, as far as that may be; 0 for no such wish.

        Raises:
            LimitExceeded: the session holds leases on too many blocks.
            InvalidItem: `tiers` names one that does not exist.
        """
        return self._lookups.look_up(
            session,
            keys,
            request_id=request_id,
            expires_at=expires_at,
            now=self._now,
            prefix=prefix,
            excluded=self._transfers.residency.excluded(tiers),
            min_hits=min_hits,
            retain_until=retain_until,
        )

    def ask(self, session: Session, keys: Sequence[bytes], *, prefix: bool, tiers: TierFilter = _ALL_TIERS) -> bool:
        """Asks shared tiers ahead what a lookup of these keys would have to know; returns whether anything is open.

        A lookup at once answers RETRY for what is open. Raises like `lookup`.
        """
        return self._lookups.ask_ahead(
            session.namespace, keys, prefix=prefix, excluded=self._transfers.residency.excluded(tiers)
        )

    def check_filter(self, tiers: TierFilter) -> None:
        """Raises InvalidItem if a lookup cannot leave these out: it names a tier that does not exist, or the CPU tier."""
        self._transfers.residency.excluded(tiers)

    def lease(self, session: Session, lease_id: LeaseId) -> Lease:
        """Returns a lease of this session's engine.

        Raises:
            LeaseNotFound: it ended, or never was.
            NotOwner: it belongs to another engine.
        """
        return self._lookups.leases.get(lease_id, session.engine)

    def renew(self, session: Session, lease_id: LeaseId, expires_at: float) -> None:
        """Extends a lease; never shortens it. Raises like `lease`."""
        lease = self._lookups.leases.get(lease_id, session.engine)
        lease.expires_at = max(lease.expires_at, expires_at)

    def release(self, session: Session, lease_id: LeaseId) -> None:
        """Ends a lease. Raises like `lease`."""
        self._lookups.release(self._lookups.leases.get(lease_id, session.engine))

    def prepare_store(
        self,
        session: Session,
        keys: Sequence[bytes],
        *,
        request_id: str,
        expires_at: float,
        retain_until: float = 0.0,
    ) -> StoreAnswer:
        """Grants slots for the parts of this session's rank that are not there and that nobody is writing.

        Until `retain_until` none of the blocks is evicted, in any tier, as far as that may be; 0 for no such wish.

        Raises:
            InvalidKey: a key names a group that the namespace lacks; nothing was granted.
            InvalidItem: the session has no rank.
        """
        answer = self._stores.prepare(
            session, keys, request_id=request_id, expires_at=expires_at, now=self._now, retain_until=retain_until
        )
        self._slices.ask(self._cpu_tier.needs_spare_room)
        return answer

    def store(self, session: Session, store_id: StoreId) -> Store:
        """Returns a store in flight of this session's engine.

        Raises:
            StoreNotFound: it ended, or never was.
            NotOwner: it belongs to another engine.
        """
        return self._stores.table.get(store_id, session.engine)

    def renew_store(self, session: Session, store_id: StoreId, expires_at: float) -> Store:
        """Extends a store that is being written to, and returns it; never shortens it. Raises like `store`."""
        store = self._stores.table.get(store_id, session.engine)
        store.expires_at = max(store.expires_at, expires_at)
        return store

    def complete_store(self, session: Session, store_id: StoreId, failed: Collection[int] = ()) -> None:
        """Ends a store; `failed` numbers the granted blocks that were not written. Raises like `store`.

        Raises:
            InvalidItem: `failed` names a block that was not granted; the store goes on.
        """
        self._stores.complete(session, store_id, failed)

    def writer_done(self, session: Session, store_id: StoreId) -> None:
        """Takes note of a completion that came after its store had ended: at least, nobody writes any more."""
        self._stores.table.writer_done(store_id, session.engine)

    def durability(self, session: Session, keys: Sequence[bytes]) -> bytes:
        """Returns a `DurableStatus` per key, and sends on their way ready blocks that no durable tier has."""
        return self._durability.flush(session.namespace.id, keys)

    def make_durable(self) -> None:
        """Sends on their way the blocks that backpressure had left out. Called when the server ends."""
        self._durability.store_skipped()

    def durability_of(self, namespace: NamespaceId, key: bytes) -> DurableStatus:
        """Returns whether a block survives a restart."""
        return self._durability.of(namespace, key)

    def tick(self, now: float) -> None:
        """Takes note of the time and ends what has expired. Called every second or so.

        A clock that goes back is taken to stand still: nothing lives longer than what was promised by more than that.
        """
        now = self._now = max(now, self._now)
        self._request_log.tick(now)
        self._slices.expire(now)
        self.handoffs.tick(now)
        expired = self._lookups.leases.expired(now)
        self._figures.expired_leases += len(expired)
        self._slices.ask(self._lookups.end(expired))
        self._commands += (LeaseSettled(lease.id) for lease in expired)
        for store in self._stores.table.expired(now):
            self._figures.expired_stores += 1
            session = self._sessions.get(store.owner.session_id)
            self._stores.abandon(store, session.writers if session else set())

    def work(self) -> None:
        """Does the next slice of what was too much to be done at once. Called once for each `WorkLeft`."""
        self._slices.work(self._now)

    def job_finished(self, job_id: JobId, outcomes: Sequence[Outcome]) -> None:
        """Takes in the result of a job, an outcome per block. A job that is not known is ignored."""
        self._completions.job_finished(job_id, outcomes)

    def lookup_finished(self, job_id: JobId, answers: Sequence[bool]) -> None:
        """Takes in what a shared tier said of the blocks that it was asked about. A job that is not known is ignored."""
        self._transfers.residency.record_answers(job_id, answers, self._now)

    def reset(self, session: Session) -> int:
        """Empties the CPU tier of a session's namespace; the tiers below keep what they have (B3.19).

        What is pinned (it is being written, read or moved) cannot go at once, nor can very much. Until it has gone all lookups
        of the namespace miss, and what is being written to it is never published (B4.13).

        Returns:
            How many blocks are waited for. Ask again until it is 0: that empties nothing again meanwhile.
        """
        if resetting := self.resetting(session):
            return resetting
        self.handoffs.reset(session.namespace.id, self._now)
        self._slices.ask(self._cpu_tier.reset(session.namespace.id))
        return self.resetting(session)

    def resetting(self, session: Session) -> int:
        """Returns for how many blocks a reset of a session's namespace still waits."""
        return self._cpu_tier.pending_reset_blocks(session.namespace.id)

    def evict(self, wanted: EvictionRequest) -> EvictionTask:
        """Begins to evict what somebody wants gone, or to count it; it goes in slices, and one such wish after another.

        Returns:
            What has come of it so far, and in the end; `cancel` leaves it at that.
        """
        return self._slices.evict(wanted, self._now)

    def leases(self) -> list[Lease]:
        """Returns the leases that are held, the oldest first."""
        return list(self._lookups.leases)

    def stores(self) -> list[Store]:
        """Returns the stores in flight, the oldest first."""
        return list(self._stores.table)

    def explain(self, request_id: str) -> list[RequestRecord]:
        """Returns what is known of a request of the last minutes, of any engine; the latest first."""
        return self._request_log.find(request_id)

    def entries_lost(self, tier: int, names: Iterable[tuple[NamespaceId, bytes]]) -> None:
        """Takes note that a tier, by its position in the lookup order, found blocks damaged and has none of them any more."""
        self._transfers.lost(tier, names)

    def tier_stalled(self, tier: int, *, stalled: bool) -> None:
        """Takes note of whether a tier, by its position in the lookup order, does not come back from its jobs.

        Nothing new is asked of it then, and what waits to be stored in it, or read from it, waits no longer. What it is
        reading keeps its slots, for the tier may still write there, but is not found any more: it can be stored anew. When
        the tier is back, it gets what it missed meanwhile, as far as that is there.
        """
        self._completions.tier_stalled(tier, stalled=stalled)

    def stats(self) -> ManagerStats:
        """Returns the figures of this moment."""
        return self._figures.stats(self._now, sessions=len(self._sessions), namespaces=len(self._namespaces))

    def namespace_stats(self) -> list[NamespaceStats]:
        """Returns the figures of each namespace, so many at most as a `HitCounters` tells apart. Takes longer than `stats`."""
        return self._figures.namespace_stats()

    def _position_of(self, namespace: NamespaceId, key: bytes) -> int | None:
        """Returns which tier has a block, the first in the lookup order; None if none has it."""
        block = self._cpu_tier.blocks_of(namespace).get(key)
        return 0 if block is not None and block.ready else self._transfers.residency.position_of(namespace, key)

    def _negotiate(self, session: Session, request: RequestInfo) -> Request:
        votes = tuple(
            (secondary.tier.name, secondary.tier.on_new_request(request)) for secondary in self._transfers.secondaries
        )
        policy = max((vote.policy for _, vote in votes), default=OffloadPolicy.BLOCK_LEVEL)
        negotiation = Negotiation(policy, votes)
        return self._requests.add(session, request.request_id, negotiation, request.retain_for)

    def _tell_tiers(self, request: Request) -> None:
        if request.id:
            self._request_log.finish(request.session.engine, request.id, self._now, request.incomplete)
        for secondary in self._transfers.secondaries:
            secondary.tier.on_request_finished(request.id)
