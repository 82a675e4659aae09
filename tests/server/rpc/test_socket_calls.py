"""Calls over the attach socket: answers as over gRPC, and invalid bytes do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import status_pb2
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.raw import RawSession
from harness.server_process import MIB, ServerProcess

from kvtier.client import AsyncClient, Client
from kvtier.client.errors import DeadlineExceeded, InvalidRequest, LimitExceeded, Unavailable
from kvtier.client.session.socket_calls import MAX_IDLE
from kvtier.client.timeouts import Timeouts
from kvtier.protos.error_reasons import reason_within
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.protos.wire.attach import REPLY_BYTES, Purpose, pack_request, unpack_reply
from kvtier.protos.wire.call_frames import STATUS_OF_CODE, pack_call, unpack_answer, unpack_length
from kvtier.server.rpc.socket_calls import _run_eagerly

PART = 64 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(4)]
MAX_MESSAGE = 6 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server that accepts messages of slightly more than 6 MiB."""
    config = f"[limits]\nmax_message_bytes = {MAX_MESSAGE}"
    with ServerProcess(tmp_path_factory.mktemp("s"), region=32 * MIB, config=config) as process:
        yield process.start()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[RawSession]:
    """Yields a session without a client."""
    with RawSession(server.endpoint, NAMESPACE, engine_id="raw", rank=0) as session:
        yield session


class CallConnection:
    """A connection for calls of a session."""

    def __init__(self, session: RawSession, ref: common_pb2.SessionRef | None = None) -> None:
        ref = ref or session.ref
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(session.capabilities.region.attach_path)
        self.socket.sendall(pack_request(ref.session_id, ref.epoch, Purpose.CALLS))
        reply = self.socket.recv(REPLY_BYTES, socket.MSG_WAITALL)
        self.granted = unpack_reply(reply) is not None

    def call(self, name: str, message: Message) -> tuple[int, bytes]:
        """Makes a call; returns status code and message of the answer."""
        self.socket.sendall(pack_call(name.encode(), message.SerializeToString()))
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        """Waits for an answer."""
        length = unpack_length(self._take(4))
        return unpack_answer(self._take(length))

    def ended(self) -> bool:
        """Waits until the server has closed the connection.

        Returns whether it sent nothing before.
        """
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _take(self, nbytes: int) -> bytes:
        taken = self.socket.recv(nbytes, socket.MSG_WAITALL)
        assert len(taken) == nbytes
        return taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def lookup_of(session: RawSession, keys: list[bytes], wait: int = 0) -> cache_pb2.LookupRequest:
    """Returns a lookup request."""
    request = cache_pb2.LookupRequest(session=session.ref, keys=keys)
    request.wait.seconds = wait
    return request


def refusal(answer: tuple[int, bytes]) -> tuple[str, str | None]:
    """Returns status and reason of a refused call."""
    code, message = answer
    return STATUS_OF_CODE[code].name, reason_within(status_pb2.Status.FromString(message))


def test_answers_are_those_of_grpc(session: RawSession) -> None:
    with CallConnection(session) as connection:
        for keys in (KEYS, []):
            code, message = connection.call("CacheService/Lookup", lookup_of(session, keys))
            assert code == 0
            assert cache_pb2.LookupResponse.FromString(message) == session.cache.Lookup(lookup_of(session, keys))


def test_refusals_are_those_of_grpc(session: RawSession) -> None:
    """Refusals carry status, reason and text; the connection stays open."""
    stranger = common_pb2.SessionRef(session_id=bytes(16), epoch=session.ref.epoch)
    cases: list[Message] = [
        lookup_of(session, [b"x"]),
        cache_pb2.LookupRequest(session=stranger),
        cache_pb2.LookupRequest(session=common_pb2.SessionRef(session_id=session.ref.session_id, epoch=1)),
    ]
    with CallConnection(session) as connection:
        for request in cases:
            with pytest.raises(grpc.RpcError) as refused:
                session.cache.Lookup(request)
            code, message = connection.call("CacheService/Lookup", request)
            status = status_pb2.Status.FromString(message)
            assert (STATUS_OF_CODE[code], status.message) == (refused.value.code(), refused.value.details())
            assert dict(refused.value.trailing_metadata())["grpc-status-details-bin"] == message
        assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_unknown_methods_and_streams_are_unimplemented(session: RawSession) -> None:
    """Bytes that are not a message are refused."""
    with CallConnection(session) as connection:
        for name in ("CacheService/Nothing", "TransferService/Pull", "SessionService/Open", "x"):
            assert refusal(connection.call(name, lookup_of(session, KEYS))) == ("UNIMPLEMENTED", None)
        connection.socket.sendall(pack_call(b"CacheService/Lookup", b"\xff" * 64))
        assert refusal(connection.answer()) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")


def test_requests_may_be_split_or_pipelined(session: RawSession) -> None:
    """Answers come in the order of the requests."""
    request = lookup_of(session, KEYS).SerializeToString()
    with CallConnection(session) as connection:
        for byte in pack_call(b"CacheService/Lookup", request):
            connection.socket.sendall(bytes([byte]))
        assert connection.answer()[0] == 0
        connection.socket.sendall(pack_call(b"CacheService/Lookup", request) + pack_call(b"x", b"") * 2)
        assert [connection.answer()[0] for _ in range(3)] == [0, 12, 12]


