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
from google.protobuf.duration_pb2 import Duration

from ...protos.credentials import Credentials
from ...protos.endpoint import Endpoint
from ...protos.error_reasons import reason_of
from ...protos.v1 import cache_pb2, cache_pb2_grpc, common_pb2, session_pb2, session_pb2_grpc, transfer_pb2
from ...tiers.base import NamespaceId
from ...tiers.types import KeyStatus
from .pull import PullConnections

__all__ = ["LEASE_SECONDS", "PeerError", "PeerLease", "PeerLink"]

LEASE_SECONDS = 60.0
"""Duration of a lease. This server releases it as soon as it has pulled the blocks."""
_IDLE_SECONDS = 60.0
"""A session ends after this time without a search."""
_LOCATE_SECONDS = 0.05
_HEARTBEAT_SECONDS = 0.1
"""Minimum time between two messages of a session that are read: a hostile server could send them
without end."""
_RELEASE_SECONDS = 5.0
_MAX_RELEASES = 256
"""Limit of the leases that are being released at a server that does not answer. Further ones end at
their time."""
_SESSION_ID_BYTES = 16
_MAX_SESSIONS = 128
"""Limit of the sessions of a link. Each one takes a stream of the connection, which has 256."""
_WAIT_PART = 0.8
"""Part of the time of a search that the other server may spend to promote the blocks."""
_SESSION_LOST = ("UNKNOWN_SESSION", "STALE_EPOCH")
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # tenants must not share a connection and its streams
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 1 << 20),  # a lookup's answer has up to 6 bytes per key
)


class PeerError(Exception):
    """A search failed. `refused`: the other server has answered, and refused the call."""

    def __init__(self, text: str, *, refused: bool) -> None:
        super().__init__(text)
        self.refused = refused


@dataclass(slots=True, eq=False)
class PeerLease:
    """Lease of located blocks at another server: for each key its position in the lease."""

    link: PeerLink
    sessions: _Sessions
    id: int
    items: dict[bytes, int]
    left: int = 0
    """Number of blocks that are neither pulled nor given up."""

    @property
    def connections(self) -> Sequence[PullConnections]:
        """One object per rank."""
        return self.sessions.connections


@dataclass(slots=True, eq=False)
class _Sessions:
    """The sessions of all ranks in one namespace. `used_at` is the time of the last search."""

    refs: list[common_pb2.SessionRef]
    streams: list[Any]
    connections: list[PullConnections]
    used_at: float

    @property
    def has_ended(self) -> bool:
        return any(stream.done() for stream in self.streams)

    def close(self) -> None:
        for stream in self.streams:
            stream.cancel()
        for connections in self.connections:
            connections.close()


