"""SessionService: capabilities of the server, and the stream that keeps a session open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from ... import __version__
from ...protos.durations import duration_of
from ...protos.v1 import session_pb2, session_pb2_grpc
from ..auth.roles import CALLER
from ..config.schema import Config
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.sessions import PROTOCOL_VERSIONS, SessionRegistry
from ..telemetry.logs import get_logger

__all__ = ["SessionService"]

_log = get_logger(__name__)


class SessionService(session_pb2_grpc.SessionServiceServicer):
    def __init__(
        self,
        config: Config,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        attach_path: Path,
        devices: session_pb2.Devices,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._sessions = sessions
        self._attach_path = attach_path
        self._devices = devices

    async def Capabilities(
        self, request: session_pb2.CapabilitiesRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.CapabilitiesResponse:
        limits = self._config.limits
        answer = session_pb2.CapabilitiesResponse(
            server_version=__version__,
            protocol_versions=PROTOCOL_VERSIONS,
            epoch=self._sessions.epoch,
            limits=session_pb2.Limits(
                max_keys=limits.max_keys,
                max_key_bytes=limits.max_key_bytes,
                max_part_bytes=self._runtime.extent_bytes,
                max_frame_bytes=limits.max_frame_bytes,
                max_wait=duration_of(limits.max_wait),
                max_lease=duration_of(self._config.leases.max),
            ),
            tiers=[tier.name for tier in self._runtime.core.stats().tiers],
            devices=self._devices,
        )
        caller = CALLER.get()
        if caller.shared_memory and self._sessions.pool_for(caller) is None:
            cause = f"clients of tenant {caller.tenant} use streams: it had no memory of its own at the start"
            remedy = "restart the server; docs/security.md#memory-of-a-tenant"
            self._runtime.downgrades.report("shared_memory", cause, remedy, subject=f"{caller.tenant}")
        elif caller.shared_memory:
            answer.region.attach_path = str(self._attach_path)
            answer.region.size_bytes = self._runtime.region.size_bytes
            answer.region.takes_calls = True
        return answer

    async def Open(
        self, request: session_pb2.OpenRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[session_pb2.OpenResponse]:
        session = self._sessions.open(request)
        session.peer = context.peer() or ""
        log = _log.bind(client=session.client_name, engine=session.core.engine_id, rank=session.core.rank)
        log.info("session opened", pid=session.pid, transport=session.transport, model=session.model)
        interval = self._config.sessions.heartbeat_interval
        namespace_id = session.core.namespace.id
        heartbeat = session_pb2.OpenResponse(
            session=session.ref, heartbeat_interval=duration_of(interval), namespace_id=namespace_id
        )
        whole = self._runtime.digests.all_of(namespace_id) if request.verify_all else contextlib.nullcontext()
        try:
            with whole:
                while not self._sessions.ended.is_set():
                    if session.revoked:
                        raise Refused("UNAUTHENTICATED", "the credentials of this session are not valid any more")
                    yield heartbeat
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._sessions.ended.wait(), interval)
                raise Refused("DRAINING", "the server is shutting down")
        finally:
            self._sessions.close(session)
            log.info("session closed", seconds=round(self._runtime.now() - session.opened_at, 3))