def test_a_waiting_call_delays_only_later_calls(session: RawSession) -> None:
    """On one connection its answer precedes those of later calls."""
    hit, wait = lookup_of(session, KEYS), lookup_of(session, [key_of(99)])
    with CallConnection(session) as connection:
        flush = cache_pb2.FlushRequest(session=session.ref, keys=KEYS)
        flush.wait.nanos = 200_000_000
        calls = [("Lookup", hit), ("Flush", flush), ("Lookup", wait), ("Nothing", hit)] * 3
        connection.socket.sendall(
            b"".join(pack_call(b"CacheService/" + n.encode(), m.SerializeToString()) for n, m in calls)
        )
        answers = [connection.answer() for _ in calls]
    kinds = [(code, len(message) if code == 0 else 0) for code, message in answers]
    assert kinds == kinds[:4] * 3
    assert len(cache_pb2.FlushResponse.FromString(answers[1][1]).statuses) == len(KEYS)
    assert len(cache_pb2.LookupResponse.FromString(answers[2][1]).statuses) == 1


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
        task = _run_eagerly(call(waits))
        assert task is not None
        for number in range(times):
            waits[number].set_result(number)
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert _run_eagerly(call([])) is None

    asyncio.run(main())
    assert seen == ([0, 1] if times == 2 else [*range(times), "cancelled"])


