"""Memory of requests that a client does not finish: bounded, and no harm to another session."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from harness.payloads import namespace_of
from harness.raw import RawSession, RawSocket, hello_of
from harness.server_process import MIB, ServerProcess
from harness.unfinished_grpc import UnfinishedCalls

from kvtier.client.results import KeyStatus
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import HEAD_BYTES, FrameKind, Purpose, pack_call
from kvtier.server.rpc.in_flight_limits import MessageBudget

NAMESPACE = namespace_of(64 << 10)
LIMIT = 8 * MIB
"""A lookup may be as large by default. Two of them use the share of a session."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("budget"), region=16 * MIB) as process:
        yield process.start()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[RawSession]:
    with RawSession(server.endpoint, NAMESPACE, engine_id="budget", rank=0) as session:
        yield session


def calls_of(session: RawSession) -> RawSocket:
    """Returns a connection for calls that the server has accepted."""
    connection = RawSocket(session.capabilities.region.attach_path, hello_of(session.ref, Purpose.CALLS))
    assert connection.answer()[0] == 0
    return connection


def begin_large_call(connection: RawSocket) -> None:
    """Announces a request of 8 MiB, and sends what the socket accepts at once, except the end."""
    connection.socket.setblocking(False)
    start = pack_call(1, b"EventService/DescribeBlocks", b"")[HEAD_BYTES:]
    rest = memoryview(struct.pack("<IBQ", LIMIT, FrameKind.CALL, 1) + start + bytes(LIMIT - len(start) - 1))
    idle_since = time.monotonic()
    while rest and time.monotonic() < idle_since + 0.05:
        with contextlib.suppress(BlockingIOError):
            rest = rest[connection.socket.send(rest) :]
            idle_since = time.monotonic()


def large_lookup(session: RawSession) -> cache_pb2.LookupRequest:
    """Returns a request of more than 64 KiB."""
    keys = [number.to_bytes(32, "little") + bytes(4) for number in range(4000)]
    return cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys))


def test_unfinished_requests_hold_little_memory(server: ServerProcess, session: RawSession) -> None:
    """60 connections announce 8 MiB each. Without a bound the server would hold 480 MiB."""
    before = server.own_bytes()
    with contextlib.ExitStack() as opened:
        connections = [opened.enter_context(calls_of(session)) for _ in range(60)]
        for connection in connections:
            begin_large_call(connection)
        assert server.own_bytes() - before < 128 * MIB
        with RawSession(server.endpoint, NAMESPACE, engine_id="honest", rank=0) as other, calls_of(other) as honest:
            assert honest.call("CacheService/Lookup", large_lookup(other))[0] == 0


def test_a_waiting_request_is_received_when_another_ends(session: RawSession) -> None:
    """A session can send large requests again after those that used its share have ended."""
    with contextlib.ExitStack() as opened:
        blockers = [opened.enter_context(calls_of(session)) for _ in range(2)]
        for blocker in blockers:
            begin_large_call(blocker)
        with calls_of(session) as waiting:
            request = large_lookup(session)
            waiting.socket.settimeout(0.5)
            with pytest.raises(TimeoutError):
                waiting.call("CacheService/Lookup", request)
            for blocker in blockers:
                blocker.socket.close()
            waiting.socket.settimeout(60)
            assert waiting.answer()[0] == 0


@pytest.mark.slow
def test_unfinished_grpc_requests_hold_little_memory(tmp_path: Path) -> None:
    """60 calls send 10 MiB each and never end. Others are served, and the memory is freed."""
    with ServerProcess(tmp_path, region=16 * MIB) as server:
        before = server.start().own_bytes()
        with UnfinishedCalls(str(server.path), "CacheService/Lookup", 60, 10 * MIB) as abuse:
            sent = 0
            while abuse.sent < 300 * MIB:
                abuse.send_for(1)
                assert server.own_bytes() - before < 320 * MIB
                with RawSession(server.endpoint, NAMESPACE, engine_id="honest", rank=0) as honest:
                    answer = honest.cache.Lookup(large_lookup(honest), timeout=60)
                assert set(answer.statuses) == {KeyStatus.MISS}
                if abuse.sent == sent:
                    break  # the server takes no more
                sent = abuse.sent
        assert sent > 100 * MIB
        server.wait_for(lambda _: server.own_bytes() - before < 80 * MIB)


@pytest.mark.slow
def test_memory_of_large_socket_calls_is_returned(tmp_path: Path) -> None:
    """After the end of the calls, malloc returns the memory of their requests to the kernel."""
    with (
        ServerProcess(tmp_path, region=16 * MIB) as server,
        contextlib.ExitStack() as opened,
    ):
        before = server.start().own_bytes()
        sessions = [
            opened.enter_context(RawSession(server.endpoint, NAMESPACE, engine_id=f"abuse {number}", rank=0))
            for number in range(16)
        ]
        connections = [opened.enter_context(calls_of(session)) for session in sessions for _ in range(4)]
        for connection in connections:
            begin_large_call(connection)
        most = server.own_bytes() - before
        assert 64 * MIB < most < 256 * MIB
        for connection in connections:
            connection.socket.close()
        server.wait_for(lambda _: server.own_bytes() - before < 64 * MIB)


def test_tenants_share_the_memory_for_requests() -> None:
    """A session reserves at most an eighth, a tenant at most half, all together the budget."""
    budget, waiting = MessageBudget(80), cast(Any, object())
    assert budget.reserve(b"large", "a", 30, waiting), "one request may exceed the share of a session"
    assert not budget.reserve(b"large", "a", 1, waiting)
    assert budget.reserve(b"small", "a", 10, waiting)
    assert not budget.reserve(b"third", "a", 1, waiting), "half of the budget"
    assert budget.reserve(b"other", "b", 40, waiting)
    assert not budget.reserve(b"last", "c", 1, waiting), "nothing is left"
    budget.release(b"other", "b", 40, waiting)
    assert budget.reserve(b"last", "c", 40, waiting)
