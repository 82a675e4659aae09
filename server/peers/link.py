"""Sessions of this server at one other server, in which it searches and leases blocks.

All methods run on the event loop, and each blocks only its caller. A session belongs to a
namespace, so it reads only blocks of the tenant for which it was opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from ...client.effects import Call, Connect, Effect
from ...client.errors import KVTierError, LimitExceeded, ServerError, SessionLost, error_from_call
from ...client.operations.arguments import LookupOptions
from ...client.operations.loads import MAX_REPORTED
from ...client.operations.lookups import LookupOperations
from ...client.results import KeyStatus, LookupResult, TierFilter
from ...client.session.reconnect import PROTOCOL_VERSION
from ...client.session.session import ClientSession
from ...client.timeouts import Timeouts
from ...client.transport.aio_transport import AsyncServiceTransport, run_operation
from ...client.transport.grpc_methods import LOCATE, SERVICE_OPTIONS
from ...protos.credentials import Credentials
from ...protos.endpoint import Endpoint
from ...protos.v1 import cache_pb2, common_pb2, session_pb2, transfer_pb2
from ...tiers.secondary_tier import NamespaceId
from .pull import PeerStreams

__all__ = ["LEASE_SECONDS", "PeerLease", "PeerLink"]

LEASE_SECONDS = 60.0
"""Duration of a lease. This server releases it as soon as it has pulled the blocks."""
_IDLE_SECONDS = 60.0
"""A session ends after this time without a search."""
_LOCATE_SECONDS = 0.05
_HEARTBEAT_SECONDS = 0.1
"""Minimum time between two messages of a session that are read: a hostile server could send them
without end."""
_CALL_SECONDS = 5.0
"""Time limit of a call for which no search waits."""
_MAX_RELEASES = 256
"""Limit of the leases that are being released at a server that does not answer. Further ones end at
their time."""
_SESSION_ID_BYTES = 16
_MAX_SESSIONS = 128
"""Limit of the sessions of a link. Each one takes a stream of the connection, which has 256."""
_WAIT_PART = 0.8
"""Part of the time of a search that the other server may spend to promote the blocks."""
_ASKED_HERE = TierFilter(remote=True)
"""This server can ask shared tiers itself."""
_CHANNEL_OPTIONS = (
    *SERVICE_OPTIONS,
    ("grpc.max_receive_message_length", 1 << 20),  # a lookup's answer has up to 6 bytes per key
)


@dataclass(slots=True, eq=False)
class PeerLease:
    """Lease of located blocks at another server: for each key its position in the lease."""

    link: PeerLink
    sessions: _NamespaceSessions
    id: int
    items: dict[bytes, int]
    left: int = 0
    """Number of blocks that are neither pulled nor given up."""

    @property
    def streams(self) -> Sequence[PeerStreams]:
        """One object per rank."""
        return self.sessions.ranks


class _NamespaceSessions:
    """The sessions of all ranks in one namespace, and the transport of their lookups.

    All are of one engine, so they share leases.
    """

    def __init__(self, link: PeerLink, ranks: Sequence[PeerStreams], heartbeats: Sequence[Any]) -> None:
        self.ranks = ranks
        self.used_at = asyncio.get_running_loop().time()
        """Time of the last search."""
        self.operations = LookupOperations(Timeouts(call=LEASE_SECONDS), self)
        self._link = link
        self._heartbeats = heartbeats
        self._closed = False

    @property
    def has_ended(self) -> bool:
        return self._closed or any(stream.done() for stream in self._heartbeats)

    @property
    def session(self) -> ClientSession:
        return self.ranks[0].session

    async def perform(self, effect: Effect) -> Any:
        return self.session if isinstance(effect, Connect) else await self._link.transport.perform(effect)

    def invalidate(self, session: ClientSession) -> None:
        self.close()

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        request = cache_pb2.WithdrawGrantsRequest(session=session.ref, grant_ids=[grant_id])
        self._link.start(self, "CacheService/WithdrawGrants", request)

    def close(self) -> None:
        self._closed = True
        for stream in self._heartbeats:
            stream.cancel()
        for streams in self.ranks:
            streams.close()


class PeerLink:
    """The sessions of one tenant, and their connection."""

    def __init__(self, endpoint: Endpoint, credentials: Credentials, engine_id: str) -> None:
        """`engine_id`: id of this server as a client. Raises `InvalidRequest`."""
        self.name = str(endpoint)
        self.transport = AsyncServiceTransport(endpoint, credentials, _CHANNEL_OPTIONS)
        self._endpoint = endpoint
        self._credentials = credentials
        self._engine_id = engine_id
        self._opened: dict[NamespaceId, _NamespaceSessions] = {}
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases = 0

    async def search(
        self,
        namespace: NamespaceId,
        description: common_pb2.Namespace,
        keys: Sequence[bytes],
        *,
        prefix: bool,
        until: float,
    ) -> PeerLease | None:
        """Leases those of the blocks that the other server has; None if it has none.

        With `prefix` the search ends at the first block that it lacks. At the time `until` of the
        event loop, the caller ends the search by `asyncio.timeout_at`. Raises `KVTierError`, with a
        `reason` if the other server has answered, and refused the call.
        """
        try:
            return await self._search(namespace, description, keys, prefix=prefix, until=until)
        except SessionLost as error:
            if not error.reason:
                raise
        # The other server was restarted.
        return await self._search(namespace, description, keys, prefix=prefix, until=until)

    async def confirm(self, lease: PeerLease, damaged: Sequence[int]) -> bool:
        """Returns whether a lease is still valid, so that the pulled bytes can be used.

        Reports these items, whose bytes do not match their digests.
        """
        request = cache_pb2.CompleteLoadRequest(
            session=lease.sessions.session.ref, lease_id=lease.id, damaged_items=damaged[:MAX_REPORTED]
        )
        try:
            await self.transport.perform(Call("CacheService/CompleteLoad", request, _CALL_SECONDS))
        except KVTierError:
            return False
        return True

    def release(self, lease: PeerLease) -> None:
        """Starts to release a lease. If that fails, the lease ends with its session or its time."""
        self._release(lease.sessions, lease.id)

    def start(self, sessions: _NamespaceSessions, method: str, request: Message) -> None:
        """Starts a call that ends a lease, unless too many are running."""
        if not sessions.has_ended and self._releases < _MAX_RELEASES:
            self._releases += 1
            self._spawn(self._end_lease(method, request))

    def end_idle_sessions(self, now: float) -> bool:
        """Ends sessions that were not used for a minute; returns whether no session is left."""
        for namespace, sessions in list(self._opened.items()):
            if sessions.has_ended or now - sessions.used_at > _IDLE_SECONDS + LEASE_SECONDS:
                self._drop(namespace)
        return not self._opened

    async def close(self) -> None:
        """Ends all sessions, and so all leases and pulls."""
        for namespace in list(self._opened):
            self._drop(namespace)
        for task in self._tasks:
            task.cancel()
        await self.transport.close()

    async def _search(
        self,
        namespace: NamespaceId,
        description: common_pb2.Namespace,
        keys: Sequence[bytes],
        *,
        prefix: bool,
        until: float,
    ) -> PeerLease | None:
        sessions = await self._sessions_of(namespace, description)
        sessions.used_at = asyncio.get_running_loop().time()
        found = await self._look_up(namespace, sessions, keys, prefix=prefix, until=until)
        if len(found.statuses) != len(keys):
            raise ServerError(f"the answer has {len(found.statuses)} statuses for {len(keys)} keys")
        items = {
            key: item
            for item, (key, status) in enumerate(zip(keys, found.statuses, strict=True))
            if status == KeyStatus.HIT and (not prefix or item < found.prefix_hits)
        }
        if items:
            return PeerLease(self, sessions, found.id, items)
        if found.id:
            self._release(sessions, found.id)
        return None

    async def _look_up(
        self,
        namespace: NamespaceId,
        sessions: _NamespaceSessions,
        keys: Sequence[bytes],
        *,
        prefix: bool,
        until: float,
    ) -> LookupResult:
        """Raises `KVTierError`. Ends the sessions if the failure may be theirs."""
        wait = max(0.0, until - sessions.used_at) * _WAIT_PART
        options: LookupOptions = {"wait": wait, "prefix": prefix, "lease": LEASE_SECONDS, "exclude": _ASKED_HERE}
        lookup = sessions.operations.lookup(keys, options)
        try:
            return await run_operation(sessions, lookup)
        except KVTierError as error:
            # Another search may have replaced them.
            if (not error.reason or sessions.has_ended) and self._opened.get(namespace) is sessions:
                self._drop(namespace)
            raise
        except ValueError as error:
            raise ServerError(f"the answer is invalid: {error}") from error

    async def _sessions_of(self, namespace: NamespaceId, description: common_pb2.Namespace) -> _NamespaceSessions:
        """Returns the sessions in a namespace. Opens them once for all searches."""
        sessions = self._opened.get(namespace)
        if sessions is not None and not sessions.has_ended:
            return sessions
        async with self._opening:
            sessions = self._opened.get(namespace)
            if sessions is None or sessions.has_ended:
                self._drop(namespace)
                self._make_room(description.world_size)
                sessions = self._opened[namespace] = await self._open(description)
            return sessions

    def _make_room(self, ranks: int) -> None:
        """Ends the sessions of namespaces that were not used for the longest time.

        Raises `LimitExceeded` if one namespace needs too many.
        """
        if ranks > _MAX_SESSIONS:
            text = f"{ranks} ranks are too many; at most {_MAX_SESSIONS} can be loaded"
            raise LimitExceeded(text, "LIMIT_EXCEEDED")
        by_use = sorted(self._opened, key=lambda each: self._opened[each].used_at)
        used = sum(len(each.ranks) for each in self._opened.values())
        for namespace in by_use:
            if used + ranks <= _MAX_SESSIONS:
                return
            used -= len(self._opened[namespace].ranks)
            self._drop(namespace)

    async def _open(self, description: common_pb2.Namespace) -> _NamespaceSessions:
        """Opens one session per rank. Raises `KVTierError`."""
        refs: list[common_pb2.SessionRef] = []
        heartbeats: list[Any] = []
        try:
            for rank in range(description.world_size):
                request = session_pb2.OpenRequest(
                    protocol_version=PROTOCOL_VERSION,
                    client_name="kvtier server",
                    engine_id=self._engine_id,
                    rank=rank,
                    namespace=description,
                    pid=os.getpid(),
                    transport="tcp",
                )
                stream = self.transport.stream("SessionService/Open", request)
                heartbeats.append(stream)
                refs.append(await _session_of(stream))
                self._spawn(_read_heartbeats(stream))
            address = (self._endpoint.host, await self._socket_port(refs[0]))
        except BaseException:
            for stream in heartbeats:
                stream.cancel()
            raise
        name = self._credentials.tls_name(self._endpoint)
        ranks = [PeerStreams(address, ref, self._credentials, name) for ref in refs]
        return _NamespaceSessions(self, ranks, heartbeats)

    async def _socket_port(self, ref: common_pb2.SessionRef) -> int:
        """Returns the port of the other server's bulk process, which the first call starts."""
        while True:
            answer = await self.transport.perform(Call(LOCATE, transfer_pb2.LocateRequest(session=ref), LEASE_SECONDS))
            if answer.socket_port:
                port = int(answer.socket_port)
                if port >= 1 << 16:
                    raise ServerError(f"the other server names the port {port}")
                return port
            await asyncio.sleep(_LOCATE_SECONDS)

    def _release(self, sessions: _NamespaceSessions, lease_id: int) -> None:
        request = cache_pb2.ReleaseLeaseRequest(session=sessions.session.ref, lease_ids=[lease_id])
        self.start(sessions, "CacheService/ReleaseLease", request)

    async def _end_lease(self, method: str, request: Message) -> None:
        try:
            with contextlib.suppress(KVTierError):
                await self.transport.perform(Call(method, request, _CALL_SECONDS))
        finally:
            self._releases -= 1

    def _drop(self, namespace: NamespaceId) -> None:
        sessions = self._opened.pop(namespace, None)
        if sessions is not None:
            sessions.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _session_of(stream: Any) -> common_pb2.SessionRef:
    """Returns the session that a stream opens. Raises `KVTierError`."""
    try:
        first = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error) from None
    if not isinstance(first, session_pb2.OpenResponse):
        raise ServerError("the session ended at once")
    if len(first.session.session_id) != _SESSION_ID_BYTES:
        raise ServerError("the session has an invalid id")
    return first.session


async def _read_heartbeats(stream: Any) -> None:
    """Reads until the session ends. Otherwise the other server could no longer write heartbeats."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await stream.read():  # noqa: ASYNC110 - it waits for messages; `grpc.aio.EOF` is false
            await asyncio.sleep(_HEARTBEAT_SECONDS)
