"""Streams over sockets: broken connections, slots of stalled streams, and slow peers."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import xxhash
from harness.bulk import (
    ROUTES,
    Route,
    bulk_pid,
    data_frame,
    fresh,
    kill_bulk,
    locate,
    prepare,
    pull_call,
    push_call,
    serving,
    store_all,
    wait_for_bulk,
    wait_until_received,
)
from harness.payloads import assert_serves, filled, is_payload, namespace_of
from harness.polling import stays, wait_until
from harness.push_frames import encode_push_frame
from harness.raw import RawSession, RawSocket
from harness.server_process import MIB, own_bytes

from kvtier.client import Client, part_streams
from kvtier.client.transport.socket_connector import GrpcStreams
from kvtier.client.transport.socket_streams import SocketStreams
from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.wire import socket_frames as frames
from kvtier.protos.wire.packed_keys import pack_keys

PART = 1 * MIB
NAMESPACE = namespace_of(PART)
COUNT = 48
TIMEOUT = 60.0
BLOCK = b"\xee" * PART


@pytest.fixture(scope="module", params=ROUTES)
def route(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Route]:
    """Yields a way to a server whose region holds 256 blocks."""
    with serving(request.param, tmp_path_factory.mktemp("s"), region=256 * MIB, lmdb=16 * MIB) as route:
        yield route


@pytest.fixture(autouse=True)
def nothing_is_left(route: Route) -> Iterator[None]:
    """Checks after each test that the server has freed all slots."""
    yield
    route.server.wait_for(lambda status: not (status.leases or status.stores or status.quarantined_bytes))


@pytest.fixture
def connection(route: Route, session: RawSession) -> Iterator[RawSocket]:
    with route.open(session) as connection:
        yield connection


def frame_of(connection: RawSocket, data: bytes, offset: int = 0, number: int = 1) -> bytes:
    """Returns a data frame; over TLS without a checksum."""
    return data_frame(data, offset, 0 if isinstance(connection.socket, ssl.SSLSocket) else None, number)


def begin_push(session: RawSession, connection: RawSocket, keys: list[bytes]) -> int:
    """Sends 8 MiB of a store, so that the server has progress of it; returns its id."""
    store_id = prepare(session, keys)
    connection.send(push_call(store_id), *(frame_of(connection, BLOCK, number * PART) for number in range(8)))
    wait_until(lambda: locate(session, store_id).received_bytes)
    return store_id


def complete(session: RawSession, store_id: int, failed: Iterable[int] = ()) -> None:
    request = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, failed_items=failed)
    session.cache.CompleteStore(request, timeout=TIMEOUT)


BREAKS: dict[str, Callable[[Route, list[Any]], object]] = {
    "process": lambda route, _: kill_bulk(route.server),
    "connection": lambda _, begun: begun[-1][1]._connection.shutdown(),
}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Records effect and handle of each stream of the clients, in order."""
    begun: list[tuple[Any, Any]] = []
    for streams in (SocketStreams, GrpcStreams):
        for name in ("push", "pull"):
            original = getattr(streams, name)

            def method(self: Any, effect: Any, on_start: Any = None, original: Any = original) -> Any:
                return original(self, effect, lambda call: (begun.append((effect, call)), on_start and on_start(call)))

            monkeypatch.setattr(streams, name, method)
    return begun


