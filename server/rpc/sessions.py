"""The sessions that are open, and who has the region mapped."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...protos.v1 import common_pb2, session_pb2
from ...tiers.base import NamespaceId
from ...tiers.types import EngineSession
from ..auth.rate_limits import RateLimiter, RateLimiters
from ..auth.roles import CALLER, OWNER, Identity
from ..config.schema import RateConfig
from ..refused import Refused
from ..runtime import TierRuntime
from .namespaces import namespace_spec

__all__ = ["OpenSession", "SessionRegistry"]

PROTOCOL_VERSIONS = (1,)
_MAX_NAME_LENGTH = 512
_MAX_CONNECTIONS = 64
"""Connections for calls of one session: as many threads of it can call at once without going by gRPC."""
_MAX_MODELS = 1024
_MAX_MODEL_LENGTH = 128
_MAX_SHOWN_GROUPS = 32
"""Engines have a handful; the status of a thousand sessions stays below what one message may be."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """One client process: what the core knows of it, and what people want to know."""

    core: EngineSession
    ref: common_pb2.SessionRef
    opened_at: float
    client_name: str
    pid: int
    transport: str
    """How its bytes have moved the last time, as far as the server has a hand in it; until then what it said when it opened."""
    model: str
    groups: tuple[common_pb2.Group, ...] = ()
    """Of its namespace, as far as they are told to people: without their names, and none where there are very many."""
    attachments: set[int] = field(default_factory=set)
    hang_ups: set[Callable[[], object]] = field(default_factory=set)
    """What ends each of its connections for calls."""
    calls: int = 0
    heard_at: float = 0.0
    """When its last call came, in seconds; meaningless before the first."""
    identity: Identity = OWNER
    """Who opened it."""
    meter: RateLimiter | None = None
    """What its tenant may ask for, where that has a bound."""
    revoked: bool = False
    """Whether that one's credentials are not valid any more: nothing is done for it, and it ends with its next heartbeat."""


