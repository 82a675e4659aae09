"""Unary calls over sockets: answers as over gRPC, and invalid bytes do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import status_pb2
from harness.bulk import ROUTES, Route, bulk_pid, kill_bulk, prepare, serving, wait_for_bulk
from harness.payloads import assert_serves, filled, is_payload, key_of, namespace_of, payload
from harness.polling import async_wait_until, wait_until
from harness.raw import RawSession, RawSocket
from harness.server_process import MIB, ServerProcess

from kvtier.client import AsyncClient, Client
from kvtier.client.errors import DeadlineExceeded, InvalidRequest, LimitExceeded, NotConnected, Unavailable
from kvtier.client.session import socket_calls
from kvtier.client.session.socket_calls import MAX_IDLE
from kvtier.client.timeouts import Timeouts
from kvtier.client.transport.grpc_methods import RESPONSES
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import STATUS_OF_CODE, FrameKind, Hello, Purpose, pack_call
from kvtier.server.rpc.call_rules import CallRules
from kvtier.server.rpc.slice_scheduler import SliceScheduler
from kvtier.server.rpc.socket_calls import SocketCallServer, _Connection, _run_eagerly

PART = 64 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(4)]
MAX_MESSAGE = 6 * MIB
TOO_LARGE = ("RESOURCE_EXHAUSTED", None)


@pytest.fixture(scope="module", params=ROUTES)
def route(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Route]:
    """Yields a way to a server that accepts messages of 6 MiB."""
    config = f"[limits]\nmax_message_bytes = {MAX_MESSAGE}"
    with serving(request.param, tmp_path_factory.mktemp("s"), region=32 * MIB, config=config) as route:
        yield route


@pytest.fixture
def server(route: Route) -> ServerProcess:
    return route.server


@pytest.fixture
def connection(route: Route, session: RawSession) -> Iterator[RawSocket]:
    with route.open(session, Purpose.CALLS) as connection:
        yield connection


def lookup_of(session: RawSession, keys: list[bytes], wait: int = 0) -> cache_pb2.LookupRequest:
    request = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys))
    request.wait.seconds = wait
    return request


def test_answers_are_those_of_grpc(session: RawSession, connection: RawSocket) -> None:
    for keys in (KEYS, []):
        code, message = connection.call("CacheService/Lookup", lookup_of(session, keys))
        assert code == 0
        assert cache_pb2.LookupResponse.FromString(message) == session.cache.Lookup(lookup_of(session, keys))


def test_refusals_are_those_of_grpc(session: RawSession, connection: RawSocket) -> None:
    """Refusals carry status, reason and text; the connection stays open."""
    stranger = common_pb2.SessionRef(session_id=bytes(16), epoch=session.ref.epoch)
    cases: list[Message] = [
        lookup_of(session, [b"x"]),
        cache_pb2.LookupRequest(session=stranger),
        cache_pb2.LookupRequest(session=common_pb2.SessionRef(session_id=session.ref.session_id, epoch=1)),
    ]
    for request in cases:
        with pytest.raises(grpc.RpcError) as refused:
            session.cache.Lookup(request)
        code, message = connection.call("CacheService/Lookup", request)
        status = status_pb2.Status.FromString(message)
        assert (STATUS_OF_CODE[code], status.message) == (refused.value.code(), refused.value.details())
        assert dict(refused.value.trailing_metadata())["grpc-status-details-bin"] == message
    assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_unknown_methods_and_streams_are_unimplemented(connection: RawSocket) -> None:
    """Bytes that are not a message are refused."""
    for name in (b"CacheService/Nothing", b"TransferService/Pull", b"SessionService/Open", b"x"):
        connection.send(connection.next_call(name, b""))
        assert connection.refusal() == ("UNIMPLEMENTED", None)
    connection.send(connection.next_call(b"CacheService/Lookup", b"\xff" * 64))
    assert connection.refusal() == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")


def test_requests_may_be_split_or_pipelined(session: RawSession, connection: RawSocket) -> None:
    """Answers come in the order of the requests."""
    request = lookup_of(session, KEYS).SerializeToString()
    for byte in connection.next_call(b"CacheService/Lookup", request):
        connection.send(bytes([byte]))
    assert connection.answer()[0] == 0
    connection.send(
        connection.next_call(b"CacheService/Lookup", request), *[connection.next_call(b"x", b"") for _ in range(2)]
    )
    assert [connection.answer()[0] for _ in range(3)] == [0, 12, 12]


async def test_a_request_in_single_bytes_needs_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads no further for a while after a short piece of a request."""
    reads: list[int] = []
    receive = _Connection.buffer_updated
    monkeypatch.setattr(
        _Connection, "buffer_updated", lambda self, nbytes: (reads.append(nbytes), receive(self, nbytes))
    )
    registry: Any = SimpleNamespace(tenant_of=lambda _: "acme", check=lambda _: None)
    calls = SocketCallServer(CallRules(lambda *_: None), MIB, SliceScheduler(registry))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, theirs)
    transport.pause_reading()
    serving = asyncio.create_task(calls.serve(transport, Hello(Purpose.CALLS, bytes(16), 1, 0, 0)))
    for number in range(1, 4):
        for byte in pack_call(number, b"CacheService/Nothing", bytes(400)):
            await loop.sock_sendall(ours, bytes([byte]))
            await asyncio.sleep(0)
        assert len(await asyncio.wait_for(loop.sock_recv(ours, 4096), 60)) > 0
    assert len(reads) < 60
    ours.close()
    await serving


