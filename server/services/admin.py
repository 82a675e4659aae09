"""AdminService: the server at a glance, and what people have it do."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc

from ... import __version__
from ...protos.v1 import admin_pb2, admin_pb2_grpc
from ...tiers.fsck import NAMESPACE_BYTES
from ..fsck_online import OnlineFsck, Progress
from ..runtime import TierRuntime
from ..sessions import OpenSession, SessionRegistry

__all__ = ["AdminService"]


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
                    damaged_blocks=tier.damaged,
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

    async def Fsck(
        self, request: admin_pb2.FsckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[admin_pb2.FsckResponse]:
        run = self._fsck.run(request.tiers, repair=request.repair, rate=request.max_rate_bytes)
        async with contextlib.aclosing(run) as steps:
            async for progress in steps:
                yield _step_of(progress)

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


def _step_of(progress: Progress) -> admin_pb2.FsckResponse:
    return admin_pb2.FsckResponse(
        tier=progress.tier.name,
        tier_type=progress.tier.type,
        blocks=progress.blocks,
        checked_bytes=progress.nbytes,
        total_blocks=progress.total,
        findings=[
            admin_pb2.FsckFinding(
                namespace_id=finding.name[:NAMESPACE_BYTES],
                key=finding.name[NAMESPACE_BYTES:],
                size_bytes=finding.nbytes,
                problem=finding.problem,
                repaired=finding.repaired,
            )
            for finding in progress.findings
        ],
        done=progress.done,
        note=progress.note,
        error=progress.error,
    )
