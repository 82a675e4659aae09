"""AdminService: what the server holds, for whom, and why something was not there; and checks of the tiers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc

from ... import __version__
from ...protos.v1 import admin_pb2, admin_pb2_grpc
from ...tiers.grants import Store
from ...tiers.leases import Lease
from ..errors import Refused
from ..fsck_online import OnlineFsck
from ..runtime import TierRuntime
from ..sessions import SessionRegistry
from .admin_messages import (
    explained,
    fsck_step,
    handoff_status,
    handoff_totals,
    lease_status,
    session_status,
    tier_status,
)

__all__ = ["AdminService"]

_MOST_LEASES = 1000
_MOST_HANDOFFS = 1000


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Serves `kvtier.v1.AdminService`."""

    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, ready_at: float) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._ready_at = ready_at
        self._fsck = OnlineFsck(runtime, sessions)

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        stats, now = self._runtime.stats(), self._runtime.now()
        answer = admin_pb2.GetStatusResponse(
            server_version=__version__,
            epoch=self._sessions.epoch,
            draining=self._sessions.draining,
            tiers=map(tier_status, stats.tiers),
            sessions=[session_status(session, now) for session in self._sessions.all()],
            leases=stats.leases,
            stores=stats.stores,
            quarantined_bytes=stats.quarantined_bytes,
            namespaces=stats.namespaces,
            holds=stats.holds,
        )
        answer.uptime.FromNanoseconds(int((now - self._ready_at) * 1e9))
        return answer

    async def ListLeases(
        self, request: admin_pb2.ListLeasesRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListLeasesResponse:
        now, clients = self._runtime.now(), {session.core.id: session for session in self._sessions.all()}
        held: list[Lease | Store] = [*self._runtime.core.leases(), *self._runtime.core.stores()]
        held.sort(key=_since)
        return admin_pb2.ListLeasesResponse(
            leases=[
                lease_status(lease, clients.get(lease.owner.session_id), now)
                for lease in held[: min(request.max_leases or _MOST_LEASES, _MOST_LEASES)]
            ],
            total=len(held),
        )

    async def ListHandoffs(
        self, request: admin_pb2.ListHandoffsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListHandoffsResponse:
        now, core = self._runtime.now(), self._runtime.core
        holds = core.handoffs.all()
        return admin_pb2.ListHandoffsResponse(
            handoffs=[
                handoff_status(hold, now)
                for hold in holds[: min(request.max_handoffs or _MOST_HANDOFFS, _MOST_HANDOFFS)]
            ],
            total=len(holds),
            held_bytes=core.handoffs.held_bytes,
            totals=[handoff_totals(direction, stats) for direction, stats in core.handoffs.stats().items()],
        )

    async def ExplainRequest(
        self, request: admin_pb2.ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainRequestResponse:
        for record in self._runtime.core.explain(request.request_id):
            if request.engine_id in ("", record.engine_id):
                tiers = [tier.name for tier in self._runtime.stats().tiers]
                return explained(record, tiers, self._runtime.now())
        raise Refused(
            "REQUEST_NOT_FOUND", f"nothing is known of request {request.request_id!r}; it may be too long ago"
        )

    async def Fsck(
        self, request: admin_pb2.FsckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.FsckResponse]:
        run = self._fsck.run(request.tiers, repair=request.repair, rate=request.max_rate_bytes)
        async with contextlib.aclosing(run) as steps:
            async for progress in steps:
                yield fsck_step(progress)


def _since(lease: Lease | Store) -> float:
    return lease.granted_at if isinstance(lease, Lease) else lease.begun_at