def test_a_waiting_call_delays_only_later_calls(session: RawSession, connection: RawSocket) -> None:
    """On one connection its answer precedes those of later calls."""
    hit, wait = lookup_of(session, KEYS), lookup_of(session, [key_of(99)])
    flush = cache_pb2.FlushRequest(session=session.ref, keys=pack_keys(KEYS))
    flush.wait.nanos = 200_000_000
    calls = [("Lookup", hit), ("Flush", flush), ("Lookup", wait), ("Nothing", hit)] * 3
    connection.send(*(connection.next_call(b"CacheService/" + n.encode(), m.SerializeToString()) for n, m in calls))
    answers = [connection.answer() for _ in calls]
    kinds = [(code, len(message) if code == 0 else 0) for code, message in answers]
    assert kinds == kinds[:4] * 3
    assert len(cache_pb2.FlushResponse.FromString(answers[1][1]).statuses) == len(KEYS)
    assert len(cache_pb2.LookupResponse.FromString(answers[2][1]).statuses) == 1


def directly(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_waiting_call_can_be_cancelled(times: int) -> None:
    """Its cleanup runs, also if the cancellation is immediate. Otherwise it continues as a task."""
    seen = []

    async def call(waits: list[asyncio.Future[int]]) -> None:
        try:
            for future in waits:
                await asyncio.sleep(0)
                seen.append(await future)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> None:
        loop = asyncio.get_running_loop()
        waits = [loop.create_future() for _ in range(2)]
        task = _run_eagerly(call(waits), directly)
        for number in range(times):
            waits[number].set_result(number)
            await async_wait_until(lambda: len(seen) > number)  # noqa: B023 - called here only
        task.cancel()
        await asyncio.wait([task])
        assert _run_eagerly(call([]), directly) is None

    asyncio.run(main())
    assert seen == ([0, 1] if times == 2 else [*range(times), "cancelled"])


def too_large(connection: RawSocket, nbytes: int) -> bytes:
    connection.calls += 1
    return struct.pack("<IBQ", nbytes, FrameKind.CALL, connection.calls) + bytes(nbytes)


def test_a_too_large_request_is_refused(session: RawSession, connection: RawSocket) -> None:
    """It is read to its end and discarded; the connection stays open."""
    for nbytes in (MAX_MESSAGE + (64 << 10) + 1, 64 * MIB):
        connection.send(too_large(connection, nbytes))
        assert connection.refusal() == TOO_LARGE
    assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_a_too_large_request_behind_a_waiting_call(session: RawSession, connection: RawSocket) -> None:
    """Buffered bytes are dropped, the rest is read, and the connection stays open."""
    keys = [key_of(76)]  # not of KEYS: other tests expect misses, also while this session closes
    prepare(session, keys)
    waits = cache_pb2.FlushRequest(session=session.ref, keys=pack_keys(keys), wait=Duration(seconds=1))
    connection.send(
        connection.next_call(b"CacheService/Flush", waits.SerializeToString()), too_large(connection, 64 * MIB)
    )
    assert connection.answer()[0] == 0
    assert connection.refusal() == TOO_LARGE
    assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_unread_answers_do_not_fill_memory(server: ServerProcess, session: RawSession, connection: RawSocket) -> None:
    """Further requests wait in the client's socket, and all are answered in the end."""
    request = lookup_of(session, [key_of(n) for n in range(1000)]).SerializeToString()
    sent, before = 0, server.own_bytes()
    connection.socket.settimeout(1)
    rest = b""
    with contextlib.suppress(TimeoutError):
        for _ in range(128 * MIB // len(request)):
            rest = connection.next_call(b"CacheService/Lookup", request)
            while rest:
                rest = rest[connection.socket.send(rest) :]
            sent += 1
    assert rest, "the server read everything"
    assert server.own_bytes() - before < 24 * MIB
    connection.socket.settimeout(60)
    for _ in range(sent):
        assert connection.answer()[0] == 0


def test_invalid_bytes_close_the_connection(
    route: Route, server: ServerProcess, session: RawSession, connection: RawSocket
) -> None:
    """Other connections are served."""
    call = FrameKind.CALL
    for garbage in (
        struct.pack("<IBQ", 0, call, 1),
        struct.pack("<IBQB", 1, call, 1, 0),
        struct.pack("<IBQB", 3, call, 1, 200) + b"ab",
        struct.pack("<IBQ", 0, 9, 1),
        struct.pack("<IBQ", 1, FrameKind.ANSWER, 1),
    ):
        with route.open(session, Purpose.CALLS) as bad:
            bad.send(garbage)
            assert bad.is_ended()
    assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0
    assert "Traceback" not in server.log


def test_invalid_bytes_of_a_client_that_has_gone_leave_no_error(
    route: Route, server: ServerProcess, session: RawSession
) -> None:
    """The server reads no further for a while after a short piece, and the end comes meanwhile."""
    garbage = struct.pack("<IBQ", 0, 9, 1)
    for _ in range(20):
        with route.open(session, Purpose.CALLS) as bad:
            bad.send(garbage[:1])
            bad.send(garbage[1:])
            bad.socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while bad.socket.recv(4096):
                    pass
    assert "Traceback" not in server.log


@pytest.mark.parametrize("step", [0, -1, 1 << 31, 1 << 32, -(1 << 32), 1 << 63])
def test_a_call_of_another_process_ends_the_connection(route: Route, session: RawSession, step: int) -> None:
    """Also a repeated call, and one that is too large. It is not executed."""
    for message in (b"", bytes(MAX_MESSAGE + 1)):
        with route.open(session, Purpose.CALLS) as connection:
            assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0
            with contextlib.suppress(OSError):
                connection.send(pack_call((1 + step) % (1 << 64), b"CacheService/Lookup", message))
            assert connection.is_ended()


def test_numbers_of_calls_may_have_gaps(route: Route, session: RawSession) -> None:
    """One process uses many connections, and counts the calls of all of them."""
    with route.open(session, Purpose.CALLS) as connection:
        for number in ((1 << 31) - 1, (1 << 32) - 2, (3 << 31) - 3):
            connection.send(pack_call(number, b"x", b""))
            connection.calls = connection.answers = number
            assert connection.refusal() == ("UNIMPLEMENTED", None)


def test_a_connection_ends_with_its_session(route: Route, session: RawSession, connection: RawSocket) -> None:
    """Also during a call."""
    with route.open(session, Purpose.CALLS) as busy, route.session(NAMESPACE, "writer") as writer:
        prepare(writer, [key_of(78)])
        wait = lookup_of(session, [key_of(78)], wait=30).SerializeToString()
        busy.send(busy.next_call(b"CacheService/Lookup", wait))
        route.server.wait_for(lambda status: status.leases == 1)
        session.end()
        assert connection.is_ended()
        assert busy.is_ended()
        route.server.wait_for(lambda status: status.leases == 0)


def test_a_disconnect_cancels_the_call(route: Route, session: RawSession, connection: RawSocket) -> None:
    """A lookup that waits for a block leaves no lease."""
    with route.session(NAMESPACE, "writer") as writer:
        prepare(writer, [key_of(77)])
        request = lookup_of(session, [key_of(77)], wait=30).SerializeToString()
        connection.send(connection.next_call(b"CacheService/Lookup", request))
        route.server.wait_for(lambda status: status.leases == 1)
        connection.socket.close()
        route.server.wait_for(lambda status: status.leases == 0)


def test_a_connection_outlives_the_bulk_process(
    server: ServerProcess, session: RawSession, connection: RawSocket
) -> None:
    """The server itself owns it, also if the bulk process has accepted it."""
    pid = kill_bulk(server)
    wait_until(lambda: bulk_pid(server.pid) not in (None, pid))
    assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_a_session_has_at_most_64_connections(route: Route, session: RawSession) -> None:
    """The 65th is refused."""
    with contextlib.ExitStack() as opened:
        connections = [opened.enter_context(route.open(session, Purpose.CALLS)) for _ in range(64)]
        with route.dial(session, Purpose.CALLS) as beyond:
            assert beyond.refusal() == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
            assert beyond.is_ended()
        connections[0].socket.close()

        def again() -> int:
            with route.dial(session, Purpose.CALLS) as connection:
                return connection.answer()[0]

        wait_until(lambda: again() == 0)


def test_calls_and_streams_of_a_client_use_sockets(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client makes no gRPC call once it knows the socket, and reports its transport."""
    keys = [key_of(number, salt="sync") for number in range(8)]
    with route.client(NAMESPACE, engine_id="sync") as client:
        wait_for_bulk(client)
        assert client.transport == "tcp"
        monkeypatch.setattr(client._transport, "_calls", {})
        client.store(keys, [payload(key, PART) for key in keys])
        assert_serves(client, keys)
        session = client._transport.session
        assert session.transport_reason == "set by the client"
        # The session of the previous test may still be closing.
        assert [one.transport for one in route.server.status().sessions if one.engine_id == "sync"] == ["tcp"]


async def test_calls_and_streams_of_an_asyncio_client_use_sockets(route: Route) -> None:
    keys = [key_of(number, salt="aio") for number in range(8)]
    arguments: Any = {"transport": "tcp", "credentials": route.credentials}
    async with AsyncClient(route.endpoint, namespace=NAMESPACE, **arguments) as client:
        await asyncio.to_thread(wait_for_bulk, client)
        assert client.transport == "tcp"
        client._transport._calls = {}  # type: ignore[attr-defined]
        await client.store(keys, [payload(key, PART) for key in keys])
        buffers = filled(len(keys), PART)
        assert await client.load(keys, buffers) == len(keys)
        assert all(is_payload(key, found) for key, found in zip(keys, buffers, strict=True))


def test_more_threads_than_connections(tmp_path: Path) -> None:
    """A hundred concurrent calls of one client are all answered."""
    with ServerProcess(tmp_path).start() as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        with ThreadPoolExecutor(100) as threads:
            server.suspend()
            calls = [threads.submit(client.lookup, KEYS) for _ in range(100)]
            assert not futures.wait(calls, 0.3).done
            server.resume()
            assert [call.result().prefix_hits for call in calls] == [0] * 100


@pytest.mark.slow
def test_a_late_answer_is_discarded(tmp_path: Path) -> None:
    """After a call that ended at its deadline, the next one gets its own answer."""
    with ServerProcess(tmp_path).start() as server:
        timeouts = Timeouts(connect=60.0, call=5.0)
        with Client(server.endpoint, namespace=NAMESPACE, timeouts=timeouts, transport="shm") as client:
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            server.suspend()
            with pytest.raises(DeadlineExceeded):
                client.lookup([key_of(99)])
            server.resume()
            wait_until(lambda: client.connected)
            assert client.lookup(KEYS).prefix_hits == len(KEYS)


def test_calls_to_a_hanging_server_end_at_their_deadline(tmp_path: Path) -> None:
    """There is no second attempt over gRPC, with an existing connection or a new one."""
    with ServerProcess(tmp_path).start() as server:
        timeouts = Timeouts(call=1.0)
        with Client(server.endpoint, namespace=NAMESPACE, timeouts=timeouts, transport="shm") as client:
            client.wait_until_connected(60)
            client._transport._calls = {}  # type: ignore[attr-defined]  # a call over gRPC raises a KeyError
            server.suspend()
            for _ in range(3):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    client.touch()
                assert time.monotonic() - began < 25
            server.resume()


def test_grpc_gets_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no connection to the socket is accepted in time, the call over gRPC has the rest."""
    timeouts: list[float] = []

    def refuse(_: object, timeout: float) -> None:
        timeouts.append(timeout)
        raise NotConnected("not over gRPC")

    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=NAMESPACE, timeouts=Timeouts(call=20.0), transport="shm") as client,
    ):
        client.wait_until_connected(60)
        transport: Any = client._transport
        transport.session.calls._idle.pop().close()
        transport._calls = dict.fromkeys(RESPONSES, refuse)
        monkeypatch.setattr(socket_calls, "_CONNECT_SECONDS", 0.5)
        server.suspend()
        with pytest.raises(NotConnected):
            client.touch()
        server.resume()
    assert [timeout < 20.0 - 0.4 for timeout in timeouts] == [True]


def test_idle_connections_are_closed(tmp_path: Path) -> None:
    """After concurrent calls of many threads the server gets its descriptors back."""
    with ServerProcess(tmp_path).start() as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        before = server.descriptors()
        with ThreadPoolExecutor(40) as threads:
            server.suspend()
            calls = [threads.submit(client.lookup, KEYS) for _ in range(40)]
            assert not futures.wait(calls, 0.2).done
            server.resume()
            assert [call.result().prefix_hits for call in calls] == [0] * 40
        wait_until(lambda: server.descriptors() <= before + MAX_IDLE)


async def test_calls_use_grpc_if_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client cannot open another connection; gRPC has its own."""
    made = socket.socket

    def none_left(family: int = -1, *arguments: object) -> socket.socket:
        if family == socket.AF_UNIX:
            raise OSError(errno.EMFILE, "too many open files")
        return made(family, *arguments)  # type: ignore[arg-type]

    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=NAMESPACE, transport="shm") as client,
    ):
        client.wait_until_connected(60)
        session = client._transport.session
        session.calls._idle.pop().close()
        async with AsyncClient(server.endpoint, namespace=NAMESPACE, transport="shm") as other:
            await other.wait_until_connected(60)
            monkeypatch.setattr(socket, "socket", none_left)
            assert client.lookup(KEYS).prefix_hits == 0
            assert (await other.lookup(KEYS)).prefix_hits == 0
            monkeypatch.undo()


async def test_the_asyncio_client_uses_the_socket(tmp_path: Path) -> None:
    """Hits, refusals, deadlines and the end of a session are as over gRPC."""
    with ServerProcess(tmp_path).start() as server:
        timeouts = Timeouts(connect=60.0, call=5.0)
        async with AsyncClient(server.endpoint, namespace=NAMESPACE, timeouts=timeouts, transport="shm") as client:
            await client.wait_until_connected(60)
            with pytest.raises(InvalidRequest):
                await client.lookup([b"x"])
            server.suspend()
            with pytest.raises(DeadlineExceeded):
                await client.lookup(KEYS)
            server.resume()
            assert (await client.lookup(KEYS)).prefix_hits == 0
            server.kill()
            with pytest.raises(Unavailable):
                await client.lookup(KEYS)


def test_local_calls_use_the_socket_and_are_counted(tmp_path: Path) -> None:
    """A local client needs gRPC for its session only: it works with gRPC calls disabled."""
    with ServerProcess(tmp_path).start() as server:
        with Client(server.endpoint, namespace=NAMESPACE, transport="shm") as client:
            client.wait_until_connected(60)
            client._transport._calls = {}  # type: ignore[attr-defined]
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(client, KEYS)
            assert client.status().tiers
        with Client(server.endpoint, namespace=NAMESPACE, transport="grpc") as client:
            client.wait_until_connected(60)
            client._transport._calls = {}  # type: ignore[attr-defined]
            with pytest.raises(KeyError):
                client.lookup(KEYS)


def test_a_message_beyond_the_limit_is_refused(route: Route) -> None:
    for transport in ("shm", "grpc"):
        arguments: Any = {"namespace": NAMESPACE, "transport": transport}
        with Client(route.server.endpoint, **arguments) as client:
            client.wait_until_connected(60)
            with pytest.raises(LimitExceeded, match="larger than"):
                client.begin_request("r", kv_transfer_params={"much": "x" * 8 * MIB})
            assert client.lookup(KEYS).prefix_hits == 0
