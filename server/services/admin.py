"""AdminService: the server at a glance."""

from __future__ import annotations

import grpc

from ... import __version__
from ...protos.v1 import admin_pb2, admin_pb2_grpc
from ..runtime import TierRuntime
from ..sessions import OpenSession, SessionRegistry

__all__ = ["AdminService"]


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Serves `kvtier.v1.AdminService`."""

    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, ready_at: float) -> None:
        self._runtime = runtime
        self._sessions = sessions
        self._ready_at = ready_at

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        stats = self._runtime.stats()
        answer = admin_pb2.GetStatusResponse(
            server_version=__version__,
            epoch=self._sessions.epoch,
            draining=self._sessions.draining,
            tiers=[
                admin_pb2.TierStatus(
                    name=tier.name,
                    type=tier.type,
                    capacity_bytes=tier.capacity_bytes,
                    available_bytes=tier.available_bytes,
                    used_bytes=tier.used_bytes,
                    blocks=tier.blocks,
                    hits=tier.hits,
                    misses=tier.misses,
                    evictions=tier.evictions,
                    jobs=tier.jobs,
                    healthy=tier.healthy,
                    trouble=tier.trouble,
                )
                for tier in stats.tiers
            ],
            sessions=[self._session_status(session) for session in self._sessions.all()],
            leases=stats.leases,
            stores=stats.stores,
            quarantined_bytes=stats.quarantined_bytes,
            namespaces=stats.namespaces,
        )
        answer.uptime.FromNanoseconds(int((self._runtime.now() - self._ready_at) * 1e9))
        return answer

    def _session_status(self, session: OpenSession) -> admin_pb2.SessionStatus:
        status = admin_pb2.SessionStatus(
            client_name=session.client_name,
            engine_id=session.core.engine_id,
            rank=session.core.rank,
            pid=session.pid,
            transport=session.transport,
            model=session.model,
            attached=bool(session.attachments),
        )
        status.age.FromNanoseconds(int((self._runtime.now() - session.opened_at) * 1e9))
        return status
