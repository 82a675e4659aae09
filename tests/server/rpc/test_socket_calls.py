"""Calls over the attach socket: the same answers as over gRPC, and whatever comes instead of a call harms nobody."""

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
from kvtier.server.rpc.socket_calls import _begin

PART = 64 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(4)]
MAX_MESSAGE = 6 * MIB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that takes messages of six mebibytes and a little."""
    config = f"[limits]\nmax_message_bytes = {MAX_MESSAGE}"
    with ServerProcess(tmp_path_factory.mktemp("s"), region=32 * MIB, config=config) as process:
        yield process.start()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[RawSession]:
    """A session without a client."""
    with RawSession(server.endpoint, NAMESPACE, engine_id="raw", rank=0) as session:
        yield session


class Line:
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
        """Makes a call; returns status code and message of its answer."""
        self.socket.sendall(pack_call(name.encode(), message.SerializeToString()))
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        """Waits for an answer."""
        length = unpack_length(self._take(4))
        return unpack_answer(self._take(length))

    def ended(self) -> bool:
        """Waits until the server has hung up; returns whether it said nothing before."""
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
    """Returns a lookup."""
    request = cache_pb2.LookupRequest(session=session.ref, keys=keys)
    request.wait.seconds = wait
    return request


def refusal(answer: tuple[int, bytes]) -> tuple[str, str | None]:
    """Returns status and reason of a call that was refused."""
    code, message = answer
    return STATUS_OF_CODE[code].name, reason_within(status_pb2.Status.FromString(message))


def test_answers_are_those_of_grpc(session: RawSession) -> None:
    """What a method answers does not depend on how it is called."""
    with Line(session) as line:
        for keys in (KEYS, []):
            code, message = line.call("CacheService/Lookup", lookup_of(session, keys))
            assert code == 0
            assert cache_pb2.LookupResponse.FromString(message) == session.cache.Lookup(lookup_of(session, keys))


def test_refusals_are_those_of_grpc(session: RawSession) -> None:
    """They carry status, reason and text; and the line goes on."""
    stranger = common_pb2.SessionRef(session_id=bytes(16), epoch=session.ref.epoch)
    cases: list[Message] = [
        lookup_of(session, [b"x"]),
        cache_pb2.LookupRequest(session=stranger),
        cache_pb2.LookupRequest(session=common_pb2.SessionRef(session_id=session.ref.session_id, epoch=1)),
    ]
    with Line(session) as line:
        for request in cases:
            with pytest.raises(grpc.RpcError) as refused:
                session.cache.Lookup(request)
            code, message = line.call("CacheService/Lookup", request)
            status = status_pb2.Status.FromString(message)
            assert (STATUS_OF_CODE[code], status.message) == (refused.value.code(), refused.value.details())
            assert dict(refused.value.trailing_metadata())["grpc-status-details-bin"] == message
        assert line.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_methods_that_are_not_served(session: RawSession) -> None:
    """Unknown methods, and streams, are UNIMPLEMENTED; bytes that are no message are refused."""
    with Line(session) as line:
        for name in ("CacheService/Nothing", "TransferService/Pull", "SessionService/Open", "x"):
            assert refusal(line.call(name, lookup_of(session, KEYS))) == ("UNIMPLEMENTED", None)
        line.socket.sendall(pack_call(b"CacheService/Lookup", b"\xff" * 64))
        assert refusal(line.answer()) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")


def test_calls_in_pieces_and_in_a_row(session: RawSession) -> None:
    """A request may come byte by byte, and another before the first is answered: answers come in the order of requests."""
    request = lookup_of(session, KEYS).SerializeToString()
    with Line(session) as line:
        for byte in pack_call(b"CacheService/Lookup", request):
            line.socket.sendall(bytes([byte]))
        assert line.answer()[0] == 0
        line.socket.sendall(pack_call(b"CacheService/Lookup", request) + pack_call(b"x", b"") * 2)
        assert [line.answer()[0] for _ in range(3)] == [0, 12, 12]


def test_a_call_that_waits_holds_up_those_behind_it_only(session: RawSession) -> None:
    """Whether a call is answered at once or waits, its answer comes before those of the calls that were sent after it."""
    hit, wait = lookup_of(session, KEYS), lookup_of(session, [key_of(99)])
    with Line(session) as line:
        flush = cache_pb2.FlushRequest(session=session.ref, keys=KEYS)
        flush.wait.nanos = 200_000_000
        calls = [("Lookup", hit), ("Flush", flush), ("Lookup", wait), ("Nothing", hit)] * 3
        line.socket.sendall(b"".join(pack_call(b"CacheService/" + n.encode(), m.SerializeToString()) for n, m in calls))
        answers = [line.answer() for _ in calls]
    kinds = [(code, len(message) if code == 0 else 0) for code, message in answers]
    assert kinds == kinds[:4] * 3
    assert len(cache_pb2.FlushResponse.FromString(answers[1][1]).statuses) == len(KEYS)
    assert len(cache_pb2.LookupResponse.FromString(answers[2][1]).statuses) == 1


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_call_that_has_begun_is_cancelled_where_it_waits(times: int) -> None:
    """However soon that comes: what it has to tidy up is tidied up. Otherwise it goes on as a task does."""
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
        task = _begin(call(waits))
        assert task is not None
        for number in range(times):
            waits[number].set_result(number)
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert _begin(call([])) is None

    asyncio.run(main())
    assert seen == ([0, 1] if times == 2 else [*range(times), "cancelled"])


def test_requests_that_are_too_large(session: RawSession) -> None:
    """They are refused, read to their end and not kept; the line goes on."""
    most = MAX_MESSAGE + (64 << 10)
    with Line(session) as line:
        for nbytes in (most + 1, 64 * MIB):
            line.socket.sendall(struct.pack("<I", nbytes) + bytes(nbytes))
            assert refusal(line.answer()) == ("RESOURCE_EXHAUSTED", None)
        assert line.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_a_request_that_is_too_large_behind_one_that_waits(session: RawSession) -> None:
    """What piles up of it meanwhile is dropped, and the rest read: the line goes on here, too."""
    keys = [key_of(76)]  # not of KEYS: other tests miss those, also while this session is on its way out
    session.cache.PrepareStore(cache_pb2.PrepareStoreRequest(session=session.ref, keys=keys), timeout=60)
    waits = cache_pb2.FlushRequest(session=session.ref, keys=keys, wait=Duration(seconds=1))
    with Line(session) as line:
        line.socket.sendall(pack_call(b"CacheService/Flush", waits.SerializeToString()))
        line.socket.sendall(struct.pack("<I", 64 * MIB) + bytes(64 * MIB))
        assert line.answer()[0] == 0
        assert refusal(line.answer()) == ("RESOURCE_EXHAUSTED", None)
        assert line.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_a_client_that_does_not_read(server: ServerProcess, session: RawSession) -> None:
    """Requests whose answers nobody takes wait in the client's socket, not in the server's memory; none is lost."""
    request = pack_call(
        b"CacheService/Lookup", lookup_of(session, [key_of(n) for n in range(1000)]).SerializeToString()
    )
    sent, before = 0, server.own_bytes()
    with Line(session) as line:
        line.socket.settimeout(1)
        rest = b""
        with contextlib.suppress(TimeoutError):
            for _ in range(128 * MIB // len(request)):
                rest = request
                while rest:
                    rest = rest[line.socket.send(rest) :]
                sent += 1
        assert rest, "the server took it all"
        assert server.own_bytes() - before < 24 * MIB
        line.socket.settimeout(60)
        for _ in range(sent):
            assert line.answer()[0] == 0


def test_what_is_no_request(server: ServerProcess, session: RawSession) -> None:
    """The server hangs up on it, and serves everybody else."""
    with Line(session) as good:
        for garbage in (struct.pack("<I", 0), struct.pack("<IB", 1, 0), struct.pack("<IB", 3, 200) + b"ab"):
            with Line(session) as line:
                line.socket.sendall(garbage)
                assert line.ended()
        assert good.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0
    assert "Traceback" not in server.log


def test_lines_of_no_session(session: RawSession) -> None:
    """Whoever has no session gets no line, nor does one of another life of the server."""
    strangers = [
        common_pb2.SessionRef(session_id=bytes(16), epoch=session.ref.epoch),
        common_pb2.SessionRef(session_id=session.ref.session_id, epoch=session.ref.epoch + 1),
    ]
    for ref in strangers:
        with Line(session, ref) as line:
            assert not line.granted
            assert line.ended()


def test_a_line_ends_with_its_session(server: ServerProcess) -> None:
    """Also in mid-call."""
    raw = RawSession(server.endpoint, NAMESPACE, engine_id="falls", rank=0)
    with raw as session, Line(session) as idle, Line(session) as busy:
        request = lookup_of(session, KEYS)
        assert busy.call("CacheService/Lookup", request)[0] == 0
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            client.wait_until_connected(60)
            with client.write([key_of(78)]):
                wait = lookup_of(session, [key_of(78)], wait=30).SerializeToString()
                busy.socket.sendall(pack_call(b"CacheService/Lookup", wait))
                _until(lambda: _leases(client) == 1)
                session.fall()
                assert idle.ended()
                assert busy.ended()
                _until(lambda: _leases(client) == 0)


def test_lines_of_one_session_are_bounded(server: ServerProcess) -> None:
    """The 65th is refused; a client that calls from so many threads at once makes the others' calls over gRPC."""
    with RawSession(server.endpoint, NAMESPACE, engine_id="many", rank=0) as session, contextlib.ExitStack() as lines:
        opened = [lines.enter_context(Line(session)) for _ in range(65)]
        assert [line.granted for line in opened] == [True] * 64 + [False]
        opened[0].socket.close()
        deadline = time.monotonic() + 60
        while not (again := lines.enter_context(Line(session))).granted:
            assert time.monotonic() < deadline
        assert again.call("CacheService/Lookup", lookup_of(session, KEYS))[0] == 0


