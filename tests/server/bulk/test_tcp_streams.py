"""Streams over plain TCP sockets: broken connections, refusals, and slots of stalled streams."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from harness.bulk import bulk_pid, bulk_streams, locate, wait_for_bulk, wait_until_received
from harness.long_timeouts import wait_until
from harness.payloads import assert_serves, filled, is_payload, key_of, namespace_of, payload
from harness.push_frames import encode_push_frame
from harness.raw import RawSession
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, DeadlineExceeded, StoreStatus, part_streams
from kvtier.client.effects import Pull
from kvtier.client.session.session import ClientSession
from kvtier.client.transport.tcp_streams import TcpStreamClient
from kvtier.cuda.host.copy import address_of
from kvtier.protos.v1 import cache_pb2, common_pb2, session_pb2, transfer_pb2
from kvtier.protos.wire import tcp_frames
from kvtier.server.bulk import tcp_streams as plain_module
from kvtier.server.bulk.tcp_streams import TcpStreamServer

PART = 1 * MIB
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(48)]
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server whose region holds 128 blocks."""
    directory: Path = tmp_path_factory.mktemp("plain")
    with ServerProcess(directory, region=128 * MIB, lmdb=16 * MIB, tcp=True) as process:
        yield process.start()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """Yields a client whose streams use plain sockets."""
    with Client(server.tcp, namespace=NAMESPACE, transport="tcp") as client:
        client.wait_until_connected(60)
        wait_for_bulk(client)
        yield client
    server.wait_for(lambda status: not (status.leases or status.stores or status.quarantined_bytes))