class SessionRegistry:
    """Opens, finds and closes sessions. Lives on the event loop."""

    def __init__(self, runtime: TierRuntime, max_sessions: int, meters: RateLimiters | None = None) -> None:
        self.epoch = secrets.randbits(63) + 1
        self.drain_began = asyncio.Event()
        """Set when the server takes no new work any more."""
        self.ended = asyncio.Event()
        """Set when the server is about to end: the streams of all sessions end with it."""
        self.on_close: list[Callable[[bytes], None]] = []
        """Who is told of each session that has fallen, after the core."""
        self._runtime = runtime
        self.limit = max_sessions
        """The most that may be open."""
        self.opened = 0
        """Sessions that were opened since start."""
        self.models: dict[NamespaceId, str] = {}
        """Models of the namespaces that came last, for people."""
        self._meters = meters or RateLimiters(RateConfig(), {})
        self._sessions: dict[bytes, OpenSession] = {}

    @property
    def draining(self) -> bool:
        """Whether the server takes no new work: it is shutting down, or drained."""
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
        if len(self._sessions) >= self.limit:
            raise Refused("LIMIT_EXCEEDED", f"{self.limit} sessions are open already")
        if not request.engine_id:
            raise Refused("INVALID_ARGUMENT", "engine_id is missing")
        for name in ("engine_id", "client_name", "transport"):
            if len(getattr(request, name)) > _MAX_NAME_LENGTH:
                raise Refused("INVALID_ARGUMENT", f"{name} is longer than {_MAX_NAME_LENGTH} characters")
        rank = request.rank if request.HasField("rank") else None
        caller = CALLER.get()
        _settle_tenant(request.namespace, caller)
        session_id = secrets.token_bytes(16)
        spec = namespace_spec(request.namespace)
        meter = self._meters.of(request.namespace.tenant)
        if meter is not None:
            meter.opens()
        try:
            core = self._runtime.core.open_session(
                session_id, request.engine_id, rank, spec, tenant=request.namespace.tenant
            )
        except BaseException:
            if meter is not None:
                meter.closes()
            raise
        session = OpenSession(
            core=core,
            ref=common_pb2.SessionRef(session_id=session_id, epoch=self.epoch),
            opened_at=self._runtime.now(),
            client_name=request.client_name,
            pid=request.pid,
            transport=request.transport,
            model=request.namespace.model,
            groups=_shape(request.namespace.groups),
            identity=caller,
            meter=meter,
        )
        self._sessions[session_id] = session
        self.opened += 1
        self._note_model(spec.id, session.model)
        return session

    def _note_model(self, namespace: NamespaceId, model: str) -> None:
        self.models.pop(namespace, None)
        self.models[namespace] = model[:_MAX_MODEL_LENGTH]
        if len(self.models) > _MAX_MODELS:
            del self.models[next(iter(self.models))]

    def close(self, session: OpenSession) -> None:
        """Lets a session fall; called when its stream has ended, whatever the reason."""
        del self._sessions[session.core.id]
        if session.meter is not None:
            session.meter.closes()
        for hang_up in session.hang_ups:
            hang_up()
        self._runtime.core.close_session(session.core.id)
        for tell in self.on_close:
            tell(session.core.id)
        self._runtime.pump()
        self._runtime.notify()

    def get(self, ref: common_pb2.SessionRef, *, gives_back: bool = False) -> EngineSession:
        """Returns the session that a call belongs to, and counts the call; or raises `Refused`.

        A call that `gives_back` slots or pins is let through where others have to wait: nobody else would give them back.
        """
        session = self.find(ref)
        self.heard(session, gives_back=gives_back)
        return session.core

    def heard(self, session: OpenSession, *, gives_back: bool = False) -> None:
        """Counts a call of a session, or raises `Refused` where its tenant has had its share of them."""
        session.calls += 1
        session.heard_at = self._runtime.now()
        if session.meter is not None:
            session.meter.call(gives_back=gives_back)

    def find(self, ref: common_pb2.SessionRef) -> OpenSession:
        """Returns a session that whoever calls may use, or raises `Refused`. Its id is as good as a password: nobody guesses it."""
        session = self._sessions.get(ref.session_id)
        if session is not None and ref.epoch == self.epoch:
            if CALLER.get().tenant not in (None, session.core.tenant):
                raise Refused("WRONG_TENANT", "the session is another tenant's")
            if session.revoked:
                raise Refused("UNKNOWN_SESSION", "the credentials of the session are not valid any more")
            return session
        if ref.epoch != self.epoch:
            raise Refused("STALE_EPOCH", "the session is of another life of this server; open a new one")
        raise Refused("UNKNOWN_SESSION", "there is no such session: it fell, or was never opened")

    def check(self, session: EngineSession) -> None:
        """Raises `Refused` if a session has fallen while somebody waited on its behalf."""
        if session.id not in self._sessions:
            raise Refused("UNKNOWN_SESSION", "the session fell meanwhile")

    def name_of(self, session_id: bytes) -> str:
        """Returns who has opened a session, for the log."""
        session = self._sessions.get(session_id)
        return session.identity.name if session is not None else "unknown"

    def meter(self, session: EngineSession) -> RateLimiter | None:
        """Returns what a session's tenant may ask for, where that has a bound and the session is still open."""
        known = self._sessions.get(session.id)
        return known.meter if known is not None else None

    def revoke(self, still: Callable[[Identity], bool]) -> None:
        """Lets the sessions fall whose caller is not known any more.

        Not by their streams alone: a client that does not read its heartbeats is not told, and must not go on for that.
        """
        for session in self._sessions.values():
            if session.identity is not OWNER and not session.revoked and not still(session.identity):
                session.revoked = True
                for hang_up in session.hang_ups:
                    hang_up()

    def set_transport(self, session: EngineSession, transport: str) -> None:
        """Takes note of how a session's bytes move, for people and metrics."""
        self.check(session)
        self._sessions[session.id].transport = transport

    def attach(self, session_id: bytes, epoch: int, connection: int) -> bool:
        """Takes note that a connection maps the region for a session; returns whether there is such a session."""
        session = self._standing(session_id, epoch)
        if session is None or not session.identity.shared_memory:
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

    def connect(
        self, session_id: bytes, epoch: int, hang_up: Callable[[], object], *, plain: bool = False
    ) -> Identity | None:
        """Takes note of a connection for calls, which `hang_up` ends; `plain` if it came to the port for plain sockets.

        Returns who opened the session; None if there is none such, or no room for the connection.
        """
        session = self._standing(session_id, epoch)
        if session is None or len(session.hang_ups) >= _MAX_CONNECTIONS:
            return None
        session.hang_ups.add(hang_up)
        if plain:
            session.transport = "tcp"  # streams go there as well: both ways are found together
        return session.identity

    def disconnect(self, session_id: bytes, hang_up: Callable[[], object]) -> None:
        """Takes note that such a connection has ended."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.hang_ups.discard(hang_up)

    def _standing(self, session_id: bytes, epoch: int) -> OpenSession | None:
        session = self._sessions.get(session_id)
        return None if session is None or epoch != self.epoch or session.revoked else session

    def refuse_if_draining(self) -> None:
        """Raises `Refused` while the server takes no new work: it is shutting down, or drained."""
        if self.draining:
            raise Refused("DRAINING", "the server is shutting down, or drained: it takes no new work")


def _settle_tenant(namespace: common_pb2.Namespace, caller: Identity) -> None:
    """Makes the namespace the caller's tenant's. Raises Refused if it says that it is another's."""
    if caller.tenant is None:
        return
    if namespace.tenant not in ("", caller.tenant):
        text = f"the credentials of {caller.name} are of tenant {caller.tenant!r}, not {namespace.tenant!r}"
        raise Refused("WRONG_TENANT", text)
    namespace.tenant = caller.tenant


def _shape(groups: Sequence[common_pb2.Group]) -> tuple[common_pb2.Group, ...]:
    if len(groups) > _MAX_SHOWN_GROUPS:
        return ()
    return tuple(
        common_pb2.Group(kind=group.kind, block_tokens=group.block_tokens, part_bytes=group.part_bytes)
        for group in groups
    )
