"""In-memory fake server for tests of code that uses a `Client`.

    server = FakeServer()
    with server.client(namespace) as client:
        client.store([key], [data])

The client is a real `Client` whose transport calls the fake server directly. The fake server passes
the contract tests of the real server (`tests/contracts/cache_client.py`). It evicts blocks only on
request (`forget`). It can simulate a server that is down, hangs or restarts.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xxhash

from ...protos.v1 import admin_pb2, cache_pb2, common_pb2, handoff_pb2, session_pb2, transfer_pb2
from ...protos.wire.packed_keys import pack_offsets
from ..conversation_sync import ConversationClient
from ..effects import Call, Connect, Copy, Effect, Pull, Push
from ..errors import DeadlineExceeded, KVTierError, LeaseLost, NotConnected, error_for
from ..namespace import Namespace
from ..part_streams import PartReceiver
from ..results import DurableStatus, KeyStatus, OffloadPolicy, StoreStatus
from ..session.session import ClientSession
from ..sync import Client
from .fake_checks import FRAME_BYTES, LIMITS, check_bounds, check_filter, check_params, required
from .fake_conversations import FakeBlocks, FakeCalls, FakeConversations
from .fake_holds import BlockName, FakeHolds, FakeLease, FakeSession, FakeStore

__all__ = ["FakeServer"]


class FakeServer:
    """Fake server that keeps its blocks in a dict. Use it from one thread at a time.

    Attributes:
        down: while set, clients cannot reach the server.
        hanging: while set, calls end in `DeadlineExceeded`.
        calls: names of the called methods, in order.
    """

    def __init__(self) -> None:
        self.down = False
        self.hanging = False
        self.calls: list[str] = []
        self._blocks: dict[BlockName, dict[int, bytes]] = {}
        self._world: dict[BlockName, int] = {}
        self._ids = itertools.count(1)
        self.restart()

    def client(self, namespace: Namespace, *, engine_id: str | None = None, rank: int | None = None) -> Client:
        """Returns a client of this server."""
        backend = _FakeTransport(self, namespace, engine_id or secrets.token_hex(8), rank or 0)
        return Client(namespace=namespace, engine_id=backend.engine_id, rank=rank, backend=backend)

    def conversation_client(self, tenant: str | None = None) -> ConversationClient:
        """Returns a client of the conversations of this server."""
        return ConversationClient(tenant=tenant, backend=FakeCalls(self._handle))

    def restart(self) -> None:
        """Ends all sessions, leases, stores, holds and conversations; blocks stay."""
        self.epoch = secrets.randbits(62) + 1
        self._sessions: dict[bytes, FakeSession] = {}
        self._leases: dict[int, FakeLease] = {}
        self._stores: dict[int, FakeStore] = {}
        self._holds = FakeHolds(self._ready, self._drop)
        blocks = FakeBlocks(self._nbytes, lambda name: name in self._pinned(), self._drop)
        self._conversations = FakeConversations(blocks)

    def expire_holds(self) -> None:
        """Ends all holds as expired."""
        self._holds.end_all(expired=True)

    def end_retention(self) -> None:
        """Ends the retention of conversations that are not pinned."""
        self._conversations.end_retention()

    def decline_holds(self, decline: bool = True) -> None:  # noqa: FBT001, FBT002 - reads well in a test
        """Makes later publications fail with NO_ROOM."""
        self._holds.declining = decline

    def forget(self) -> None:
        """Evicts all blocks that no lease or hold pins and no conversation retains."""
        kept = self._pinned() | self._conversations.retained()
        self._blocks = {name: parts for name, parts in self._blocks.items() if name in kept}

    def _pinned(self) -> set[BlockName | None]:
        return {name for lease in self._leases.values() for name in lease.names} | self._holds.pinned()

    def _nbytes(self, name: BlockName) -> int:
        return sum(map(len, self._blocks[name].values())) if self._ready(name) else 0

    def _drop(self, name: BlockName) -> None:
        self._blocks.pop(name, None)
        self._world.pop(name, None)

    def _open(self, transport: _FakeTransport) -> ClientSession:
        session_id = secrets.token_bytes(16)
        prefix = transport.namespace.to_proto().SerializeToString(deterministic=True)
        self._sessions[session_id] = FakeSession(transport.engine_id, transport.rank, transport.namespace, prefix)
        capabilities = session_pb2.CapabilitiesResponse(epoch=self.epoch, tiers=["cpu"], limits=LIMITS)
        ref = common_pb2.SessionRef(session_id=session_id, epoch=self.epoch)
        return ClientSession(ref, capabilities, None, "a fake")

    def _close(self, ref: common_pb2.SessionRef) -> None:
        session = self._sessions.pop(ref.session_id, None)
        if session is not None:
            ended = set(session.granted.values())
            self._leases = {number: lease for number, lease in self._leases.items() if number not in ended}
            self._stores = {number: store for number, store in self._stores.items() if number not in ended}

    def _handle(self, method: str, request: Any) -> Any:
        self.calls.append(method)
        if self.down:
            raise NotConnected("the fake server is down")
        if self.hanging:
            raise DeadlineExceeded("the fake server hangs")
        check_bounds(method, request)
        name = method.rpartition("/")[2]
        handlers: dict[str, Callable[[Any], Any]] = {
            "BeginRequest": self._begin_request,
            "Lookup": self._lookup,
            "Prefetch": self._prefetch,
            "PrepareLoad": self._prepare_load,
            "CompleteLoad": self._complete_load,
            "ReleaseLease": self._release_lease,
            "Touch": self._touch,
            "PrepareStore": self._prepare_store,
            "CompleteStore": self._complete_store,
            "WithdrawGrants": self._withdraw_grants,
            "Flush": self._flush,
            "FinishRequest": self._finish_request,
            "Reset": self._reset,
            "PublishHold": self._publish_hold,
            "ClaimHold": self._claim_hold,
            "RenewHolds": lambda request: self._holds.renew(self._session(request.session).prefix, request),
            "ReleaseHolds": lambda request: self._holds.release(self._session(request.session).prefix, request),
            "ReportNotClaimed": lambda request: self._holds.not_claimed(self._session(request.session).prefix, request),
            "ListConversations": self._conversations.list,
            "ActOnConversation": self._conversations.act,
            "GetStatus": self._get_status,
        }
        return handlers[name](request)

    def _session(self, ref: common_pb2.SessionRef) -> FakeSession:
        if ref.epoch != self.epoch:
            raise error_for("STALE_EPOCH", "the session is of an earlier run of this server")
        session = self._sessions.get(ref.session_id)
        if session is None:
            raise error_for("UNKNOWN_SESSION", "there is no such session")
        return session

    def _ready(self, name: BlockName) -> bool:
        return name in self._blocks and len(self._blocks[name]) == self._world[name]

    def _in_reset(self, prefix: bytes) -> set[BlockName]:
        """Returns the blocks that were in use at a reset of their namespace and still are."""
        leased = {name for lease in self._leases.values() if lease.is_reset for name in lease.blocks}
        written = {name for store in self._stores.values() if store.is_reset for name in store.names}
        return {name for name in leased | written if name[0] == prefix}

    def _begin_request(self, request: cache_pb2.BeginRequestRequest) -> cache_pb2.BeginRequestResponse:
        session = self._session(request.session)
        request_id = required(request.request_id, "request_id")
        check_params(request.kv_transfer_params_json)
        if request.conversation_id:
            self._conversations.begin(session.engine, request_id, session.namespace, request.conversation_id)
        policy = cache_pb2.OffloadPolicy.Name(OffloadPolicy.BLOCK_LEVEL.value)
        return cache_pb2.BeginRequestResponse(policy=policy, lookup=self._lookup(request))

    def _lookup(self, request: cache_pb2.LookupRequest | cache_pb2.BeginRequestRequest) -> cache_pb2.LookupResponse:
        session = self._session(request.session)
        check_filter(request.exclude)
        names, is_resetting = session.names_in(request), bool(self._in_reset(session.prefix))
        self._conversations.use(session.engine, request.request_id, [key for _, key in names])
        found: list[BlockName | None] = []
        for name in names:
            broken = is_resetting or (request.mode != cache_pb2.LOOKUP_MODE_EACH and None in found[-1:])
            found.append(name if self._ready(name) and not broken else None)
        hits = found.index(None) if None in found else len(found)
        if request.mode != cache_pb2.LOOKUP_MODE_EACH and hits < request.min_hits:
            found[:hits], hits = [None] * hits, 0
        statuses = bytes(KeyStatus.MISS if name is None else KeyStatus.HIT for name in found)
        lease_id = self._grant(session, request, found) if any(found) else 0
        return cache_pb2.LookupResponse(
            statuses=statuses, prefix_hits=hits, sources=bytes(len(found)), lease_id=lease_id
        )

    def _prefetch(self, request: cache_pb2.PrefetchRequest) -> cache_pb2.PrefetchResponse:
        check_filter(request.exclude)
        session = self._session(request.session)
        names = session.names_in(request)
        is_there = self._ready if not self._in_reset(session.prefix) else lambda _: False
        present = sum(1 for _ in itertools.takewhile(is_there, names))
        return cache_pb2.PrefetchResponse(present_blocks=present, missing_blocks=len(names) - present)

    def _grant(self, session: FakeSession, request: Any, names: list[BlockName | None]) -> int:
        lease_id = session.granted[request.grant_id] = next(self._ids)
        blocks = {name: self._blocks[name] for name in names if name is not None}
        is_claim = isinstance(request, handoff_pb2.ClaimHoldRequest)
        self._leases[lease_id] = FakeLease(session.engine, request.request_id, names, blocks, is_claim)
        return lease_id

    def _end_leases(self, is_ended: Callable[[FakeLease], bool]) -> None:
        self._leases = {number: lease for number, lease in self._leases.items() if not is_ended(lease)}

    def _lease(self, session: FakeSession, lease_id: int) -> FakeLease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.engine[0] != session.namespace.tenant:
            raise error_for("LEASE_NOT_FOUND", f"there is no lease {lease_id}")
        if lease.engine != session.engine:
            raise error_for("NOT_OWNER", f"lease {lease_id} belongs to another engine")
        return lease

    def _parts(self, session: FakeSession, lease_id: int, items: Sequence[int]) -> list[bytes]:
        lease = self._lease(session, lease_id)
        parts = []
        for item in items:
            if item >= len(lease.names):
                raise error_for("INVALID_ARGUMENT", f"there is no item {item}")
            name = lease.names[item]
            if name is None:
                reason = "NOT_READY" if lease.is_claim else "INVALID_ARGUMENT"
                raise error_for(reason, f"item {item} of the lease is a miss")
            parts.append(lease.blocks[name][session.rank])
        return parts

    def _prepare_load(self, request: cache_pb2.PrepareLoadRequest) -> cache_pb2.PrepareLoadResponse:
        parts = self._parts(self._session(request.session), request.lease_id, request.items)
        return cache_pb2.PrepareLoadResponse(
            slot_offsets=pack_offsets(0 for _ in parts), part_sizes_bytes=pack_offsets(map(len, parts))
        )

    def _complete_load(self, request: cache_pb2.CompleteLoadRequest) -> cache_pb2.CompleteLoadResponse:
        self._lease(self._session(request.session), request.lease_id)
        if request.release:
            del self._leases[request.lease_id]
        return cache_pb2.CompleteLoadResponse()

    def _release_lease(self, request: cache_pb2.ReleaseLeaseRequest) -> cache_pb2.ReleaseLeaseResponse:
        session = self._session(request.session)
        for lease_id in request.lease_ids:
            if self._finds(session, lease_id):
                del self._leases[lease_id]
        return cache_pb2.ReleaseLeaseResponse()

    def _touch(self, request: cache_pb2.TouchRequest) -> cache_pb2.TouchResponse:
        session = self._session(request.session)
        return cache_pb2.TouchResponse(
            missing_lease_ids=[lease_id for lease_id in request.lease_ids if not self._finds(session, lease_id)]
        )

    def _finds(self, session: FakeSession, lease_id: int) -> bool:
        """Returns whether the tenant has this lease. Raises NOT_OWNER for another engine's."""
        try:
            self._lease(session, lease_id)
        except LeaseLost:
            return False
        return True

    def _prepare_store(self, request: cache_pb2.PrepareStoreRequest) -> cache_pb2.PrepareStoreResponse:
        session = self._session(request.session)
        names = session.names_in(request)
        self._conversations.use(session.engine, request.request_id, [key for _, key in names])
        granted, sizes, statuses = list[BlockName](), list[int](), bytearray()
        stores = [store for store in self._stores.values() if store.rank == session.rank and not store.is_reset]
        writing = {name for store in stores for name in store.names}
        for name in names:
            if session.rank in self._blocks.get(name, {}):
                statuses.append(StoreStatus.PRESENT)
            elif name in writing or name in granted:
                statuses.append(StoreStatus.IN_PROGRESS)
            else:
                sizes.append(session.namespace.part_bytes_of(name[1]))
                statuses.append(StoreStatus.GRANTED)
                granted.append(name)
        store_id = next(self._ids) if granted else 0
        if granted:
            staged = bytearray(sum(sizes))
            self._stores[store_id] = FakeStore(
                session.engine, session.rank, granted, sizes, staged, bytearray(b"\1" * len(staged))
            )
            session.granted[request.grant_id] = store_id
        return cache_pb2.PrepareStoreResponse(
            store_id=store_id, statuses=bytes(statuses), slot_offsets=pack_offsets(0 for _ in granted)
        )

    def _store(self, session: FakeSession, store_id: int) -> FakeStore:
        store = self._stores.get(store_id)
        if store is None or store.engine[0] != session.namespace.tenant:
            raise error_for("STORE_NOT_FOUND", f"there is no store {store_id}")
        if store.engine != session.engine:
            raise error_for("NOT_OWNER", f"store {store_id} belongs to another engine")
        return store

    def _complete_store(self, request: cache_pb2.CompleteStoreRequest) -> cache_pb2.CompleteStoreResponse:
        session = self._session(request.session)
        store = self._store(session, request.store_id)
        if any(item >= len(store.names) for item in request.failed_items):
            raise error_for("INVALID_ARGUMENT", "a failed item does not exist")
        del self._stores[request.store_id]
        end, unreceived = 0, list[int]()
        for number, (name, size) in enumerate(zip(store.names, store.sizes, strict=True)):
            end += size
            if store.is_reset or number in request.failed_items:
                continue
            if 1 in store.missing[end - size : end]:
                unreceived.append(number)
                continue
            self._blocks.setdefault(name, {})[store.rank] = bytes(store.staged[end - size : end])
            self._world[name] = session.namespace.world_size
        return cache_pb2.CompleteStoreResponse(failed_items=unreceived)

    def _withdraw_grants(self, request: cache_pb2.WithdrawGrantsRequest) -> cache_pb2.WithdrawGrantsResponse:
        granted = self._session(request.session).granted
        for number in map(granted.get, request.grant_ids):
            self._leases.pop(number, None)  # type: ignore[arg-type]
            self._stores.pop(number, None)  # type: ignore[arg-type]
        return cache_pb2.WithdrawGrantsResponse()

    def _flush(self, request: cache_pb2.FlushRequest) -> cache_pb2.FlushResponse:
        names = self._session(request.session).names_in(request)
        statuses = [DurableStatus.DURABLE if self._ready(name) else DurableStatus.VOLATILE for name in names]
        return cache_pb2.FlushResponse(statuses=bytes(statuses))

    def _finish_request(self, request: cache_pb2.FinishRequestRequest) -> cache_pb2.FinishRequestResponse:
        session = self._session(request.session)
        request_id = required(request.request_id, "request_id")
        self._conversations.finish(session.engine, request_id)
        owner = (session.engine, request_id)
        self._end_leases(lambda lease: (lease.engine, lease.request_id) == owner)
        return cache_pb2.FinishRequestResponse(settled=True)

    def _reset(self, request: cache_pb2.ResetRequest) -> cache_pb2.ResetResponse:
        prefix = self._session(request.session).prefix
        if not self._in_reset(prefix):  # a reset that runs does not begin again
            self._holds.end_all(prefix=prefix)
            for name in [name for name in self._blocks if name[0] == prefix]:
                self._drop(name)
            for lease in self._leases.values():
                lease.is_reset |= any(name[0] == prefix for name in lease.blocks)
            for store in self._stores.values():
                store.is_reset |= any(name[0] == prefix for name in store.names)
        return cache_pb2.ResetResponse(pending_blocks=len(self._in_reset(prefix)))

    def _publish_hold(self, request: handoff_pb2.PublishHoldRequest) -> handoff_pb2.PublishHoldResponse:
        session = self._session(request.session)
        return self._holds.publish(session.prefix, session.engine_id, session.names_in(request), request)

    def _claim_hold(self, request: handoff_pb2.ClaimHoldRequest) -> handoff_pb2.ClaimHoldResponse:
        session = self._session(request.session)
        hold = self._holds.find(session.prefix, request)
        engine = (session.prefix, request.hold.engine_id)
        lives = engine in [(other.prefix, other.engine_id) for other in self._sessions.values()]
        statuses, lease_id = self._holds.statuses(hold, request.first_positions, publisher_lives=lives), 0
        if KeyStatus.HIT in statuses:
            hits = [
                name if status == KeyStatus.HIT else None for name, status in zip(hold.names, statuses, strict=True)
            ]
            lease_id = self._grant(session, request, hits)
        return self._holds.claimed(hold, statuses, lease_id, publisher_lives=lives)

    def _get_status(self, request: admin_pb2.GetStatusRequest) -> admin_pb2.GetStatusResponse:
        used = sum(len(part) for parts in self._blocks.values() for part in parts.values())
        tier = admin_pb2.TierStatus(name="cpu", type="cpu", used_bytes=used, blocks=len(self._blocks), healthy=True)
        return admin_pb2.GetStatusResponse(
            server_version="fake", epoch=self.epoch, tiers=[tier], leases=len(self._leases), stores=len(self._stores)
        )

    def _push(self, frames: Iterable[transfer_pb2.PushRequest]) -> transfer_pb2.PushResponse:
        received = 0
        store: FakeStore | None = None
        for frame in frames:
            store = store or self._store(self._session(frame.session), frame.store_id)
            end = frame.offset_bytes + len(frame.payload)
            if end > len(store.staged):
                raise error_for("WRONG_SIZE", f"{end} bytes for a store of {len(store.staged)}")
            store.staged[frame.offset_bytes : end] = frame.payload
            store.missing[frame.offset_bytes : end] = bytes(len(frame.payload))
            received += len(frame.payload)
        return transfer_pb2.PushResponse(received_bytes=received)

    def _pull(self, request: transfer_pb2.PullRequest, sink: PartReceiver) -> None:
        check_bounds("TransferService/Pull", request)
        data = b"".join(self._parts(self._session(request.session), request.lease_id, request.items))
        for start in range(0, len(data), FRAME_BYTES):
            payload = data[start : start + FRAME_BYTES]
            checksum = xxhash.xxh3_64_intdigest(payload)
            sink.take(transfer_pb2.PullResponse(offset_bytes=start, xxh3_64=checksum, payload=payload))