@pytest.mark.parametrize("what", BREAKS)
def test_an_interrupted_load_resumes(
    route: Route, client: Client, begun: list[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After process or connection end, only the missing blocks are requested again (B4)."""
    keys = fresh(f"load {what}", COUNT)
    store_all(client, keys)
    begun.clear()
    taken: list[int] = []
    original = part_streams.PartReceiver.verify

    def verify(sink: Any, head: Any, checksum: int) -> None:
        original(sink, head, checksum)
        taken.append(head.offset)
        if len(taken) == 8:
            BREAKS[what](route, begun)

    monkeypatch.setattr(part_streams.PartReceiver, "verify", verify)
    buffers = filled(len(keys), PART)
    assert client.load(keys, buffers) == len(keys)
    assert all(is_payload(key, found) for key, found in zip(keys, buffers, strict=True))
    first, second = (list(effect.request.items) for effect, _ in begun)
    assert first == [*range(len(keys))]
    assert second == first[-len(second) :]
    assert 0 < len(second) <= len(keys) - 8


@pytest.mark.parametrize("what", BREAKS)
def test_an_interrupted_store_resumes(
    route: Route, client: Client, begun: list[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After process or connection end, only frames that may be missing are sent again."""
    keys = fresh(f"store {what}", COUNT)
    original = part_streams.PartSender.pieces

    def pieces(source: Any, start: int, step: int) -> Iterator[Any]:
        for number, piece in enumerate(original(source, start, step)):
            if number == 30 and not start:
                wait_until_received(client, source, 20 * MIB)
                BREAKS[what](route, begun)
            yield piece

    monkeypatch.setattr(part_streams.PartSender, "pieces", pieces)
    store_all(client, keys)
    first, second = (effect.start for effect, _ in begun)
    assert first == 0
    assert 20 * MIB <= second < 31 * MIB
    monkeypatch.undo()
    assert_serves(client, keys)


def test_a_client_returns_to_sockets(route: Route, client: Client) -> None:
    """Without the process stores use gRPC; later the client opens new connections to the next."""
    keys = fresh("back", 8)
    store_all(client, keys[:4])
    before = kill_bulk(route.server)
    store_all(client, keys[4:])
    assert_serves(client, keys)
    wait_until(lambda: bulk_pid(route.server.pid) not in (None, before))
    wait_for_bulk(client)
    assert_serves(client, keys)


def test_the_status_shows_the_last_used_route(route: Route, session: RawSession, connection: RawSocket) -> None:
    """A client that returns to gRPC streams is not shown as a client of sockets."""
    keys = iter(fresh("ways", COUNT))

    def shown() -> str:
        mine = (one for one in route.server.status().sessions if one.engine_id == session.request.engine_id)
        return next(mine).transport

    for number in (1, 2):
        push = push_call(prepare(session, [next(keys)]), frame_of(connection, BLOCK, number=number), number=number)
        connection.send(push)
        assert connection.answer()[0] == 0
        assert shown() == "tcp"
        checksum = xxhash.xxh3_64_intdigest(BLOCK)
        frame = encode_push_frame(0, checksum, [BLOCK], session=session.ref, store_id=prepare(session, [next(keys)]))
        assert session.push(iter([frame]), timeout=TIMEOUT).received_bytes == PART
        assert shown() == "grpc"


def test_a_stalled_stream_does_not_delay_the_end_of_its_store(
    route: Route, session: RawSession, connection: RawSocket
) -> None:
    """The second half of its last frame reaches no slot (B4.5)."""
    store_id = begin_push(session, connection, fresh("stalled", 12))
    frame = frame_of(connection, BLOCK, 8 * PART)
    connection.send(frame[: PART // 2])
    pid = bulk_pid(route.server.pid)
    started = time.monotonic()
    complete(session, store_id, range(12))
    assert time.monotonic() - started < TIMEOUT / 2
    assert bulk_pid(route.server.pid) == pid, "the process answers, and was killed"
    with pytest.raises(OSError, match=r"[Bb]roken|[Rr]eset|EOF"):
        connection.send(frame[PART // 2 :] * 100)


def test_a_completion_waits_for_the_streams_of_its_store(session: RawSession, connection: RawSocket) -> None:
    """A late frame must not reach a slot that already belongs to another block."""
    keys = fresh("completed", 12)
    store_id = begin_push(session, connection, keys)
    complete(session, store_id)
    with contextlib.suppress(OSError):  # the server may have closed the connection
        connection.send(frame_of(connection, b"late"))
    # The server shuts down the connection of a stream that is receiving a frame at the completion.
    with contextlib.suppress(EOFError, ConnectionResetError):
        assert connection.refusal() == ("NOT_FOUND", "STORE_NOT_FOUND")
    lookup = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys[:1]), mode=cache_pb2.LOOKUP_MODE_EACH)
    lease = session.cache.Lookup(lookup, timeout=TIMEOUT)
    pull = transfer_pb2.PullRequest(session=session.ref, lease_id=lease.lease_id, items=[0])
    answers = (transfer_pb2.PullResponse.FromString(each) for each in session.pull(pull, timeout=TIMEOUT))
    assert b"".join(each.payload for each in answers) == BLOCK


def test_slots_of_an_ended_session_become_free(route: Route, session: RawSession, connection: RawSocket) -> None:
    """Its stalled stream is ended and keeps no slot; an idle connection ends at its next call."""
    with route.open(session) as idle:
        begin_push(session, connection, fresh("ended", 12))
        connection.send(frame_of(connection, BLOCK, 8 * PART)[:1000])
        session.end()
        route.server.wait_for(lambda status: not (status.stores or status.quarantined_bytes))
        idle.send(pull_call(1, [0]))
        assert idle.refusal() == ("UNAUTHENTICATED", "UNKNOWN_SESSION")


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGKILL])
def test_slots_are_reused_when_no_stream_can_write(
    route: Route, session: RawSession, connection: RawSocket, number: int
) -> None:
    """They stay reserved while a stream might still write, until it or the process ends (B4.5)."""
    keys = fresh(f"reserved {number}", 12)
    begin_push(session, connection, keys)
    pid = kill_bulk(route.server, signal.SIGSTOP)
    session.end()
    reserved = len(keys) * PART
    route.server.wait_for(lambda status: status.quarantined_bytes == reserved)
    stays(lambda: route.server.status().quarantined_bytes == reserved, 0.5)
    os.kill(pid, number)
    route.server.wait_for(lambda status: status.quarantined_bytes == 0)


def test_repeated_bytes_do_not_complete_a_store(session: RawSession, connection: RawSocket) -> None:
    """A store that received one half twice is incomplete."""
    store_id = prepare(session, fresh("twice", 2))
    connection.send(push_call(store_id, *[frame_of(connection, BLOCK)] * 2, complete=True))
    code, message = connection.answer()
    answer = transfer_pb2.PushResponse.FromString(message)
    assert (code, answer.received_bytes, answer.completed) == (0, 2 * PART, False)
    complete(session, store_id, range(2))


@pytest.mark.parametrize("frame", ["data", "end"])
def test_a_frame_of_another_call_ends_a_push(session: RawSession, connection: RawSocket, frame: str) -> None:
    """Its bytes reach no slot, and the store is not completed."""
    store_id = prepare(session, fresh(f"crossed {frame}", 2))
    connection.send(push_call(store_id, complete=True), frame_of(connection, BLOCK))
    crossed = frame_of(connection, BLOCK, PART, number=2) if frame == "data" else frames.pack_end(2)
    with contextlib.suppress(OSError):
        connection.send(crossed)
    assert connection.is_ended()
    wait_until(lambda: locate(session, store_id).received_bytes == PART)
    complete(session, store_id, range(2))


@pytest.mark.parametrize("number", [1, 0, 1 + (1 << 32), 1 - (1 << 32)])
def test_a_call_of_another_process_ends_the_connection(session: RawSession, connection: RawSocket, number: int) -> None:
    """Also a repeated call. The server begins no Push and no Pull."""
    store_id = prepare(session, fresh(f"crossed call {number}", 1))
    connection.send(push_call(store_id, frame_of(connection, BLOCK), complete=True))
    assert connection.answer()[0] == 0
    connection.send(pull_call(1, [0], number % (1 << 64)))
    assert connection.is_ended()


def test_slow_readers_need_little_memory(route: Route, session: RawSession) -> None:
    """The process buffers none of the gigabytes that clients do not read, and serves others."""
    keys = fresh("slow", 16)
    with route.client(NAMESPACE) as other, contextlib.ExitStack() as opened:
        wait_for_bulk(other)
        store_all(other, keys)
        lease = session.cache.Lookup(
            cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys)), timeout=TIMEOUT
        )
        stalled = [opened.enter_context(route.open(session)) for _ in range(4)]
        pid = bulk_pid(route.server.pid)
        assert pid is not None
        before = own_bytes(pid)
        for connection in stalled:
            connection.send(pull_call(lease.lease_id, [*range(len(keys))] * 30))
            assert frames.unpack_data_head(connection.read(frames.DATA_HEAD_BYTES)).nbytes == PART
        stays(lambda: own_bytes(pid) < before + 32 * MIB, 0.5)
        assert_serves(other, keys)
        release = cache_pb2.ReleaseLeaseRequest(session=session.ref, lease_ids=[lease.lease_id])
        session.cache.ReleaseLease(release, timeout=TIMEOUT)


