"""Registry of open sessions and their connections, and conversion of namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...protos.v1 import common_pb2, session_pb2
from ...tiers.secondary_tier import NamespaceId
from ...tiers.stats.tenant_records import RecordsByTenant
from ...tiers.types import NAMESPACE_BYTES, TENANT_TAG_BYTES, EngineSession, NamespaceSpec, tenant_of
from ..auth.rate_limits import RateLimiter, RateLimiters
from ..auth.roles import CALLER, OWNER, Identity
from ..config.machine import max_descriptors
from ..config.schema import RateConfig
from ..config.tenants import tenant_tag
from ..core_runtime import TierRuntime
from ..refused import Refused

__all__ = ["OpenSession", "SessionRegistry", "namespace_spec"]

PROTOCOL_VERSIONS = (2,)
_MAX_CONNECTIONS = 64
"""Maximum number of call connections that one session may have. Each carries one call at a time.

Also the maximum number of streams Push and Pull over gRPC that one session may have.
"""
_MAX_ALL_CONNECTIONS = 4096
"""Maximum number of such connections of all sessions; at most a quarter of the descriptors. A
tenant gets as many as are then free. So a further tenant always finds some."""
_MAX_MODELS = 1024
_MAX_MODEL_LENGTH = 128
_MAX_SHOWN_GROUPS = 32
"""Maximum number of groups per session in the status; engines have only a few groups.

With this limit, the status of a thousand sessions is smaller than the largest gRPC message.
"""
_NAMESPACE_FORMAT = b"kvtier.namespace.3"


@dataclass(slots=True, eq=False)
class OpenSession:
    """State of one client process."""

    core: EngineSession
    ref: common_pb2.SessionRef
    opened_at: float
    client_name: str
    pid: int
    transport: str
    """Transport of the last transfer; before that, the transport given in `OpenRequest`."""
    model: str
    engine_address: str = ""
    """Address at which routers reach the engine; empty if the session is not published."""
    served_model: str = ""
    groups: tuple[common_pb2.Group, ...] = ()
    """The namespace's groups without names, for the status. Empty if there are too many groups."""
    attachments: set[int] = field(default_factory=set)
    disconnects: set[Callable[[], object]] = field(default_factory=set)
    """Callbacks that close the session's connections for calls."""
    streams: int = 0
    """Number of running streams over gRPC."""
    calls: int = 0
    heard_at: float = 0.0
    """Time of the last call in seconds; 0 before the first call."""
    identity: Identity = OWNER
    """Caller that opened the session."""
    limiter: RateLimiter | None = None
    namespace: common_pb2.Namespace = field(default_factory=common_pb2.Namespace)
    """The namespace as the client described it, with the tenant of the caller."""
    peer: str = ""
    """Connection of the heartbeat stream, as gRPC names it."""
    revoked: bool = False
    """Whether the caller's credentials have become invalid. Then the server refuses all calls."""