@pytest.fixture
def session(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[RawSession]:
    """Yields a raw session of an engine of this test; the previous session may still be closing."""
    with RawSession(server.tcp, NAMESPACE, engine_id=request.node.name) as session:
        yield session
    server.wait_for(lambda status: not (status.leases or status.stores or status.quarantined_bytes))


@pytest.fixture
def connection(session: RawSession) -> Iterator[socket.socket]:
    """Yields a connection to the bulk process."""
    port = wait_until(lambda: locate(session).plain_port)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as connection:
        yield connection


def fresh(salt: str, count: int = len(KEYS)) -> list[bytes]:
    """Returns keys that no other test uses."""
    return [key_of(number, salt=salt) for number in range(count)]


def prepare(session: RawSession, keys: list[bytes]) -> int:
    """Prepares a store of these blocks; returns its id."""
    request = cache_pb2.PrepareStoreRequest(session=session.ref, keys=keys)
    store_id: int = session.cache.PrepareStore(request, timeout=TIMEOUT).store_id
    assert store_id
    return store_id


def push_of(session: RawSession, store_id: int) -> bytes:
    """Returns the first message of a Push."""
    request = transfer_pb2.PushRequest(session=session.ref, store_id=store_id)
    return tcp_frames.pack_request(tcp_frames.Method.PUSH, request.SerializeToString())


def frame_of(data: bytes, offset: int = 0, checksum: int | None = None) -> bytes:
    """Returns a frame."""
    checksum = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
    return tcp_frames.pack_frame_head(offset, len(data), checksum) + data


def damaged_head(frame: bytes) -> bytes:
    """Returns a frame whose offset does not match its header checksum."""
    return bytes([frame[0] ^ 64]) + frame[1:]


def refusal_of(connection: socket.socket, *, skip: int = 0) -> str:
    """Reads a refusal after skipping `skip` bytes; returns its reason."""
    data = bytearray()
    # the process closes the connection without reading the rest
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    head = data[skip : skip + tcp_frames.ANSWER_BYTES]
    granted, nbytes = tcp_frames.unpack_answer(head)
    assert not granted
    message = data[skip + tcp_frames.ANSWER_BYTES :]
    assert len(message) == nbytes
    return tcp_frames.unpack_refusal(message)[0]


def kill_bulk(server: ServerProcess) -> None:
    """Kills the bulk process with SIGKILL."""
    pid = bulk_pid(server.pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


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
def test_connections_with_high_descriptor_numbers_are_reused(server: ServerProcess) -> None:
    """`select` cannot check such a number; the connection must still count as intact."""
    keys = fresh("many", 8)
    with Client(server.tcp, namespace=NAMESPACE, transport="tcp") as client:
        client.wait_until_connected(60)
        wait_for_bulk(client)
        way = client._transport._bulk._streams  # type: ignore[attr-defined]
        client.store(keys, [payload(key, PART) for key in keys])
        assert_serves(client, keys)
        assert client._transport._bulk._streams is way  # type: ignore[attr-defined]


BREAKS: dict[str, Callable[[ServerProcess, list[Any]], object]] = {
    "process": lambda server, _: kill_bulk(server),
    "connection": lambda _, calls: calls[-1]._connection.shutdown(socket.SHUT_RDWR),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records which streams over plain sockets begin."""
    begun: list[Any] = []
    for name in ("push", "pull"):
        original = getattr(TcpStreamClient, name)

        def method(self: Any, effect: Any, calls: Any = None, original: Any = original) -> Any:
            return original(self, effect, lambda call: (begun.append(call), calls and calls(call)))

        monkeypatch.setattr(TcpStreamClient, name, method)
    return begun


@pytest.mark.parametrize("what", BREAKS)
def test_an_interrupted_load_resumes(
    server: ServerProcess, client: Client, calls: list[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """If process or connection end during a load, every block still arrives whole (B4)."""
    keys = fresh(f"load {what}")
    assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}
    taken: list[int] = []
    original = part_streams.PartReceiver.verify

    def verify(sink: Any, head: Any, views: Any) -> None:
        original(sink, head, views)
        taken.append(head.offset)
        if len(taken) == 8:
            BREAKS[what](server, calls)

    monkeypatch.setattr(part_streams.PartReceiver, "verify", verify)
    buffers = filled(len(keys), PART)
    assert client.load(keys, buffers) == len(keys)
    assert all(is_payload(key, found) for key, found in zip(keys, buffers, strict=True))
    assert len(taken) < len(keys)


@pytest.mark.parametrize("what", BREAKS)
def test_an_interrupted_store_resumes(
    server: ServerProcess, client: Client, calls: list[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After process or connection end, only frames that may be missing are sent again."""
    keys = fresh(f"store {what}")
    starts: list[int] = []
    original, original_frames = part_streams.PartSender.pieces, part_streams.PartSender.frames

    def pieces(source: Any, start: int, step: int) -> Iterator[Any]:
        starts.append(start)
        for number, piece in enumerate(original(source, start, step)):
            if number == 30 and not start:
                wait_until_received(client, source, 20 * MIB)
                BREAKS[what](server, calls)
            yield piece

    def frames(source: Any, start: int, step: int, *, complete: bool) -> Iterator[bytes]:
        starts.append(start)
        return original_frames(source, start, step, complete=complete)

    monkeypatch.setattr(part_streams.PartSender, "pieces", pieces)
    monkeypatch.setattr(part_streams.PartSender, "frames", frames)
    assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}
    assert starts[0] == 0
    assert len(starts) == 2
    assert 20 * MIB <= starts[1] < 31 * MIB
    monkeypatch.undo()
    assert_serves(client, keys)


def test_the_status_shows_the_last_used_route(
    server: ServerProcess, session: RawSession, connection: socket.socket
) -> None:
    """A client that returns to gRPC streams is not shown as a client of plain sockets."""
    data, keys = bytes(payload(KEYS[0], PART)), iter(fresh("ways"))
    first = next(keys)

    def push_plainly(key: bytes) -> int:
        store_id = prepare(session, [key])
        connection.sendall(push_of(session, store_id) + frame_of(data) + tcp_frames.pack_frame_head(0, 0, 0))
        granted, nbytes = tcp_frames.unpack_answer(connection.recv(tcp_frames.ANSWER_BYTES, socket.MSG_WAITALL))
        assert granted
        connection.recv(nbytes, socket.MSG_WAITALL)
        return store_id

    def push() -> None:
        checksum = xxhash.xxh3_64_intdigest(data)
        frame = encode_push_frame(0, checksum, [data], session=session.ref, store_id=prepare(session, [next(keys)]))
        assert session.push(iter([frame]), timeout=TIMEOUT).received_bytes == PART

    def pull() -> None:
        request = transfer_pb2.PullRequest(session=session.ref, lease_id=lease.lease_id, items=[0])
        assert len(list(session.pull(request, timeout=TIMEOUT))) >= 1

    def shown() -> str:
        return next(one.transport for one in server.status().sessions if one.engine_id == session.request.engine_id)

    complete = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=push_plainly(first))
    session.cache.CompleteStore(complete, timeout=TIMEOUT)
    # Keep the lease: the slots that `push` needs might otherwise be those of this block.
    lease = session.cache.Lookup(cache_pb2.LookupRequest(session=session.ref, keys=[first]), timeout=TIMEOUT)
    for way in (push, pull):
        assert shown() == "tcp"
        way()
        assert shown() == "grpc"
        push_plainly(next(keys))
        assert shown() == "tcp"
        with bulk_streams(session, server.endpoint):
            way()
        assert shown() == "grpc"
        push_plainly(next(keys))


def test_a_client_returns_to_plain_sockets(server: ServerProcess, client: Client) -> None:
    """After the process is replaced, the client drops its old connections and opens new ones."""
    keys = fresh("back", 4)
    client.store(keys, [payload(key, PART) for key in keys])
    before = bulk_pid(server.pid)
    kill_bulk(server)
    assert_serves(client, keys)
    wait_until(lambda: bulk_pid(server.pid) not in (None, before))
    wait_for_bulk(client)
    assert isinstance(client._transport._bulk._streams, TcpStreamClient)  # type: ignore[attr-defined]
    assert_serves(client, keys)


def test_a_stalled_socket_does_not_delay_a_completion(
    server: ServerProcess, session: RawSession, connection: socket.socket
) -> None:
    """The second half of its frame reaches no slot (B4.5)."""
    store_id = prepare(session, fresh("stalled", 2))
    frame = frame_of(b"\xee" * PART)
    connection.sendall(push_of(session, store_id) + frame[: PART // 2])
    time.sleep(0.3)
    pid = bulk_pid(server.pid)
    abort = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, abort=True)
    started = time.monotonic()
    session.cache.CompleteStore(abort, timeout=TIMEOUT)
    assert time.monotonic() - started < TIMEOUT / 2
    assert bulk_pid(server.pid) == pid, "the process answers, and was killed"
    with pytest.raises(ConnectionError):
        connection.sendall(frame[PART // 2 :] * 100)


def test_slots_of_an_ended_session_become_free(
    server: ServerProcess, session: RawSession, connection: socket.socket
) -> None:
    """Its stalled stream is ended and keeps no slot."""
    store_id = prepare(session, fresh("fallen", 2))
    connection.sendall(push_of(session, store_id) + frame_of(b"\xee" * PART)[:1000])
    time.sleep(0.3)
    session.end()
    server.wait_for(lambda status: not (status.stores or status.quarantined_bytes))


REFUSED: dict[str, tuple[Callable[[RawSession, int], bytes], str]] = {
    "unknown store": (lambda s, _: push_of(s, 4711), "STORE_NOT_FOUND"),
    "beyond the end": (lambda s, i: push_of(s, i) + frame_of(b"x", 2 * PART), "WRONG_SIZE"),
    "far beyond the end": (lambda s, i: push_of(s, i) + frame_of(b"x", 2**64 - 1), "WRONG_SIZE"),
    "longer than the store": (lambda s, i: push_of(s, i) + tcp_frames.pack_frame_head(0, 2**63, 0), "WRONG_SIZE"),
    "damaged head": (lambda s, i: push_of(s, i) + damaged_head(frame_of(b"x" * 100)), "CHECKSUM_MISMATCH"),
    "damaged": (lambda s, i: push_of(s, i) + frame_of(b"x" * 100, 0, 1), "CHECKSUM_MISMATCH"),
    "no message": (lambda *_: tcp_frames.pack_request(tcp_frames.Method.PUSH, b"\xff" * 9), "INVALID_ARGUMENT"),
    "no session": (lambda *_: tcp_frames.pack_request(tcp_frames.Method.PUSH, b""), "STALE_EPOCH"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_pushes_are_refused(session: RawSession, connection: socket.socket, case: str) -> None:
    """The reasons are those of Push over gRPC."""
    make, reason = REFUSED[case]
    store_id = prepare(session, fresh(case, 2))
    connection.sendall(make(session, store_id))
    assert refusal_of(connection) == reason
    abort = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, abort=True)
    session.cache.CompleteStore(abort, timeout=TIMEOUT)


def test_repeated_bytes_do_not_complete_a_store(session: RawSession, connection: socket.socket) -> None:
    """A store that received one half twice is incomplete."""
    store_id = prepare(session, fresh("twice", 2))
    request = transfer_pb2.PushRequest(session=session.ref, store_id=store_id, complete=True)
    frame = frame_of(b"\xee" * PART)
    connection.sendall(tcp_frames.pack_request(tcp_frames.Method.PUSH, request.SerializeToString()) + 2 * frame)
    connection.sendall(tcp_frames.pack_frame_head(0, 0, 0))
    granted, nbytes = tcp_frames.unpack_answer(connection.recv(tcp_frames.ANSWER_BYTES, socket.MSG_WAITALL))
    assert granted
    answer = transfer_pb2.PushResponse.FromString(connection.recv(nbytes, socket.MSG_WAITALL))
    assert (answer.received_bytes, answer.completed) == (2 * PART, False)
    abort = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, abort=True)
    session.cache.CompleteStore(abort, timeout=TIMEOUT)


def test_a_connection_without_a_thread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be created, the connection is closed; the next one is served normally."""
    starts, served = [], threading.Event()
    original = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("kvtier-tcp"):
            starts.append(thread)
            if len(starts) < 3:
                raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(plain_module, "_MAX_CONNECTIONS", 1)
    monkeypatch.setattr(TcpStreamServer, "_serve", lambda _, connection: (connection.close(), served.set()))
    unused: Any = None
    port = TcpStreamServer(unused, unused, PART, unused).listen(("127.0.0.1",), 0)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            assert connection.recv(1) == b""
    assert served.wait(TIMEOUT)


def test_bad_pulls_are_refused(session: RawSession, connection: socket.socket) -> None:
    """The answer has no frames and ends with a refusal."""
    request = transfer_pb2.PullRequest(session=session.ref, lease_id=4711, items=[0])
    connection.sendall(tcp_frames.pack_request(tcp_frames.Method.PULL, request.SerializeToString()))
    assert refusal_of(connection, skip=tcp_frames.FRAME_HEAD_BYTES) == "LEASE_NOT_FOUND"


@pytest.mark.parametrize(
    "noise", [b"\0" * 9, b"GET / HTTP/1.1\r\n\r\n", b"KVP1\x07\0\0\0\0", b"KVP1\x01\xff\xff\xff\xff"]
)
def test_an_invalid_request_ends_the_connection(
    server: ServerProcess, session: RawSession, connection: socket.socket, noise: bytes
) -> None:
    """The process closes the connection and continues."""
    pid = bulk_pid(server.pid)
    connection.sendall(noise)
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    assert bulk_pid(server.pid) == pid
    assert locate(session).plain_port


def test_a_stalled_reader_needs_no_memory(
    server: ServerProcess, session: RawSession, connection: socket.socket
) -> None:
    """Its lease can be released."""
    keys = fresh("still", 16)
    with Client(server.endpoint, namespace=NAMESPACE) as writer:
        writer.wait_until_connected(60)
        writer.store(keys, [payload(key, PART) for key in keys])
    lookup = cache_pb2.LookupRequest(session=session.ref, keys=keys)
    lease = session.cache.Lookup(lookup, timeout=TIMEOUT)
    before = own_bytes(bulk_pid(server.pid))
    items = [*range(len(keys))] * 30
    request = transfer_pb2.PullRequest(session=session.ref, lease_id=lease.lease_id, items=items)
    connection.sendall(tcp_frames.pack_request(tcp_frames.Method.PULL, request.SerializeToString()))
    assert tcp_frames.unpack_frame_head(connection.recv(tcp_frames.FRAME_HEAD_BYTES, socket.MSG_WAITALL)).nbytes == PART
    time.sleep(0.5)
    assert own_bytes(bulk_pid(server.pid)) < before + 32 * MIB
    release = cache_pb2.ReleaseLeaseRequest(session=session.ref, lease_ids=[lease.lease_id])
    session.cache.ReleaseLease(release, timeout=TIMEOUT)


def test_slow_bytes_do_not_extend_the_deadline() -> None:
    """A stream ends at its deadline, even if some bytes arrive regularly."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not ended.wait(0.1):
                    connection.sendall(frame_of(b"x"))

        thread = threading.Thread(target=serve)
        thread.start()
        streams_over = TcpStreamClient("127.0.0.1", listener.getsockname()[1])
        memory = bytearray(PART)
        sink = part_streams.PartReceiver([address_of(memory)[0]], [PART])
        session = ClientSession(common_pb2.SessionRef(), session_pb2.CapabilitiesResponse(), None, "")
        pull = Pull(session, transfer_pb2.PullRequest(), sink.take, 1.0, sink)
        started = time.monotonic()
        timer = threading.Timer(TIMEOUT, ended.set)
        timer.start()
        try:
            with pytest.raises(DeadlineExceeded):
                streams_over.pull(pull)
        finally:
            ended.set()
            timer.cancel()
            thread.join()
        assert time.monotonic() - started < TIMEOUT / 2


def own_bytes(pid: int | None) -> int:
    """Returns the anonymous resident memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
