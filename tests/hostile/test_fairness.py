"""A tenant repeats calls on 60 connections; another tenant gets as much of the event loop."""

from __future__ import annotations

import contextlib
import itertools
import json
import selectors
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest
from google.protobuf.message import Message
from harness.bulk import fresh
from harness.payloads import namespace_of
from harness.polling import wait_until
from harness.raw import RawSession, RawSocket, hello_of
from harness.server_process import MIB, ServerProcess

from kvtier.protos.v1 import cache_pb2, conversation_pb2, handoff_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import HEAD_BYTES, Purpose, unpack_head

CONNECTIONS = 60
CALLS = 1500
PART = 4096
RATE = 20
LOOKUP = "CacheService/Lookup"
KEYS = fresh("abuse", 256)


@dataclass
class Flood:
    """A thread that sends a request again on each connection after its answer."""

    connections: list[RawSocket]
    name: str
    message: bytes
    answers: int = 0
    is_ended: bool = False
    thread: threading.Thread = field(init=False)

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        missing = dict.fromkeys(self.connections, 0)
        for connection in self.connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._send(connection)
        while not self.is_ended:
            for key, _ in selector.select(0.1):
                connection, data = key.data, key.data.socket.recv(1 << 20)
                while data:
                    if not missing[connection]:
                        missing[connection] = HEAD_BYTES + unpack_head(data)[0]
                    taken = min(len(data), missing[connection])
                    missing[connection] -= taken
                    data = data[taken:]
                    if not missing[connection]:
                        self.answers += 1
                        self._send(connection)

    def _send(self, connection: RawSocket) -> None:
        connection.send(connection.next_call(self.name.encode(), self.message))

    @contextlib.contextmanager
    def running(self) -> Iterator[Flood]:
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        try:
            wait_until(lambda: self.answers > 0)
            yield self
        finally:
            self.is_ended = True
            self.thread.join()


@dataclass
class Tenants:
    server: ServerProcess
    sessions: contextlib.ExitStack

    def session(self, tenant: str) -> RawSession:
        namespace = namespace_of(PART, tenant=tenant)
        return self.sessions.enter_context(RawSession(self.server.endpoint, namespace, engine_id=tenant))

    def connect(self, session: RawSession) -> RawSocket:
        connection = RawSocket(f"{self.server.path}.shm", hello_of(session.ref, Purpose.CALLS))
        self.sessions.enter_context(connection)
        assert connection.answer() == (0, b"")
        return connection

    def flood(self, session: RawSession, name: str, request: Message | bytes) -> Flood:
        message = request if isinstance(request, bytes) else request.SerializeToString()
        connections = [self.connect(session) for _ in range(CONNECTIONS)]
        return Flood(connections, name, message)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = "".join(f"tenants.{name} = {{rates = {{calls = {RATE}}}}}\n" for name in ("limited", "remote"))
    with ServerProcess(tmp_path_factory.mktemp("f"), region=16 * MIB, config=config).start() as server:
        yield server
        assert server.alive
        assert '"call failed"' not in server.log


@pytest.fixture
def tenants(server: ServerProcess) -> Iterator[Tenants]:
    with contextlib.ExitStack() as sessions:
        yield Tenants(server, sessions)


def lookup_of(session: RawSession, keys: list[bytes] = KEYS[:1]) -> cache_pb2.LookupRequest:
    return cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys), mode=cache_pb2.LOOKUP_MODE_EACH)


def test_another_tenants_waiting_calls_get_half_of_the_turns(tenants: Tenants) -> None:
    """Both tenants always have the same requests waiting: on 60 connections, and on one.

    If each connection had a turn, the flood would get 60 answers for each of the other tenant.
    """
    abuser, honest = tenants.session("abuser"), tenants.session("honest")
    with tenants.connect(honest) as connection, tenants.flood(abuser, LOOKUP, lookup_of(abuser)).running() as flood:
        before = flood.answers
        message = lookup_of(honest).SerializeToString()
        connection.send(*(connection.next_call(LOOKUP.encode(), message) for _ in range(CALLS)))
        for _ in range(CALLS):
            assert connection.answer()[0] == 0
        assert flood.answers - before < 10 * CALLS
        assert flood.thread.is_alive()