class SessionRegistry:
    """Registry of the open sessions. All calls must come from the event loop."""

    def __init__(self, runtime: TierRuntime, max_sessions: int, limiters: RateLimiters | None = None) -> None:
        self.epoch = secrets.randbits(63) + 1
        self.drain_began = asyncio.Event()
        """Set while the server refuses new work."""
        self.ended = asyncio.Event()
        """Set when the server is about to end. Then the heartbeat streams end."""
        self.on_close: list[Callable[[bytes], None]] = []
        """Callbacks that get the id of an ended session after the core has closed the session."""
        self.on_revoke: list[Callable[[bytes], None]] = []
        """Callbacks that get the id of a session whose credentials have become invalid."""
        self._runtime = runtime
        self.limit = max_sessions
        self.opened = 0
        """Number of sessions opened since the start of the server."""
        self._models = RecordsByTenant[NamespaceId, str](_MAX_MODELS)
        """Model names of namespaces, for the status."""
        self._limiters = limiters or RateLimiters(RateConfig(), {})
        self._sessions: dict[bytes, OpenSession] = {}
        self._tenants: Counter[str | None] = Counter()
        """Number of sessions per tenant of callers with credentials; None: of callers without."""
        self._max_connections = min(_MAX_ALL_CONNECTIONS, max_descriptors() // 4)
        self._connections: Counter[str] = Counter()
        """Number of connections for calls and for the region per tenant."""
        self._attached: dict[int, str] = {}
        """Tenant of each connection for the region. These can outlive their session."""

    @property
    def draining(self) -> bool:
        """Whether the server refuses new work because of a drain or a shutdown."""
        return self.drain_began.is_set()

    def all(self) -> list[OpenSession]:
        return list(self._sessions.values())

    def open(self, request: session_pb2.OpenRequest) -> OpenSession:
        """Opens a session. Raises `Refused` or a `CoreError`."""
        self.refuse_if_draining()
        if request.protocol_version not in PROTOCOL_VERSIONS:
            spoken = ", ".join(map(str, PROTOCOL_VERSIONS))
            raise Refused(
                "UNSUPPORTED_VERSION",
                f"this server supports protocol version {spoken}, not {request.protocol_version}",
            )
        if len(self._sessions) >= self.limit:
            raise Refused("LIMIT_EXCEEDED", f"{self.limit} sessions are open already")
        if not request.engine_id:
            raise Refused("INVALID_ARGUMENT", "engine_id is missing")
        rank = request.rank if request.HasField("rank") else None
        caller = CALLER.get()
        _apply_tenant(request.namespace, caller)
        # Another server's token is for all tenants. Its sessions count for the tenant they name.
        counted = None if caller is OWNER else request.namespace.tenant
        if counted is not None and self._tenants[counted] > self.limit - len(self._sessions):
            raise Refused("LIMIT_EXCEEDED", f"tenant {counted!r} has more sessions than are free for others")
        session_id = secrets.token_bytes(16)
        spec = namespace_spec(request.namespace)
        limiter = self._limiters.for_tenant(request.namespace.tenant)
        if limiter is not None:
            limiter.open_session()
        try:
            core = self._runtime.core.open_session(
                session_id, request.engine_id, rank, spec, tenant=request.namespace.tenant
            )
        except BaseException:
            if limiter is not None:
                limiter.close_session()
            raise
        core.unmapped_from = 0
        session = OpenSession(
            core=core,
            ref=common_pb2.SessionRef(session_id=session_id, epoch=self.epoch),
            opened_at=self._runtime.now(),
            client_name=request.client_name,
            pid=request.pid,
            transport=request.transport,
            model=request.namespace.model,
            engine_address=request.engine_address,
            served_model=request.served_model,
            groups=_without_names(request.namespace.groups),
            identity=caller,
            limiter=limiter,
            namespace=request.namespace,
        )
        self._sessions[session_id] = session
        self._tenants[counted] += 1
        self.opened += 1
        self._models.put(tenant_of(spec.id), {spec.id: session.model[:_MAX_MODEL_LENGTH]})
        return session

    def models(self) -> dict[NamespaceId, str]:
        """Returns the model names of known namespaces."""
        return {name: model for tenant in self._models.tenants() for name, model in self._models.of(tenant).items()}

    def close(self, session: OpenSession) -> None:
        """Closes a session whose heartbeat stream has ended."""
        del self._sessions[session.core.id]
        counted = None if session.identity is OWNER else session.namespace.tenant
        self._tenants[counted] -= 1
        if not self._tenants[counted]:
            del self._tenants[counted]
        if session.limiter is not None:
            session.limiter.close_session()
        for disconnect in session.disconnects:
            disconnect()
        if session.disconnects:
            self._drop_connections(session.core.tenant, len(session.disconnects))
        self._runtime.core.close_session(session.core.id)
        for tell in self.on_close:
            tell(session.core.id)
        self._runtime.run_commands()
        self._runtime.notify_change()

    def get(self, ref: common_pb2.SessionRef, *, is_release: bool = False) -> EngineSession:
        """Returns the session of a call and counts the call. Raises `Refused`.

        `is_release`: the call releases slots or pins. Such calls may exceed the rate limit.
        """
        session = self.find(ref)
        self.count_call(session, is_release=is_release)
        return session.core

    def count_call(self, session: OpenSession, *, is_release: bool = False) -> None:
        """Counts a call of a session. Raises `Refused` if the tenant exceeds its rate limit."""
        session.calls += 1
        session.heard_at = self._runtime.called_at = self._runtime.now()
        if session.limiter is not None:
            session.limiter.count_call(is_release=is_release)

    def count_call_without_session(self, tenant: str) -> None:
        """Counts a call about a tenant's blocks. Raises `Refused` above the tenant's rate limit."""
        limiter = self._limiters.for_tenant(tenant)
        if limiter is not None:
            limiter.count_call()

    def tenant_of(self, session_id: bytes) -> str | None:
        """Returns the tenant of an open session; None if there is no such session."""
        session = self._sessions.get(session_id)
        return None if session is None else session.core.tenant

    def check_rate(self, session_id: bytes) -> None:
        """Raises `Refused` if the tenant of a session exceeds its rate limit. Counts no call."""
        session = self._sessions.get(session_id)
        if session is not None and session.limiter is not None:
            session.limiter.check_call()

    def find(self, ref: common_pb2.SessionRef, caller: Identity | None = None) -> OpenSession:
        """Returns a session. Raises `Refused` if it is unknown or not usable by the caller."""
        session = self._sessions.get(ref.session_id)
        if ref.epoch != self.epoch:
            raise Refused("STALE_EPOCH", "the session belongs to an earlier run of this server; open a new one")
        is_foreign = session is not None and (caller or CALLER.get()).tenant not in (None, session.core.tenant)
        if session is None or is_foreign:
            # A caller must not learn which sessions other tenants have.
            raise Refused(
                "UNKNOWN_SESSION",
                "there is no session with this id: it has ended, or was never opened",
                audit_reason="WRONG_TENANT" if is_foreign else "",
            )
        if session.revoked:
            raise Refused("UNKNOWN_SESSION", "the credentials of the session are no longer valid")
        return session

    def check(self, session: EngineSession) -> None:
        """Raises `Refused` if the session has ended during a wait."""
        if session.id not in self._sessions:
            raise Refused("UNKNOWN_SESSION", "the session ended while the call was waiting")

    def namespace_of(self, session: EngineSession) -> common_pb2.Namespace:
        """Returns the description of a session's namespace. Raises `Refused` if it has ended."""
        self.check(session)
        return self._sessions[session.id].namespace

    def name_of(self, session_id: bytes) -> str:
        """Returns the name of the caller that opened a session, for the log."""
        session = self._sessions.get(session_id)
        return session.identity.name if session is not None else "unknown"

    @contextlib.contextmanager
    def stream(self, session: EngineSession) -> Iterator[RateLimiter | None]:
        """Counts a stream over gRPC while it runs; yields the tenant's rate limiter.

        Raises `Refused` if the session has too many streams, or its tenant has used up its bytes.
        """
        self.check(session)
        known = self._sessions[session.id]
        if known.streams >= _MAX_CONNECTIONS:
            raise Refused("LIMIT_EXCEEDED", f"the session has {_MAX_CONNECTIONS} streams over gRPC")
        if known.limiter is not None:
            known.limiter.check_stream()
        known.transport = "grpc"
        known.streams += 1
        try:
            yield known.limiter
        finally:
            known.streams -= 1

    def revoke(self, is_still_valid: Callable[[Identity], bool]) -> None:
        """Revokes the sessions whose credentials are no longer valid, and refuses their calls.

        To end only the heartbeat streams would not be enough, because a client that does not read
        its heartbeats would continue to call.
        """
        for session in self._sessions.values():
            if session.identity is not OWNER and not session.revoked and not is_still_valid(session.identity):
                session.revoked = True
                for disconnect in session.disconnects:
                    disconnect()
                for tell in self.on_revoke:
                    tell(session.core.id)

    def set_transport(self, session: EngineSession, transport: str) -> None:
        self.check(session)
        self._sessions[session.id].transport = transport

    def pool_for(self, caller: Identity, tenant: str | None = None) -> int | None:
        """Returns the memory pool that a caller may map; None if it may map none.

        `tenant`: that of its session; default: the only one that its credentials permit.
        """
        named = caller.tenant if tenant is None else tenant
        pool = 0 if named is None else self._runtime.core.pool_of(NamespaceId(tenant_tag(named)))
        return pool if caller.shared_memory and (pool or caller.tenant is None) else None

    def attach(self, session_id: bytes, epoch: int, connection: int) -> int | None:
        """Records that a connection maps a memory pool for a session. Returns the pool's number.

        Returns None if the session must not map it. Raises `Refused` if there are too many.
        """
        session = self._find_valid(session_id, epoch)
        pool = None if session is None else self.pool_for(session.identity, session.core.tenant)
        if session is None or pool is None:
            return None
        if len(session.attachments) >= _MAX_CONNECTIONS:
            raise Refused("LIMIT_EXCEEDED", f"the session has {_MAX_CONNECTIONS} connections for the region")
        self._attached[connection] = self._take_connection(session.core.tenant)
        session.attachments.add(connection)
        session.core.unmapped_from = math.inf
        self._runtime.core.writer_attached(session_id, connection)
        return pool

    def detach(self, session_id: bytes, connection: int) -> None:
        """Records the end of a connection that maps the region."""
        tenant = self._attached.pop(connection, None)
        if tenant is not None:
            self._drop_connections(tenant, 1)
        session = self._sessions.get(session_id)
        if session is not None:
            session.attachments.discard(connection)
            if not session.attachments:
                self._runtime.core.region_unmapped(session.core)
        self._runtime.core.writer_gone(session_id, connection)
        self._runtime.run_commands()

    def connect(
        self, session_id: bytes, epoch: int, disconnect: Callable[[], object], *, via_tcp: bool = False
    ) -> Identity:
        """Records a connection for calls; returns the session's opener. Raises `Refused`."""
        session = self._find_valid(session_id, epoch)
        if session is None:
            raise Refused("UNKNOWN_SESSION", "the session has ended, or belongs to another run of the server")
        if len(session.disconnects) >= _MAX_CONNECTIONS:
            raise Refused("LIMIT_EXCEEDED", f"the session has {_MAX_CONNECTIONS} connections for calls")
        self._take_connection(session.core.tenant)
        session.disconnects.add(disconnect)
        if via_tcp:
            session.transport = "tcp"  # a client that calls over TCP also streams over TCP
        return session.identity

    def disconnect(self, session_id: bytes, disconnect: Callable[[], object]) -> None:
        """Records the end of a connection for calls."""
        session = self._sessions.get(session_id)
        if session is not None and disconnect in session.disconnects:
            session.disconnects.discard(disconnect)
            self._drop_connections(session.core.tenant, 1)

    def _take_connection(self, tenant: str) -> str:
        """Counts a connection; returns its tenant. Raises `Refused` if there are too many."""
        if self._connections[tenant] >= self._max_connections - self._connections.total():
            raise Refused(
                "LIMIT_EXCEEDED", "the tenant or the server has too many connections for calls and the region"
            )
        self._connections[tenant] += 1
        return tenant

    def _drop_connections(self, tenant: str, number: int) -> None:
        self._connections[tenant] -= number
        if not self._connections[tenant]:
            del self._connections[tenant]

    def _find_valid(self, session_id: bytes, epoch: int) -> OpenSession | None:
        session = self._sessions.get(session_id)
        return None if session is None or epoch != self.epoch or session.revoked else session

    def refuse_if_draining(self) -> None:
        if self.drain_began.is_set():
            raise Refused("DRAINING", "the server refuses new work because it is shutting down or drained")


def namespace_spec(namespace: common_pb2.Namespace) -> NamespaceSpec:
    """Converts a namespace for the core. The id is the tenant's tag and a digest of all fields.

    The id is part of the keys on disk. Therefore the digest does not use protobuf's serialization,
    which can change between versions. Raises `InvalidNamespace` if the fields contradict each
    other.
    """
    fields: list[str] = [
        namespace.model,
        namespace.revision,
        namespace.dtype,
        namespace.layout,
        namespace.hash_scheme,
        str(namespace.world_size),
        namespace.tenant,
        str(len(namespace.groups)),
    ]
    for group in namespace.groups:
        fields += [group.name, str(int(group.kind)), str(group.block_tokens), str(group.part_bytes)]
    for name, value in sorted(namespace.attributes.items()):
        fields += [name, value]
    digest = hashlib.blake2b(digest_size=NAMESPACE_BYTES - TENANT_TAG_BYTES, person=b"kvtier")
    digest.update(_NAMESPACE_FORMAT)
    for text in fields:
        raw = text.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return NamespaceSpec(
        id=NamespaceId(tenant_tag(namespace.tenant) + digest.digest()),
        world_size=namespace.world_size,
        part_bytes=tuple(group.part_bytes for group in namespace.groups),
    )


def _apply_tenant(namespace: common_pb2.Namespace, caller: Identity) -> None:
    """Sets the caller's tenant if the namespace has none. Raises `Refused` for another tenant."""
    if caller.tenant is None:
        return
    if namespace.tenant not in ("", caller.tenant):
        text = f"the credentials of {caller.name} belong to tenant {caller.tenant!r}, not {namespace.tenant!r}"
        raise Refused("WRONG_TENANT", text)
    namespace.tenant = caller.tenant


def _without_names(groups: Sequence[common_pb2.Group]) -> tuple[common_pb2.Group, ...]:
    if len(groups) > _MAX_SHOWN_GROUPS:
        return ()
    return tuple(
        common_pb2.Group(kind=group.kind, block_tokens=group.block_tokens, part_bytes=group.part_bytes)
        for group in groups
    )
