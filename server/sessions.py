"""The sessions that are open, and who has the region mapped."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..protos.v1 import common_pb2, session_pb2
from ..tiers.answers import Session
from .errors import Refused
from .namespaces import namespace_spec
from .runtime import TierRuntime

__all__ = ["OpenSession", "SessionRegistry"]

PROTOCOL_VERSIONS = (1,)
_MAX_NAME_LENGTH = 512
_MAX_CONNECTIONS = 64
"""Connections for calls of one session: as many threads of it can call at once without going by gRPC."""
_MAX_SHOWN_GROUPS = 32
"""Engines have a handful; the status of a thousand sessions stays below what one message may be."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """One client process: what the core knows of it, and what people want to know."""

    core: Session
    ref: common_pb2.SessionRef
    opened_at: float
    client_name: str
    pid: int
    transport: str
    model: str
    groups: tuple[common_pb2.Group, ...] = ()
    """Of its namespace, as far as they are told to people: without their names, and none where there are very many."""
    attachments: set[int] = field(default_factory=set)
    hang_ups: set[Callable[[], object]] = field(default_factory=set)
    """What ends each of its connections for calls."""


class SessionRegistry:
    """Opens, finds and closes sessions. Lives on the event loop."""

    def __init__(self, runtime: TierRuntime, max_sessions: int) -> None:
        self.epoch = secrets.randbits(63) + 1
        self.drain_began = asyncio.Event()
        """Set when the server takes no new work any more."""
        self.ended = asyncio.Event()
        """Set when the server is about to end: the streams of all sessions end with it."""
        self.on_close: list[Callable[[bytes], None]] = []
        """Who is told of each session that has fallen, after the core."""
        self._runtime = runtime
        self._max_sessions = max_sessions
        self._sessions: dict[bytes, OpenSession] = {}

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self.drain_began.is_set()

    def all(self) -> list[OpenSession]:
        """Returns the open sessions."""
        return list(self._sessions.values())

    def open(self, request: session_pb2.OpenRequest) -> OpenSession:
        """Opens a session, or raises `Refused` or a `CoreError`."""
        self.refuse_if_draining()
        if request.protocol_version not in PROTOCOL_VERSIONS:
            spoken = ", ".join(map(str, PROTOCOL_VERSIONS))
            raise Refused("UNSUPPORTED_VERSION", f"this server speaks version {spoken}, not {request.protocol_version}")
        if len(self._sessions) >= self._max_sessions:
            raise Refused("LIMIT_EXCEEDED", f"{self._max_sessions} sessions are open already")
        if not request.engine_id:
            raise Refused("INVALID_ARGUMENT", "engine_id is missing")
        for name in ("engine_id", "client_name", "transport"):
            if len(getattr(request, name)) > _MAX_NAME_LENGTH:
                raise Refused("INVALID_ARGUMENT", f"{name} is longer than {_MAX_NAME_LENGTH} characters")
        rank = request.rank if request.HasField("rank") else None
        session_id = secrets.token_bytes(16)
        spec = namespace_spec(request.namespace)
        session = OpenSession(
            core=self._runtime.core.open_session(
                session_id, request.engine_id, rank, spec, tenant=request.namespace.tenant
            ),
            ref=common_pb2.SessionRef(session_id=session_id, epoch=self.epoch),
            opened_at=self._runtime.now(),
            client_name=request.client_name,
            pid=request.pid,
            transport=request.transport,
            model=request.namespace.model,
            groups=_shape(request.namespace.groups),
        )
        self._sessions[session_id] = session
        return session

    def close(self, session: OpenSession) -> None:
        """Lets a session fall; called when its stream has ended, whatever the reason."""
        del self._sessions[session.core.id]
        for hang_up in session.hang_ups:
            hang_up()
        self._runtime.core.close_session(session.core.id)
        for tell in self.on_close:
            tell(session.core.id)
        self._runtime.pump()
        self._runtime.notify()

    def get(self, ref: common_pb2.SessionRef) -> Session:
        """Returns the session that a call belongs to, or raises `Refused`."""
        session = self._sessions.get(ref.session_id)
        if session is not None and ref.epoch == self.epoch:
            return session.core
        if ref.epoch != self.epoch:
            raise Refused("STALE_EPOCH", "the session is of another life of this server; open a new one")
        raise Refused("UNKNOWN_SESSION", "there is no such session: it fell, or was never opened")

    def check(self, session: Session) -> None:
        """Raises `Refused` if a session has fallen while somebody waited on its behalf."""
        if session.id not in self._sessions:
            raise Refused("UNKNOWN_SESSION", "the session fell meanwhile")

    def set_transport(self, session: Session, transport: str) -> None:
        """Takes note of how a session's bytes move, for people and metrics."""
        self.check(session)
        self._sessions[session.id].transport = transport

    def attach(self, session_id: bytes, epoch: int, connection: int) -> bool:
        """Takes note that a connection maps the region for a session; returns whether there is such a session."""
        session = self._sessions.get(session_id)
        if session is None or epoch != self.epoch:
            return False
        session.attachments.add(connection)
        self._runtime.core.writer_attached(session_id, connection)
        return True

    def detach(self, session_id: bytes, connection: int) -> None:
        """Takes note that such a connection has ended."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.attachments.discard(connection)
        self._runtime.core.writer_gone(session_id, connection)
        self._runtime.pump()

    def connect(self, session_id: bytes, epoch: int, hang_up: Callable[[], object]) -> bool:
        """Takes note of a connection for calls, which `hang_up` ends; returns whether there is such a session, with room for it."""
        session = self._sessions.get(session_id)
        if session is None or epoch != self.epoch or len(session.hang_ups) >= _MAX_CONNECTIONS:
            return False
        session.hang_ups.add(hang_up)
        return True

    def disconnect(self, session_id: bytes, hang_up: Callable[[], object]) -> None:
        """Takes note that such a connection has ended."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.hang_ups.discard(hang_up)

    def refuse_if_draining(self) -> None:
        """Raises `Refused` while the server is shutting down."""
        if self.draining:
            raise Refused("DRAINING", "the server is shutting down")


def _shape(groups: Sequence[common_pb2.Group]) -> tuple[common_pb2.Group, ...]:
    if len(groups) > _MAX_SHOWN_GROUPS:
        return ()
    return tuple(
        common_pb2.Group(kind=group.kind, block_tokens=group.block_tokens, part_bytes=group.part_bytes)
        for group in groups
    )