CASES = ("flush", "hold", "parameters", "long parameters", "garbage", "conversations")


def request_of(case: str, session: RawSession) -> tuple[str, Message | bytes]:
    match case:
        case "flush":
            return "CacheService/Flush", cache_pb2.FlushRequest(session=session.ref, keys=pack_keys(KEYS))
        case "hold":
            request = handoff_pb2.PublishHoldRequest(
                session=session.ref, request_id="r", keys=pack_keys(KEYS), positions=range(len(KEYS)), num_tokens=1
            )
            return "HandoffService/PublishHold", request
        case "garbage":
            return LOOKUP, b"\xff" * 300
        case "conversations":
            for number in range(100):
                name = str(number)
                session.cache.BeginRequest(
                    cache_pb2.BeginRequestRequest(
                        session=session.ref, request_id=name, keys=pack_keys(KEYS), conversation_id=name
                    )
                )
            request = conversation_pb2.ListConversationsRequest(tenant=session.namespace.tenant)
            return "ConversationService/ListConversations", request
        case _:
            params = json.dumps(dict.fromkeys(map(str, range(900 if case == "parameters" else 20_000)), 1))
            begin = cache_pb2.BeginRequestRequest(session=session.ref, request_id="r", kv_transfer_params_json=params)
            return "CacheService/BeginRequest", begin


@pytest.mark.parametrize("case", CASES)
def test_an_honest_client_proceeds_beside_a_flood(tenants: Tenants, case: str) -> None:
    """One call at a time, each of which waits for its answer."""
    abuser, honest = tenants.session("abuser"), tenants.session("honest")
    with tenants.connect(honest) as connection, tenants.flood(abuser, *request_of(case, abuser)).running() as flood:
        for _ in range(100):
            assert connection.call(LOOKUP, lookup_of(honest))[0] == 0
        assert flood.thread.is_alive()


def test_a_refused_connection_is_not_read_until_it_may_retry(tenants: Tenants) -> None:
    """A connection gets at most one refusal per 1/20 s, and a release is served after that."""
    session = tenants.session("limited")
    with tenants.connect(session) as connection:
        message = lookup_of(session).SerializeToString()
        calls = [connection.next_call(LOOKUP.encode(), message) for _ in range(400)]
        begun = time.monotonic()
        connection.send(*calls)
        refused = sum(connection.answer()[0] != 0 for _ in itertools.repeat(None, 260))
        # 200 calls of the burst, then one call per interval: all others are refused.
        assert 10 <= refused <= (time.monotonic() - begun) * RATE + 5
        release = cache_pb2.ReleaseLeaseRequest(session=session.ref)
        assert tenants.connect(session).call("CacheService/ReleaseLease", release)[0] == 0


def test_refusals_over_grpc_are_delayed(tenants: Tenants) -> None:
    """A loop of refused calls gets at most one answer per 1/20 s."""
    session = tenants.session("remote")
    request, codes, begun = lookup_of(session), [], time.monotonic()
    while codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) < 20:
        codes.append(session.cache.Lookup.future(request, timeout=60).code())
    assert (time.monotonic() - begun) * RATE + 5 >= 20
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_a_flood_over_grpc_does_not_stop_another_tenant(tenants: Tenants) -> None:
    abuser, honest = tenants.session("abuser"), tenants.session("honest")
    ended = threading.Event()

    def flood() -> int:
        calls = 0
        while not ended.is_set():
            abuser.cache.Lookup(lookup_of(abuser, KEYS), timeout=60)
            calls += 1
        return calls

    with tenants.connect(honest) as connection, ThreadPoolExecutor(16) as pool:
        floods = [pool.submit(flood) for _ in range(16)]
        try:
            for _ in range(100):
                assert connection.call(LOOKUP, lookup_of(honest))[0] == 0
        finally:
            ended.set()
        assert all(each.result() for each in floods)
