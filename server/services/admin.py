"""AdminService: status, leases, hand-offs, explain, fsck, evictions, drains."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from ...protos.v1 import admin_pb2, admin_pb2_grpc
from ...tiers.core.bulk_eviction import Eviction, EvictionRequest
from ...tiers.core.in_flight_stores import Store
from ...tiers.core.leases import BlockLease
from ...tiers.secondary_tier import NamespaceId
from ...tiers.types import NAMESPACE_BYTES
from ..config.tenants import tenant_tag
from ..core_runtime import TierRuntime
from ..drain import Drain
from ..refused import Refused
from ..rpc.request_checks import duration_seconds
from ..rpc.sessions import SessionRegistry
from ..telemetry.logs import get_logger
from .admin_messages import (
    evict_step,
    explain_answer,
    fsck_step,
    handoff_status,
    handoff_totals,
    lease_status,
)
from .long_calls import LongCalls
from .online_fsck import OnlineFsck

__all__ = ["AdminService"]

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_log = get_logger(__name__)

_MAX_EVICTIONS = 16
_STEP_SECONDS = 0.1
_MAX_LEASES = 1000
_MAX_HANDOFFS = 1000


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(
        self,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        status: Callable[[], Awaitable[admin_pb2.GetStatusResponse]],
        drain: Drain,
        long_calls: LongCalls,
    ) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._status = status
        self._drain = drain
        self._long_calls = long_calls
        self._evictions = 0
        self._evicting = asyncio.Lock()
        """An eviction with a limit of bytes must not count blocks that another one evicts."""
        self._fsck = OnlineFsck(runtime, sessions)

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        return await self._status()

    async def ListLeases(
        self, request: admin_pb2.ListLeasesRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListLeasesResponse:
        now, clients = self._runtime.now(), {session.core.id: session for session in self._sessions.all()}
        # Both lists are in the order of their begin, so no sort of all leases is necessary.
        leases, stores = self._runtime.core.leases(), self._runtime.core.stores()
        both: tuple[Iterable[BlockLease | Store], ...] = (leases, stores)
        oldest = heapq.merge(*both, key=_begun_at)
        return admin_pb2.ListLeasesResponse(
            leases=await self._describe(
                list(islice(oldest, min(request.max_leases or _MAX_LEASES, _MAX_LEASES))),
                lambda lease: lease_status(lease, clients.get(lease.owner.session_id), now),
            ),
            total=len(leases) + len(stores),
        )

    async def ListHandoffs(
        self, request: admin_pb2.ListHandoffsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListHandoffsResponse:
        now, stats = self._runtime.now(), self._runtime.core.stats()
        holds = self._runtime.core.holds()
        return admin_pb2.ListHandoffsResponse(
            handoffs=await self._describe(
                holds[: min(request.max_handoffs or _MAX_HANDOFFS, _MAX_HANDOFFS)],
                lambda hold: handoff_status(hold, now),
            ),
            total=len(holds),
            held_bytes=stats.held_bytes,
            totals=[handoff_totals(direction, totals) for direction, totals in stats.handoffs.items()],
            missed_claims=[
                admin_pb2.MissedClaims(outcome=admin_pb2.ClaimOutcome.Name(outcome.value), claims=claims)
                for outcome, claims in stats.claims_missed.items()
            ],
        )

    async def ExplainRequest(
        self, request: admin_pb2.ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainRequestResponse:
        for record in self._runtime.core.explain(request.request_id):
            if request.engine_id in ("", record.engine_id):
                tiers = [tier.name for tier in self._runtime.stats().tiers]
                return explain_answer(record, tiers, self._runtime.now())
        raise Refused(
            "REQUEST_NOT_FOUND",
            f"there is no record of request {request.request_id!r}; records of old requests are dropped",
        )

    async def Fsck(
        self, request: admin_pb2.FsckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.FsckResponse]:
        run = self._fsck.run(request.tiers, repair=request.repair, rate=request.max_rate_bytes)
        async with contextlib.aclosing(run) as steps:
            async for progress in steps:
                yield fsck_step(progress)

    async def Evict(
        self, request: admin_pb2.EvictRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.EvictResponse]:
        if self._drain.ending:
            raise Refused("DRAINING", "the server is shutting down")
        names = [tier.name for tier in self._runtime.stats().tiers]
        wanted = _eviction_request(request, names, self._runtime.now())
        if self._evictions >= _MAX_EVICTIONS:
            raise Refused("LIMIT_EXCEEDED", f"{self._evictions} evictions are already running, which is the maximum")
        log = _log.bind(tiers=list(request.tiers) or names, dry_run=request.dry_run)
        eviction = self._runtime.core.evict(wanted)
        work = asyncio.ensure_future(self._run(eviction))
        self._evictions += 1
        try:
            while not work.done():
                yield evict_step(eviction, names, done=False)
                await asyncio.wait([work], timeout=_STEP_SECONDS)
            work.result()
            yield evict_step(eviction, names, done=True)
        finally:
            work.cancel()
            self._evictions -= 1
            log.info("evicted on demand", blocks=sum(tier.blocks for tier in eviction.tiers))

    async def _run(self, eviction: Eviction) -> None:
        async with self._evicting:
            await self._long_calls.run(None, eviction.run())

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.DrainResponse]:
        if request.mode == admin_pb2.DRAIN_MODE_UNDO:
            self._drain.undo()
        elif request.mode == admin_pb2.DRAIN_MODE_STAY:
            self._drain.stay()
        elif request.mode in (admin_pb2.DRAIN_MODE_UNSPECIFIED, admin_pb2.DRAIN_MODE_END):
            self._drain.end()
        else:  # an unknown mode of a newer client must not end the server
            raise Refused("INVALID_ARGUMENT", f"there is no drain mode {request.mode}")
        while not self._drain.done:
            yield self._drain_step()
            await asyncio.sleep(_STEP_SECONDS)
        yield self._drain_step()

    async def _describe(self, held: Sequence[T], describe: Callable[[T], M]) -> list[M]:
        """Describes leases or holds, which have up to 65,536 blocks each, in turns."""
        described: list[M] = []
        turn_ends = 0.0
        for each in held:
            if time.monotonic() >= turn_ends:
                turn_ends = await self._long_calls.scheduler.pause()
            described.append(describe(each))
        return described

    def _drain_step(self) -> admin_pb2.DrainResponse:
        stats = self._runtime.stats()
        return admin_pb2.DrainResponse(
            stores=stats.stores,
            jobs=sum(tier.jobs for tier in stats.tiers),
            queued_bytes=sum(tier.queued_bytes for tier in stats.tiers),
            sessions=len(self._sessions.all()),
            done=self._drain.done,
            complete=self._drain.complete,
        )


def _eviction_request(request: admin_pb2.EvictRequest, tiers: list[str], now: float) -> EvictionRequest:
    unknown = [name for name in request.tiers if name not in tiers]
    if unknown:
        raise Refused("INVALID_ARGUMENT", f"there is no tier {unknown[0]!r}; the tiers are {', '.join(tiers)}")
    if request.namespace_id and len(request.namespace_id) != NAMESPACE_BYTES:
        raise Refused(
            "INVALID_ARGUMENT", f"namespace_id has {len(request.namespace_id)} bytes; it must have {NAMESPACE_BYTES}"
        )
    unused_for = duration_seconds(request.unused_for, "unused_for")
    return EvictionRequest(
        [number for number, name in enumerate(tiers) if name in request.tiers or not request.tiers],
        namespace=NamespaceId(request.namespace_id) if request.namespace_id else None,
        tenant_tag=tenant_tag(request.tenant) if request.HasField("tenant") else None,
        unused_since=now - unused_for if request.HasField("unused_for") else None,
        max_bytes=request.max_bytes or None,
        retained=request.include_retained,
        dry_run=request.dry_run,
    )


def _begun_at(lease: BlockLease | Store) -> float:
    return lease.granted_at if isinstance(lease, BlockLease) else lease.begun_at
