"""CacheService: lookups, loads, stores, flush and reset."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import grpc
import msgspec

from ...protos.v1 import cache_pb2, cache_pb2_grpc
from ...protos.wire.packed_keys import pack_offsets
from ...tiers.core.call_specs import LookupSpec, StoreSpec
from ...tiers.core.in_flight_stores import Store
from ...tiers.core.leases import BlockLease
from ...tiers.errors import CoreError, LeaseNotFound, StoreNotFound
from ...tiers.secondary_tier import RequestInfo, TierFilter
from ...tiers.types import EngineSession, KeyStatus, LeaseId, MissReason, StoreId
from ..core_runtime import TierRuntime
from ..peers.sources import Located, PeerSources
from ..refused import Refused
from ..rpc.request_checks import RequestValidator
from ..rpc.sessions import SessionRegistry
from .admin_messages import POLICIES
from .long_calls import LongCalls

__all__ = ["CacheService"]

_RESET_POLL_SECONDS, _LAST_RESET_POLL_SECONDS = 0.02, 0.32
"""Time between the first two polls of a waiting reset, which doubles, and the longest one."""

_MAX_SLOTS = 1 << 17
"""Largest number of slots in an answer: 1 MiB."""
_NOT_ASKED, _ALL_TIERS = Located(), TierFilter()
_HIT = bytes([KeyStatus.HIT])


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    def __init__(
        self,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        validator: RequestValidator,
        end_writers: Callable[[int], Awaitable[None]],
        record_digests: Callable[[Store], Awaitable[None] | None],
        long_calls: LongCalls,
        sources: PeerSources,
    ) -> None:
        """`end_writers` ends all streams that write to a store. It returns when they have ended.

        `record_digests`: see `Writers`.
        """
        self._runtime = runtime
        self._core = runtime.core
        self._sessions = sessions
        self._validator = validator
        self._end_writers = end_writers
        self._record_digests = record_digests
        self._long_calls = long_calls
        self._sources = sources
        self._has_shared_tiers = any(tier.shared for tier in runtime.tiers)

    async def BeginRequest(
        self, request: cache_pb2.BeginRequestRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.BeginRequestResponse:
        self._sessions.refuse_if_draining()
        session = self._sessions.get(request.session)
        if not request.request_id:
            raise Refused("INVALID_ARGUMENT", "request_id is missing")
        info = RequestInfo(
            request_id=request.request_id,
            namespace=session.namespace.id,
            prompt_tokens=request.prompt_tokens,
            tenant=session.tenant,
            priority=request.priority,
            kv_transfer_params=_params(request.kv_transfer_params_json),
            retain_for=self._validator.retention(request.retain_for),
            conversation_id=request.conversation_id,
        )
        options = self._lookup_options(request)
        keys = await self._long_calls.keys(session, self._validator, request.keys)
        negotiation = self._core.begin_request(session, info)
        lookup = await self._look_up(session, keys, options, request)
        return cache_pb2.BeginRequestResponse(
            policy=POLICIES[negotiation.policy],
            votes=[
                cache_pb2.TierVote(tier=tier, policy=POLICIES[vote.policy], why=vote.why)
                for tier, vote in negotiation.votes
            ],
            lookup=lookup,
        )

    async def Lookup(
        self, request: cache_pb2.LookupRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.LookupResponse:
        session = self._sessions.get(request.session)
        options = self._lookup_options(request)
        keys = await self._long_calls.keys(session, self._validator, request.keys)
        return await self._look_up(session, keys, options, request)

    async def Prefetch(
        self, request: cache_pb2.PrefetchRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.PrefetchResponse:
        self._sessions.refuse_if_draining()
        session = self._sessions.get(request.session)
        options = LookupSpec(
            request_id=request.request_id,
            tiers=self._tiers(request),
            retain_for=self._validator.retention(request.retain_for),
        )
        keys = await self._long_calls.keys(session, self._validator, request.keys)
        deadline = self._runtime.now() + self._validator.wait(request.wait)
        located = await self._locate(session, keys, options, request.source, deadline)
        try:
            prefetch = self._core.prefetch(session, keys, options, now=self._runtime.now())
            answer = await self._long_calls.run(session, prefetch)
        finally:
            self._sources.withdraw(session, located)
        return cache_pb2.PrefetchResponse(
            present_blocks=answer.present,
            started_blocks=answer.started,
            missing_blocks=answer.missing,
            no_room_blocks=answer.no_room,
            unanswered_blocks=answer.unanswered,
            not_retained_blocks=answer.not_retained,
            source_outcome=located.outcome,
        )

    async def PrepareLoad(
        self, request: cache_pb2.PrepareLoadRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.PrepareLoadResponse:
        session = self._sessions.get(request.session)
        # Without shared memory, `Pull` counts the bytes.
        slots, sizes = await self._long_calls.read(
            session, LeaseId(request.lease_id), request.items, counted=bool(session.writers)
        )
        return cache_pb2.PrepareLoadResponse(slot_offsets=pack_offsets(slots), part_sizes_bytes=pack_offsets(sizes))

    async def CompleteLoad(
        self, request: cache_pb2.CompleteLoadRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.CompleteLoadResponse:
        session = self._sessions.get(request.session, is_release=True)
        lease = self._core.lease(session, LeaseId(request.lease_id))
        if lease.expires_at <= self._runtime.now():
            raise LeaseNotFound(f"lease {lease.id} has expired")
        if request.wrong_items:
            self._long_calls.remove_wrong(session, lease, request.wrong_items)
        if session.writers:  # other clients cannot copy
            lease.copied(request.copied_bytes, session.namespace.world_size * max(session.namespace.part_bytes))
        verifying = self._long_calls.verify(session, lease, request.damaged_items) if request.damaged_items else None
        if request.release:
            self._core.release(session, lease.id)
            self._runtime.run_commands()
        if verifying is not None:
            await verifying
        return cache_pb2.CompleteLoadResponse()

    async def ReleaseLease(
        self, request: cache_pb2.ReleaseLeaseRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.ReleaseLeaseResponse:
        session = self._sessions.get(request.session, is_release=True)
        await self._long_calls.release(session, request.lease_ids)
        return cache_pb2.ReleaseLeaseResponse()

    async def Touch(
        self, request: cache_pb2.TouchRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.TouchResponse:
        session = self._sessions.get(request.session)
        expires_at = self._runtime.now() + self._validator.lease(request.lease_duration)
        missing = await self._long_calls.renew(session, request.lease_ids, expires_at)
        return cache_pb2.TouchResponse(missing_lease_ids=missing)

    async def PrepareStore(
        self, request: cache_pb2.PrepareStoreRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.PrepareStoreResponse:
        self._sessions.refuse_if_draining()
        session = self._sessions.get(request.session)
        keys = await self._long_calls.keys(session, self._validator, request.keys)
        options = StoreSpec(
            request_id=request.request_id,
            lease_seconds=self._validator.leases.default,
            retain_for=self._validator.retention(request.retain_for),
            grant_id=request.grant_id,
        )
        store = self._core.prepare_store(session, keys, options, now=self._runtime.now())
        answer = await self._long_calls.run(session, store)
        self._runtime.digests.clear(answer.slots)
        return cache_pb2.PrepareStoreResponse(
            store_id=answer.store_id or 0,
            statuses=answer.statuses,
            slot_offsets=pack_offsets(answer.slots),
            not_retained_blocks=answer.not_retained,
        )

    async def CompleteStore(
        self, request: cache_pb2.CompleteStoreRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.CompleteStoreResponse:
        session = self._sessions.get(request.session, is_release=True)
        unreceived = await self._complete_store(session, StoreId(request.store_id), request.failed_items)
        return cache_pb2.CompleteStoreResponse(failed_items=unreceived)

    async def WithdrawGrants(
        self, request: cache_pb2.WithdrawGrantsRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.WithdrawGrantsResponse:
        session = self._sessions.get(request.session, is_release=True)
        leases: list[LeaseId] = []
        stores: list[StoreId] = []
        for grant_id in filter(None, dict.fromkeys(request.grant_ids)):
            grant = (session.id, grant_id)
            if (lease := self._core.lease_of_grant(grant)) is not None:
                leases.append(lease.id)
            elif (store_id := self._core.store_of_grant(grant)) is not None:
                stores.append(store_id)
            else:  # the call has not arrived, is not granted yet, or has ended
                session.withdraw(grant_id)
        await self._long_calls.release(session, leases)
        for store_id in stores:
            with contextlib.suppress(StoreNotFound):
                await self._complete_store(session, store_id, None)
        return cache_pb2.WithdrawGrantsResponse()

    async def _complete_store(
        self, session: EngineSession, store_id: StoreId, failed: Sequence[int] | None
    ) -> Sequence[int]:
        """Ends a store. `failed`: positions of blocks that the client did not write; None: of all.

        Returns the positions of the further blocks that are not stored. Raises a CoreError.
        """
        await self._end_streams(session, store_id)
        try:
            store = self._core.store(session, store_id)
            if failed is None:
                failed = range(len(store.blocks))
            elif store.is_streamed and (recording := self._record_digests(store)) is not None:
                await recording
            unreceived = await self._long_calls.complete_store(session, store_id, failed)
        except StoreNotFound:
            self._core.writer_done(session, store_id)
            self._runtime.run_commands()
            raise
        if failed or unreceived:
            self._runtime.notify_change()
        return unreceived

    async def _end_streams(self, session: EngineSession, store_id: StoreId) -> None:
        try:
            self._core.store(session, store_id)  # raises NotOwner: the streams of others continue
        except StoreNotFound:
            if not self._core.is_quarantined(store_id, session.engine):
                return  # such as a store of another tenant
        await self._end_writers(store_id)
        self._sessions.check(session)

    async def Flush(
        self, request: cache_pb2.FlushRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.FlushResponse:
        session = self._sessions.get(request.session)
        deadline = self._runtime.now() + self._validator.wait(request.wait)
        keys = await self._long_calls.keys(session, self._validator, request.keys)
        now = self._runtime.now()
        with self._long_calls.waiting(session) if deadline > now else contextlib.nullcontext(False) as may_wait:
            flush = self._core.flush(session.namespace.id, keys, deadline=deadline if may_wait else now, now=now)
            return cache_pb2.FlushResponse(statuses=await self._long_calls.run(session, flush))

    async def FinishRequest(
        self, request: cache_pb2.FinishRequestRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.FinishRequestResponse:
        session = self._sessions.get(request.session, is_release=True)
        deadline = self._runtime.now() + self._validator.wait(request.wait)
        if not request.request_id:
            raise Refused("INVALID_ARGUMENT", "request_id is missing")
        finished = self._core.finish_request(session, request.request_id)
        self._runtime.run_commands()
        with self._long_calls.waiting(session) as may_wait:
            while may_wait and not finished.settled and (remaining := deadline - self._runtime.now()) > 0:
                await self._runtime.wait_for_change(remaining)
        return cache_pb2.FinishRequestResponse(settled=finished.settled, incomplete_blocks=finished.incomplete)

    async def Reset(
        self, request: cache_pb2.ResetRequest, context: grpc.aio.ServicerContext
    ) -> cache_pb2.ResetResponse:
        session = self._sessions.get(request.session)
        deadline = self._runtime.now() + self._validator.wait(request.wait)
        self._runtime.get_finished_jobs()
        pending = self._core.reset(session, retire=request.retire)
        self._runtime.run_commands()
        poll_seconds = _RESET_POLL_SECONDS
        with self._long_calls.waiting(session) as may_wait:
            while may_wait and pending and (remaining := deadline - self._runtime.now()) > 0:
                # Polls, because the release or completion of a block wakes no call.
                await asyncio.sleep(min(remaining, poll_seconds))
                poll_seconds = min(2 * poll_seconds, _LAST_RESET_POLL_SECONDS)
                pending = self._core.resetting(session)
        return cache_pb2.ResetResponse(pending_blocks=pending)

    def _tiers(
        self, request: cache_pb2.BeginRequestRequest | cache_pb2.LookupRequest | cache_pb2.PrefetchRequest
    ) -> TierFilter:
        if not request.HasField("exclude"):
            return _ALL_TIERS
        tiers = self._validator.tiers(request.exclude)
        self._core.excluded(tiers)  # raises InvalidItem
        return tiers

    def _lookup_options(self, request: cache_pb2.BeginRequestRequest | cache_pb2.LookupRequest) -> LookupSpec:
        return LookupSpec(
            prefix=request.mode != cache_pb2.LOOKUP_MODE_EACH,
            request_id=request.request_id,
            tiers=self._tiers(request),
            min_hits=request.min_hits,
            lease_seconds=self._validator.lease(request.lease_duration),
            deadline=self._runtime.now() + self._validator.wait(request.wait),
            retain_for=self._validator.retention(request.retain_for),
            grant_id=request.grant_id,
        )

    async def _locate(
        self, session: EngineSession, keys: Sequence[bytes], options: LookupSpec, source: str, deadline: float
    ) -> Located:
        """Asks shared tiers, and another server, for blocks that this server does not have."""
        if not (source or self._has_shared_tiers):
            return _NOT_ASKED
        tiers, prefix = options.tiers, options.prefix
        query = self._core.query_shared_tiers(
            session, keys, tiers, prefix=prefix, deadline=deadline, now=self._runtime.now()
        )
        await self._long_calls.run(session, query)
        return await self._sources.locate(session, source, keys, tiers, deadline, prefix=prefix)

    async def _look_up(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        options: LookupSpec,
        request: cache_pb2.BeginRequestRequest | cache_pb2.LookupRequest,
    ) -> cache_pb2.LookupResponse:
        located = await self._locate(session, keys, options, request.source, options.deadline)
        try:
            lookup = self._core.lookup(session, keys, options, now=self._runtime.now())
            found = await self._long_calls.run(session, lookup)
        finally:
            if located.keys:
                self._sources.withdraw(session, located)
        remaining = options.deadline - self._runtime.now()
        if found.lease is not None and found.lease.pending and remaining > 0:
            found = replace(found, lease=await self._wait_ready(session, found.lease, remaining))
        # The slots are those of these hits. Until they are read, other blocks may become ready.
        statuses, slots = found.statuses(), b""
        # Clients without the region could not use slots, so they learn none.
        if found.lease is not None and request.want_slots and session.writers:
            read = await self._read_slots(session, found.lease, _leading_hits(statuses))
            if read is None:
                found = replace(found, lease=None)
                statuses = found.statuses()
            slots = read or b""
        lease = found.lease
        if lease is None:
            return cache_pb2.LookupResponse(statuses=statuses, sources=bytes(len(keys)), source_outcome=located.outcome)
        sources = lease.sources.ljust(len(keys), b"\0")
        return cache_pb2.LookupResponse(
            statuses=statuses,
            prefix_hits=_leading_hits(statuses),
            sources=sources,
            lease_id=lease.id,
            not_retained_blocks=found.not_retained,
            source_outcome=located.outcome,
            slot_offsets=slots,
        )

    async def _read_slots(self, session: EngineSession, lease: BlockLease, hits: int) -> bytes | None:
        """Returns the slots for the answer of a lookup: empty if there are too many.

        Returns None if the lease has ended. If this fails, the lease ends.
        """
        ranks = 1 if session.rank is not None else session.namespace.world_size
        if hits * ranks > _MAX_SLOTS:
            return b""
        try:
            return pack_offsets(await self._long_calls.slots(session, lease.id, hits))
        except LeaseNotFound:
            self._core.take_back_hits(lease, MissReason.PENDING)
            return None
        except BaseException:  # also a cancellation: the client never gets the lease's id
            self._core.take_back_hits(lease, MissReason.PENDING)
            self._release(session, lease)
            raise

    def _release(self, session: EngineSession, lease: BlockLease) -> None:
        """Releases a lease of which the client learns nothing, unless it has ended."""
        with contextlib.suppress(CoreError):
            self._core.release(session, lease.id)
            self._runtime.run_commands()

    async def _wait_ready(self, session: EngineSession, lease: BlockLease, seconds: float) -> BlockLease | None:
        """Waits until no block is pending. Returns None if the lease ended or has no block left."""
        try:
            await self._runtime.wait_for(lease.id, seconds)
            await self._long_calls.scheduler.turn(session)  # thousands can wait for one block
        except asyncio.CancelledError:  # the client never gets the lease's id to release it
            self._release(session, lease)
            raise
        except Refused:  # the session has ended
            self._core.take_back_hits(lease, MissReason.PENDING)
            raise
        try:
            self._core.lease(session, lease.id)
        except CoreError:
            self._core.take_back_hits(lease, MissReason.PENDING)
            return None
        if any(block is not None for block in lease.items):
            return lease
        self._release(session, lease)
        return None


def _leading_hits(statuses: bytes) -> int:
    return len(statuses) - len(statuses.lstrip(_HIT))


def _params(text: str) -> dict[str, object]:
    if not text:
        return {}
    try:
        params = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused("INVALID_ARGUMENT", f"kv_transfer_params_json is not JSON: {error}") from error
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise Refused("INVALID_ARGUMENT", "kv_transfer_params_json is not a JSON object")
    return params