class _FakeTransport:
    def __init__(self, server: FakeServer, namespace: Namespace, engine_id: str, rank: int) -> None:
        self.namespace = namespace
        self.engine_id = engine_id
        self.rank = rank
        self._server = server
        self._session: ClientSession | None = None
        self._closed = False

    @property
    def session(self) -> ClientSession | None:
        with contextlib.suppress(KVTierError):
            return self._connect()
        return None

    def perform(self, effect: Effect) -> Any:
        match effect:
            case Connect():
                return self._connect()
            case Call(method, request, _):
                return self._server._handle(method, request)  # noqa: SLF001 - part of FakeServer
            case Push():
                return self._server._push(effect.frames())  # noqa: SLF001
            case Pull(_, request, sink):
                self._server._pull(request, sink)  # noqa: SLF001
            case Copy(run):
                run()
        return None

    def invalidate(self, session: ClientSession) -> None:
        session.end()

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        request = cache_pb2.WithdrawGrantsRequest(session=session.ref, grant_ids=[grant_id])
        with contextlib.suppress(KVTierError):
            self._server._withdraw_grants(request)  # noqa: SLF001

    def close(self) -> None:
        self._closed = True
        if self._session is not None:
            self._session.end()
            self._server._close(self._session.ref)  # noqa: SLF001

    def _connect(self) -> ClientSession:
        if self._closed:
            raise NotConnected("the client is closed")
        if self._server.down:
            raise NotConnected("the fake server is down")
        if self._session is None or self._session.ended or self._session.ref.epoch != self._server.epoch:
            self._session = self._server._open(self)  # noqa: SLF001
        return self._session