def test_a_hundred_stalled_streams_make_clients_use_grpc(route: Route, session: RawSession) -> None:
    """They occupy all 128 connections, so further ones of the tenant are refused.

    The server may close a connection whose call it has not read yet, to make room for another one.
    Therefore the test opens connections until one is refused.
    """
    with contextlib.ExitStack() as opened, route.client(NAMESPACE) as client:
        client.wait_until_connected(60)
        store_id = prepare(session, fresh("many", 1))
        stalled = 0
        with pytest.raises((OSError, EOFError)):  # noqa: PT012 - any of the streams may be refused
            while stalled < 512:
                connection = opened.enter_context(route.dial(session, frames.Purpose.STREAMS))
                if (answer := connection.answer()) != (0, b""):
                    raise ConnectionError(answer)
                connection.send(push_call(store_id), frame_of(connection, b"x")[:10])
                stalled += 1
        assert stalled >= 128
        keys = fresh("beside many", 4)
        store_all(client, keys)
        assert_serves(client, keys)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Keeps more than 1,024 files open, as engines do: new descriptors have higher numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        descriptor = 0
        while descriptor < 1100:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            opened.callback(os.close, descriptor)
        yield


@pytest.mark.usefixtures("many_descriptors")
def test_connections_with_high_descriptor_numbers_are_reused(client: Client) -> None:
    """`select` cannot check such a number; the connection must still count as intact."""
    keys = fresh("high", 8)
    streams = client._transport._sockets._streams  # type: ignore[attr-defined]
    (idle,) = streams._idle
    store_all(client, keys)
    assert_serves(client, keys)
    assert client._transport._sockets._streams is streams  # type: ignore[attr-defined]
    assert idle in streams._idle