def test_a_too_large_request_is_refused(session: RawSession) -> None:
    """It is read to its end and discarded; the connection stays open."""
    most = MAX_MESSAGE + (64 << 10)
    with CallConnection(session) as connection:
        for nbytes in (most + 1, 64 * MIB):
            connection.socket.sendall(struct.pack("<I", nbytes) + bytes(nbytes))
            assert refusal(connection.answer()) == ("RESOURCE_EXHAUSTED", None)
        assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_a_too_large_request_behind_a_waiting_call(session: RawSession) -> None:
    """Buffered bytes are dropped, the rest is read, and the connection stays open."""
    keys = [key_of(76)]  # not of KEYS: other tests expect misses, also while this session closes
    session.cache.PrepareStore(cache_pb2.PrepareStoreRequest(session=session.ref, keys=keys), timeout=60)
    waits = cache_pb2.FlushRequest(session=session.ref, keys=keys, wait=Duration(seconds=1))
    with CallConnection(session) as connection:
        connection.socket.sendall(pack_call(b"CacheService/Flush", waits.SerializeToString()))
        connection.socket.sendall(struct.pack("<I", 64 * MIB) + bytes(64 * MIB))
        assert connection.answer()[0] == 0
        assert refusal(connection.answer()) == ("RESOURCE_EXHAUSTED", None)
        assert connection.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_unread_answers_do_not_fill_memory(server: ServerProcess, session: RawSession) -> None:
    """Further requests wait in the client's socket, and all are answered in the end."""
    request = pack_call(
        b"CacheService/Lookup", lookup_of(session, [key_of(n) for n in range(1000)]).SerializeToString()
    )
    sent, before = 0, server.own_bytes()
    with CallConnection(session) as connection:
        connection.socket.settimeout(1)
        rest = b""
        with contextlib.suppress(TimeoutError):
            for _ in range(128 * MIB // len(request)):
                rest = request
                while rest:
                    rest = rest[connection.socket.send(rest) :]
                sent += 1
        assert rest, "the server read everything"
        assert server.own_bytes() - before < 24 * MIB
        connection.socket.settimeout(60)
        for _ in range(sent):
            assert connection.answer()[0] == 0


def test_invalid_bytes_close_the_connection(server: ServerProcess, session: RawSession) -> None:
    """Other connections are served."""
    with CallConnection(session) as good:
        for garbage in (struct.pack("<I", 0), struct.pack("<IB", 1, 0), struct.pack("<IB", 3, 200) + b"ab"):
            with CallConnection(session) as connection:
                connection.socket.sendall(garbage)
                assert connection.ended()
        assert good.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0
    assert "Traceback" not in server.log


def test_a_connection_needs_a_session(session: RawSession) -> None:
    """An unknown session, or one of an earlier epoch of the server, is refused."""
    strangers = [
        common_pb2.SessionRef(session_id=bytes(16), epoch=session.ref.epoch),
        common_pb2.SessionRef(session_id=session.ref.session_id, epoch=session.ref.epoch + 1),
    ]
    for ref in strangers:
        with CallConnection(session, ref) as connection:
            assert not connection.granted
            assert connection.ended()


def test_a_connection_ends_with_its_session(server: ServerProcess) -> None:
    """Also during a call."""
    raw = RawSession(server.endpoint, NAMESPACE, engine_id="falls", rank=0)
    with raw as session, CallConnection(session) as idle, CallConnection(session) as busy:
        request = lookup_of(session, KEYS)
        assert busy.call("CacheService/Lookup", request)[0] == 0
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            client.wait_until_connected(60)
            with client.write([key_of(78)]):
                wait = lookup_of(session, [key_of(78)], wait=30).SerializeToString()
                busy.socket.sendall(pack_call(b"CacheService/Lookup", wait))
                _until(lambda: _leases(client) == 1)
                session.end()
                assert idle.ended()
                assert busy.ended()
                _until(lambda: _leases(client) == 0)


def test_a_session_has_at_most_64_connections(server: ServerProcess) -> None:
    """The 65th is refused, and a client with more threads makes the other calls over gRPC."""
    with RawSession(server.endpoint, NAMESPACE, engine_id="many", rank=0) as session, contextlib.ExitStack() as lines:
        opened = [lines.enter_context(CallConnection(session)) for _ in range(65)]
        assert [connection.granted for connection in opened] == [True] * 64 + [False]
        opened[0].socket.close()
        deadline = time.monotonic() + 60
        while not (again := lines.enter_context(CallConnection(session))).granted:
            assert time.monotonic() < deadline
        assert again.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_more_threads_than_connections(tmp_path: Path) -> None:
    """A hundred concurrent calls of one client are all answered."""
    with ServerProcess(tmp_path).start() as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        with ThreadPoolExecutor(100) as threads:
            server.suspend()
            calls = [threads.submit(client.lookup, KEYS) for _ in range(100)]
            time.sleep(0.3)
            server.resume()
            assert [call.result().prefix_hits for call in calls] == [0] * 100


def test_a_disconnect_cancels_the_call(server: ServerProcess, session: RawSession) -> None:
    """A lookup that waits for a block leaves no lease."""
    with Client(server.endpoint, namespace=NAMESPACE, engine_id="writer") as client:
        client.wait_until_connected(60)
        key = key_of(77)
        with client.write([key]) as batch:
            batch.views()[0][:] = bytes(PART)
            with CallConnection(session) as connection:
                request = lookup_of(session, [key], wait=30).SerializeToString()
                connection.socket.sendall(pack_call(b"CacheService/Lookup", request))
                _until(lambda: _leases(client) == 1)
            _until(lambda: _leases(client) == 0)


def test_a_late_answer_is_discarded(tmp_path: Path) -> None:
    """After a call that ended at its deadline, the next one gets its own answer."""
    with ServerProcess(tmp_path).start() as server:
        timeouts = Timeouts(connect=60.0, call=5.0)
        with Client(server.endpoint, namespace=NAMESPACE, timeouts=timeouts, transport="shm") as client:
            client.wait_until_connected(60)
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            server.suspend()
            with pytest.raises(DeadlineExceeded):
                client.lookup([key_of(99)])
            server.resume()
            _until(lambda: client.connected)
            assert client.lookup(KEYS).prefix_hits == len(KEYS)


def test_calls_to_a_hanging_server_end_at_their_deadline(tmp_path: Path) -> None:
    """There is no second attempt over gRPC, with an existing connection or a new one."""
    with ServerProcess(tmp_path).start() as server:
        timeouts = Timeouts(call=1.0)
        with Client(server.endpoint, namespace=NAMESPACE, timeouts=timeouts, transport="shm") as client:
            client.wait_until_connected(60)
            client._transport._calls.clear()  # type: ignore[attr-defined]  # a call over gRPC raises a KeyError
            server.suspend()
            for _ in range(3):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    client.touch()
                assert time.monotonic() - began < 25
            server.resume()


def test_idle_connections_are_closed(tmp_path: Path) -> None:
    """After concurrent calls of many threads the server gets its descriptors back."""
    with ServerProcess(tmp_path).start() as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        before = server.descriptors()
        with ThreadPoolExecutor(40) as threads:
            server.suspend()
            calls = [threads.submit(client.lookup, KEYS) for _ in range(40)]
            time.sleep(0.2)
            server.resume()
            assert [call.result().prefix_hits for call in calls] == [0] * 40
        _until(lambda: server.descriptors() <= before + MAX_IDLE)


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
        assert session is not None
        assert session.calls is not None
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
            client._transport._calls.clear()  # type: ignore[attr-defined]
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(client, KEYS)
            assert client.status().tiers
        with Client(server.endpoint, namespace=NAMESPACE, transport="grpc") as client:
            client.wait_until_connected(60)
            client._transport._calls.clear()  # type: ignore[attr-defined]
            with pytest.raises(KeyError):
                client.lookup(KEYS)


def test_a_message_beyond_the_limit_is_refused(server: ServerProcess) -> None:
    for transport in ("shm", "grpc"):
        with Client(server.endpoint, namespace=NAMESPACE, transport=transport) as client:  # type: ignore[arg-type]
            client.wait_until_connected(60)
            with pytest.raises(LimitExceeded):
                client.begin_request("r", kv_transfer_params={"much": "x" * 8 * MIB})
            assert client.lookup(KEYS).prefix_hits == 0


def _until(true: object) -> None:
    deadline = time.monotonic() + 60
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _leases(client: Client) -> int:
    return int(client.status().leases)