class PeerLink:
    """The sessions of one tenant, and their connection."""

    def __init__(self, endpoint: Endpoint, credentials: Credentials, engine_id: str) -> None:
        """`engine_id`: id of this server as a client. Raises CredentialsError."""
        self.name = str(endpoint)
        self._endpoint = endpoint
        self._credentials = credentials
        self._engine_id = engine_id
        self._channel = credentials.aio_channel(endpoint, _CHANNEL_OPTIONS)
        self._session = session_pb2_grpc.SessionServiceStub(self._channel)
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channel)
        self._locate = self._channel.unary_unary(
            "/kvtier.v1.TransferService/Locate",
            transfer_pb2.LocateRequest.SerializeToString,
            transfer_pb2.LocateResponse.FromString,
        )
        self._opened: dict[NamespaceId, _Sessions] = {}
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

        With `prefix` the search ends at the first block that it lacks. Raises PeerError. At the
        time `until` of the event loop, the caller ends the search by `asyncio.timeout_at`.
        """
        try:
            try:
                return await self._search(namespace, description, keys, prefix=prefix, until=until)
            except grpc.aio.AioRpcError as error:
                if reason_of(error.trailing_metadata()) not in _SESSION_LOST:
                    raise
            # The other server was restarted.
            return await self._search(namespace, description, keys, prefix=prefix, until=until)
        except grpc.aio.AioRpcError as error:
            reason = reason_of(error.trailing_metadata())
            raise PeerError(f"{reason or error.code().name}: {error.details()}", refused=reason is not None) from None

    async def confirm(self, lease: PeerLease) -> bool:
        """Returns whether a lease is still valid, so that the pulled bytes can be used."""
        request = cache_pb2.CompleteLoadRequest(session=lease.sessions.refs[0], lease_id=lease.id)
        try:
            await self._cache.CompleteLoad(request)
        except grpc.aio.AioRpcError:
            return False
        return True

    def release(self, lease: PeerLease) -> None:
        """Starts to release a lease. If that fails, the lease ends with its session or its time."""
        self._start_release(lease.sessions, lease.id)

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
        await self._channel.close()

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
        request = cache_pb2.LookupRequest(
            session=sessions.refs[0],
            mode=cache_pb2.LOOKUP_MODE_PREFIX if prefix else cache_pb2.LOOKUP_MODE_EACH,
            lease_duration=_duration(LEASE_SECONDS),
            wait=_duration(max(0.0, until - sessions.used_at) * _WAIT_PART),
            exclude=cache_pb2.TierFilter(remote=True),  # this server can ask shared tiers itself
        )
        if len({len(key) for key in keys}) == 1:
            request.packed_keys.keys, request.packed_keys.key_bytes = b"".join(keys), len(keys[0])
        else:
            request.keys.extend(keys)
        try:
            answer = await self._cache.Lookup(request)
        except grpc.aio.AioRpcError as error:
            is_lost = reason_of(error.trailing_metadata()) in (None, *_SESSION_LOST)
            # Another search may have replaced them.
            if is_lost and self._opened.get(namespace) is sessions:
                self._drop(namespace)
            raise
        if len(answer.statuses) != len(keys):
            raise PeerError(f"the answer has {len(answer.statuses)} statuses for {len(keys)} keys", refused=False)
        items = {
            key: item
            for item, (key, status) in enumerate(zip(keys, answer.statuses, strict=True))
            if status == KeyStatus.HIT and (not prefix or item < answer.prefix_hits)
        }
        if items:
            return PeerLease(self, sessions, answer.lease_id, items)
        if answer.lease_id:
            self._start_release(sessions, answer.lease_id)
        return None

    async def _sessions_of(self, namespace: NamespaceId, description: common_pb2.Namespace) -> _Sessions:
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

        Raises PeerError if one namespace needs too many.
        """
        if ranks > _MAX_SESSIONS:
            raise PeerError(f"{ranks} ranks are too many; at most {_MAX_SESSIONS} can be loaded", refused=True)
        by_use = sorted(self._opened, key=lambda each: self._opened[each].used_at)
        used = sum(len(each.refs) for each in self._opened.values())
        for namespace in by_use:
            if used + ranks <= _MAX_SESSIONS:
                return
            used -= len(self._opened[namespace].refs)
            self._drop(namespace)

    async def _open(self, description: common_pb2.Namespace) -> _Sessions:
        """Opens one session per rank, all of one engine, which therefore share the lease."""
        refs: list[common_pb2.SessionRef] = []
        streams: list[Any] = []
        try:
            for rank in range(description.world_size):
                request = session_pb2.OpenRequest(
                    protocol_version=1,
                    client_name="kvtier server",
                    engine_id=self._engine_id,
                    rank=rank,
                    namespace=description,
                    pid=os.getpid(),
                    transport="tcp",
                )
                stream = self._session.Open(request)
                streams.append(stream)
                refs.append(_session_in(await _first(stream)))
                self._spawn(_read_heartbeats(stream))
            endpoint = self._endpoint
            address = (endpoint.host, await self._socket_port(refs[0]))
            name = self._credentials.tls_name(endpoint)
            connections = [PullConnections(address, ref, self._credentials, name) for ref in refs]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return _Sessions(refs, streams, connections, asyncio.get_running_loop().time())

    async def _socket_port(self, ref: common_pb2.SessionRef) -> int:
        """Returns the port of the other server's bulk process, which the first call starts."""
        while True:
            answer = await self._locate(transfer_pb2.LocateRequest(session=ref))
            if answer.socket_port:
                port = int(answer.socket_port)
                if port >= 1 << 16:
                    raise PeerError(f"the other server names the port {port}", refused=False)
                return port
            await asyncio.sleep(_LOCATE_SECONDS)

    def _start_release(self, sessions: _Sessions, lease_id: int) -> None:
        if not sessions.has_ended and self._releases < _MAX_RELEASES:
            self._releases += 1
            self._spawn(self._release(sessions, lease_id))

    async def _release(self, sessions: _Sessions, lease_id: int) -> None:
        request = cache_pb2.ReleaseLeaseRequest(session=sessions.refs[0], lease_ids=[lease_id])
        try:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._cache.ReleaseLease(request, timeout=_RELEASE_SECONDS)
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


async def _first(stream: Any) -> session_pb2.OpenResponse:
    """Returns the first response of a session. Raises PeerError, grpc.aio.AioRpcError."""
    first = await stream.read()
    if not isinstance(first, session_pb2.OpenResponse):
        raise PeerError("the session ended at once", refused=False)
    return first


def _session_in(first: session_pb2.OpenResponse) -> common_pb2.SessionRef:
    """Returns the session. Raises PeerError if it does not fit into the socket protocol."""
    if len(first.session.session_id) != _SESSION_ID_BYTES:
        raise PeerError("the session has an invalid id", refused=False)
    return first.session


async def _read_heartbeats(stream: Any) -> None:
    """Reads until the session ends. Otherwise the other server could no longer write heartbeats."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await stream.read():  # noqa: ASYNC110 - it waits for messages; `grpc.aio.EOF` is false
            await asyncio.sleep(_HEARTBEAT_SECONDS)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