def test_more_threads_than_lines(tmp_path: Path) -> None:
    """A hundred calls at once of one client are all answered."""
    with ServerProcess(tmp_path).start() as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        with ThreadPoolExecutor(100) as threads:
            server.suspend()
            calls = [threads.submit(client.lookup, KEYS) for _ in range(100)]
            time.sleep(0.3)
            server.resume()
            assert [call.result().prefix_hits for call in calls] == [0] * 100


def test_a_call_that_is_given_up_is_cancelled(server: ServerProcess, session: RawSession) -> None:
    """Whoever hangs up while the server waits for a block leaves no lease behind."""
    with Client(server.endpoint, namespace=NAMESPACE, engine_id="writer") as client:
        client.wait_until_connected(60)
        key = key_of(77)
        with client.write([key]) as batch:
            batch.views()[0][:] = bytes(PART)
            with Line(session) as line:
                request = lookup_of(session, [key], wait=30).SerializeToString()
                line.socket.sendall(pack_call(b"CacheService/Lookup", request))
                _until(lambda: _leases(client) == 1)
            _until(lambda: _leases(client) == 0)


def test_a_late_answer_is_nobody_elses(tmp_path: Path) -> None:
    """After a call that was given up at its deadline, the next one gets its own answer."""
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


def test_calls_to_a_server_that_hangs_end_at_their_deadline(tmp_path: Path) -> None:
    """Once, whether there was a connection already or one has to be made: gRPC is not asked afterwards."""
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


def test_connections_are_not_kept_for_ever(tmp_path: Path) -> None:
    """After a burst of calls from many threads the server gets its descriptors back."""
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


async def test_no_descriptor_for_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process has none left for another connection, its calls go over gRPC, which has its own."""
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


async def test_the_asyncio_client_calls_that_way_too(tmp_path: Path) -> None:
    """Hits, refusals, deadlines and the end of a session are what they are over gRPC."""
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


def test_calls_are_made_over_the_socket_and_counted(tmp_path: Path) -> None:
    """A client on this host needs gRPC for its session only: with gRPC's calls taken away it goes on."""
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


def test_a_message_beyond_the_limit(server: ServerProcess) -> None:
    """Is refused as it is over gRPC."""
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
