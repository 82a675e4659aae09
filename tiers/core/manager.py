"""Decision core of the tiered cache: events in, answers and commands out.

An event is a method call. The call returns its answer at once and appends commands for the server,
which fetches them with `take_commands()`. A long event returns an `Operation`, whose steps are
events. The core does no I/O, reads no clock and uses no threads.
Calls must not overlap. `now`: monotonic seconds. A refused event (`CoreError`) changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..errors import InvalidNamespace, UnknownSession
from ..secondary_tier import NamespaceId, Outcome, RequestInfo
from ..stats.request_log import RequestRecord
from ..types import EngineSession, JobId, LeaseId, MissReason, NamespaceSpec, Negotiation, Owner, StoreAnswer, StoreId
from .block import Block
from .bulk_eviction import Eviction, EvictionRequest
from .call_specs import LookupSpec, StoreSpec
from .commands import Command
from .handlers import CoreParts
from .in_flight_stores import STORE_SLICE, Preparation, Store
from .leases import BlockLease
from .operations import Operation
from .prefetches import PrefetchAnswer
from .recovery import FormerWriters, RecoveredBlocks, recover_blocks, store_missing
from .requests import Request
from .running_lookup import LOOKUP_SLICE, LookupAnswer
from .settings import CPU_TIER

__all__ = ["CPU_TIER", "TierManager"]

_MAX_COUNTED_NAMESPACES = 65_536
"""Number of namespaces that the statistics can tell apart, about 120 bytes each."""


class TierManager(CoreParts):
    """Decides where blocks are stored, what pins them and what is evicted."""

    def take_commands(self) -> list[Command]:
        if self._cpu_tier.has_more_room:
            self._lookups.room.offer()
        if self._cpu_tier.retiring.has_work:
            self._sliced_work.continue_if(True)
        commands, self._commands[:] = self._commands.copy(), []
        return commands

    def add_memory(self, offset: int, nbytes: int) -> None:
        self._cpu_tier.memory.add_memory(offset, nbytes)
        self._cpu_tier.made_room()

    def recover(self, writers: Iterable[int]) -> RecoveredBlocks:
        """Adds the blocks that the records have. Called before all other events.

        `writers`: tags of the sessions of the earlier server whose clients may map the region.
        Raises RecordsError if the records are damaged; then the core must not be used.
        """
        assert self._records is not None
        self._cpu_tier.tick(self._now)  # blocks count as used now
        self._former_writers = FormerWriters(self._cpu_tier, writers)
        recovered = recover_blocks(self._records, self._cpu_tier, self._former_writers)
        self._sliced_work.perform_later(store_missing(recovered.blocks, self._tier_jobs), b"")
        return recovered

    def former_writer_gone(self, tag: int) -> None:
        """Called when an earlier server's client of a session does not map the region any more."""
        self._former_writers.gone(tag)

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

    def pool_of(self, namespace: NamespaceId) -> int:
        """Returns the number of the memory pool of a namespace's tenant; 0 is the common one."""
        return self._cpu_tier.queues.shares.of(namespace).pool

    def session(self, session_id: bytes) -> EngineSession:
        """Returns an open session. Raises UnknownSession."""
        if (session := self._sessions.get(session_id)) is None:
            raise UnknownSession("there is no such session: it ended, or was never opened")
        return session

    def close_session(self, session_id: bytes) -> None:
        """Ends a session, its leases, stores and requests. See `Endings.end_session`."""
        session = self.session(session_id)
        del self._sessions[session_id]
        self._endings.end_session(session)
        if all(other.engine != session.engine for other in self._sessions.values()):
            self._handoffs.engine_gone(session.engine)

    def writer_attached(self, session_id: bytes, writer: int) -> None:
        self.session(session_id).writers.add(writer)

    def region_unmapped(self, session: EngineSession) -> None:
        """Called when a client does not map the region any more. It may have filled its stores."""
        session.unmapped_from = self._stores.table.begun

    def writer_gone(self, session_id: bytes, writer: int) -> None:
        """Called when a writer connection has ended: the process can no longer write to slots."""
        self._endings.writer_gone(session_id, writer)

    def begin_request(self, session: EngineSession, request: RequestInfo) -> Negotiation:
        """Asks every tier for its vote; the policy is REQUEST_LEVEL if any tier votes so (B3.3).

        Repeats the result if the request has begun. LimitExceeded: too many unfinished requests.
        """
        if (known := self._requests.get(session.engine, request.request_id)) is not None and not known.finished:
            return known.negotiation
        self._requests.check_room(session)
        begun = self._requests.negotiate(session, request)
        if request.conversation_id:
            begun.conversation = self._conversations.table.begin_request(session, request.conversation_id, self._now)
        if request.request_id:
            self._request_log.open(session.engine, request.request_id, self._now).negotiation = begun.negotiation
        return begun.negotiation

    def finish_request(self, session: EngineSession, request_id: str) -> Request:
        """Ends a request's leases. Tiers are notified when all stores of the request have ended.

        A request that did not begin is begun first, so that every tier gets both calls (B3.13).
        """
        self._endings.end_leases(self._lookups.leases.of_request(session.engine, request_id))
        if (request := self._requests.get(session.engine, request_id)) is None:
            request = self._requests.negotiate(session, RequestInfo(request_id, session.namespace.id))
        self._requests.finish(request)
        return request

    def lookup(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        spec: LookupSpec,
        *,
        now: float,
        slice_keys: int = LOOKUP_SLICE,
    ) -> Operation[LookupAnswer]:
        """Finds blocks, pins the hits and starts promotions. See `LookupHandler.run`.

        If there is no room for a promotion, the lookup waits until its deadline. Raises
        LimitExceeded if the session has too many leases, InvalidItem for an unknown tier.
        """
        conversation = self._requests.conversation_of(session, spec.request_id)
        retain_until = self._requests.retain_until(session, spec, now)
        lookup = self._lookups.begin(
            session, keys, spec, retain_until, conversation=conversation, slice_keys=slice_keys
        )
        return self._lookups.run(lookup, now)

    def prefetch(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        spec: LookupSpec,
        *,
        now: float,
        slice_keys: int = LOOKUP_SLICE,
    ) -> Operation[PrefetchAnswer]:
        """Starts promotions, without a lease. Raises like `lookup`."""
        retain_until = self._requests.retain_until(session, spec, now)
        lookup = self._lookups.begin(session, keys, spec, retain_until, slice_keys=slice_keys)
        return self._lookups.run_prefetch(lookup, now)

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
        spec: StoreSpec,
        *,
        now: float,
        slice_keys: int = STORE_SLICE,
    ) -> Operation[StoreAnswer]:
        """Grants slots for the missing parts of this session's rank. See `StoreHandler.prepare`."""
        owner = Owner(session.engine, session.id, spec.request_id, spec.grant_id)
        retain_until = self._requests.retain_until(session, spec, now)
        preparation = Preparation(session, owner, keys, spec, retain_until, slice_keys)
        return self._stores.prepare(preparation, now)

    def complete_store(
        self,
        session: EngineSession,
        store_id: StoreId,
        failed: Collection[int] = (),
        *,
        slice_blocks: int = STORE_SLICE,
    ) -> Operation[Sequence[int]]:
        """Ends a store; `failed`: blocks that are not written. See `StoreHandler.complete`."""
        return self._stores.complete(session, store_id, failed, slice_blocks=slice_blocks)

    def store(self, session: EngineSession, store_id: StoreId) -> Store:
        """Returns a store in flight of this session's engine. Raises StoreNotFound, NotOwner."""
        return self._stores.table.get(store_id, session.engine)

    def renew_store(self, session: EngineSession, store_id: StoreId, expires_at: float) -> Store:
        """Extends a store in flight and returns it; never shortens it. Raises like `store`."""
        store = self._stores.table.get(store_id, session.engine)
        store.expires_at = max(store.expires_at, expires_at)
        return store

    def writer_done(self, session: EngineSession, store_id: StoreId) -> None:
        """Called when a client completes an ended store. Frees the store's quarantined slots."""
        self._endings.writer_done(session, store_id)

    def tick(self, now: float) -> None:
        """Advances the time and ends everything that has expired. Called about once per second.

        If `now` is earlier than in the last call, the core keeps the later time.
        """
        now = self._now = max(now, self._now)
        self._request_log.tick(now)
        self._events.tick(now)
        self._sliced_work.expire(now)
        self._handoffs.tick(now)
        self._endings.expire(self._lookups.leases.expired(now), self._stores.table.expired(now))
        self._cpu_tier.retiring.tick(now)
        self._retiring_pins.tick()

    def has_work(self) -> bool:
        """Whether the core waits for a call of `work`."""
        return self._sliced_work.is_requested

    def work(self) -> None:
        """Runs the next slice of incremental work. Called once for each `ContinueWork` command."""
        self._sliced_work.work(self._now)

    def job_finished(self, job_id: JobId, outcomes: Sequence[Outcome]) -> None:
        """Handles the result of a job, one outcome per block. An unknown job is ignored."""
        self._completions.job_finished(job_id, outcomes)

    def lookup_finished(self, job_id: JobId, answers: Sequence[bool]) -> None:
        """Handles a shared tier's answers to a `LookupInTier`. An unknown job is ignored."""
        self._tier_jobs.residency.record_answers(job_id, answers, self._now)

    def reset(self, session: EngineSession, *, retire: bool = False) -> int:
        """Drops a session's namespace from the CPU tier; secondary tiers keep their blocks (B3.19).

        Blocks are dropped in slices; a pinned block is dropped when its last pin ends. Until all
        are dropped, every lookup of the namespace misses. Pending stores of the namespace are never
        published (B4.13). Returns the number of blocks that are not dropped yet. While a reset
        runs, another call only returns this number. With `retire`, secondary tiers evict the blocks
        of the namespace before all others.
        """
        if retire:
            self._tier_jobs.retire(session.namespace.id)
        if resetting := self.resetting(session):
            return resetting
        self._handoffs.reset(session.namespace.id, self._now)
        self._tier_jobs.write_back.flush_queues()  # queued blocks are pinned
        self._sliced_work.continue_if(self._cpu_tier.reset(session.namespace.id))
        return self.resetting(session)

    def resetting(self, session: EngineSession) -> int:
        return self._cpu_tier.pending_reset_blocks(session.namespace.id)

    def evict(self, wanted: EvictionRequest) -> Eviction:
        """Returns an operator's eviction, which `Eviction.run` performs."""
        return Eviction(wanted, [self._cpu_tier, *self._tier_jobs.sources(self._cpu_tier.used_at)], self._now)

    def leases(self) -> list[BlockLease]:
        return list(self._lookups.leases)

    def stores(self) -> list[Store]:
        return list(self._stores.table)

    @property
    def keeps_contents(self) -> bool:
        """Whether the core keeps what clients describe of blocks."""
        return bool(self._events.contents.limit_bytes)

    def explain(self, request_id: str) -> list[RequestRecord]:
        """Returns the recent records of a request, of any engine; the latest first."""
        return self._request_log.find(request_id)

    def entries_lost(self, tier: int, names: Collection[tuple[NamespaceId, bytes]]) -> None:
        """Drops the entries of damaged blocks that the tier at this position has quarantined."""
        self._tier_jobs.lost(tier, names)

    def remove_damaged(self, blocks: Iterable[Block]) -> list[Block]:
        """Removes blocks of the CPU tier whose bytes do not match their digests, if they are ready.

        Leases, holds and jobs keep their pins; who reads the block compares the digest, too. Tiers
        keep their blocks, because bytes are compared before a tier stores them. Returns the removed
        blocks.
        """
        found = [block for block in blocks if block.ready and self._cpu_tier.contains(block)]
        for block in found:
            block.skip_reason = None
            if block.pins:
                self._cpu_tier.discard(block, MissReason.DAMAGED)
            else:
                self._cpu_tier.drop([block], MissReason.DAMAGED)
        return found

    def remove_wrong(self, blocks: Iterable[Block]) -> list[Block]:
        """Removes blocks whose KV is wrong from the CPU tier and from the tiers of this server.

        Returns the blocks that the CPU tier had.
        """
        found = self.remove_damaged(blocks)
        self._tier_jobs.remove_wrong(found)
        return found

    def tier_stalled(self, tier: int, *, stalled: bool) -> None:
        """Called when a job of the tier at this position takes too long, and when the job returns.

        A stalled tier gets no jobs, and its write-back queue is discarded. Blocks that the tier is
        loading keep their slots, because the tier may still write to them. These blocks are
        unlinked from the index, so that clients can store new blocks with the same keys.
        """
        self._completions.tier_stalled(tier, stalled=stalled)
