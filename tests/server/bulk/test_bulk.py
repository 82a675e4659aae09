"""The bulk process: clients and server if it is killed, hangs, is unreachable or full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.bulk import (
    Route,
    bulk_pid,
    data_frame,
    fresh,
    kill_bulk,
    locate,
    prepare,
    push_call,
    serving,
    store_all,
    wait_for_bulk,
)
from harness.delay_proxy import delay_proxy
from harness.launch import launch, refused_start
from harness.long_timeouts import DEFAULTS
from harness.payloads import assert_serves, filled, is_payload, namespace_of, payload
from harness.polling import polls, wait_until
from harness.ports import ReservedPort
from harness.raw import RawSession, RawSocket, hello_of
from harness.server_process import MIB, ServerProcess

from kvtier.client import (
    AsyncClient,
    Client,
    Credentials,
    DeadlineExceeded,
    NotConnected,
    SessionLost,
    StoreStatus,
    Timeouts,
    part_streams,
)
from kvtier.client.effects import Pull
from kvtier.client.session import socket_calls
from kvtier.client.session.session import ClientSession
from kvtier.client.session.socket_calls import SocketTarget
from kvtier.client.transport import socket_streams
from kvtier.client.transport.socket_connector import SocketConnector
from kvtier.client.transport.socket_streams import SocketStreams
from kvtier.cuda.host.copy import address_of
from kvtier.protos.v1 import cache_pb2, common_pb2, session_pb2, transfer_pb2
from kvtier.protos.wire import socket_frames as frames
from kvtier.server.bulk import broker_client, connection_places, supervisor
from kvtier.server.bulk.broker_client import BrokerClient
from kvtier.server.bulk.messages import Accepted, Caller, Handshake, decode_from_child
from kvtier.server.bulk.streams import StreamServer
from kvtier.server.bulk.supervisor import BulkProcess
from kvtier.server.config.schema import BulkConfig, LimitConfig
from kvtier.server.process.child_main import Channel
from kvtier.server.rpc.listening_sockets import bind_tcp

PART = 1 * MIB
NAMESPACE = namespace_of(PART)
TIMEOUT = 60.0
REF = common_pb2.SessionRef(session_id=bytes(16), epoch=1)
HELLO = hello_of(REF, frames.Purpose.STREAMS)


@pytest.fixture(scope="module")
def route(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """Yields a Unix socket of a server whose region holds 128 blocks."""
    with serving("unix", tmp_path_factory.mktemp("b"), region=128 * MIB, lmdb=16 * MIB) as route:
        yield route


@pytest.fixture
def server(route: Route) -> Iterator[ServerProcess]:
    """Yields the server, and checks that the test leaves nothing in use."""
    yield route.server
    route.server.wait_for(lambda status: not (status.leases or status.stores or status.quarantined_bytes))


@contextlib.asynccontextmanager
async def async_client(server: ServerProcess, **more: Any) -> Any:
    """Yields a client for asyncio whose streams go to the bulk process."""
    async with AsyncClient(server.endpoint, namespace=NAMESPACE, transport="tcp", **more) as client:
        await asyncio.to_thread(wait_for_bulk, client)
        yield client


async def test_an_interrupted_asynchronous_load_resumes(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = fresh("async load")
    taken: list[int] = []
    original = part_streams.PartReceiver.verify

    def verify(sink: Any, head: Any, checksum: int) -> None:
        original(sink, head, checksum)
        taken.append(head.offset)
        if len(taken) == 8:
            kill_bulk(server)

    async with async_client(server) as client:
        await client.store(keys, [payload(key, PART) for key in keys])
        monkeypatch.setattr(part_streams.PartReceiver, "verify", verify)
        buffers = filled(len(keys), PART)
        assert await client.load(keys, buffers) == len(keys)
        assert all(is_payload(key, found) for key, found in zip(keys, buffers, strict=True))


async def test_a_cancelled_asynchronous_store_is_not_retried(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client returns its slots in the background."""
    keys = fresh("cancelled")
    begun, sending, cancelled = [], threading.Event(), threading.Event()
    original = part_streams.PartSender.pieces

    def pieces(source: Any, start: int, step: int) -> Iterator[Any]:
        begun.append(start)
        for piece in original(source, start, step):
            yield piece
            sending.set()
            cancelled.wait(TIMEOUT)

    monkeypatch.setattr(part_streams.PartSender, "pieces", pieces)
    async with async_client(server, timeouts=Timeouts(connect=60, call=60, transfer=600)) as client:
        store = asyncio.ensure_future(client.store(keys, [payload(key, PART) for key in keys]))
        await asyncio.to_thread(sending.wait, TIMEOUT)
        store.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await store
        await asyncio.to_thread(server.wait_for, lambda status: not status.stores)
    assert begun == [0]


async def test_hanging_streams_block_nothing_else(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's threads stay free, waiting streams can be cancelled, and `close` ends all."""
    keys = fresh("hanging", 1)
    store_all(client, keys)
    name = "_CONNECT_SECONDS"
    monkeypatch.setattr(socket_calls, name, DEFAULTS[socket_calls, name])
    async with async_client(server, timeouts=Timeouts(connect=60, call=60, transfer=600)) as other:
        pid = kill_bulk(server, signal.SIGSTOP)
        try:
            loads = [asyncio.ensure_future(other.load(keys, filled(1, PART))) for _ in range(80)]
            await asyncio.wait_for(asyncio.to_thread(int), 60)
            loads[-1].cancel()
            await asyncio.wait(loads[-1:], timeout=60)
            assert loads[-1].cancelled()
            await asyncio.wait_for(other.close(), 60)
            outcomes = await asyncio.wait_for(asyncio.gather(*loads[:-1], return_exceptions=True), 60)
        finally:
            os.kill(pid, signal.SIGCONT)
    # A stream that finds no connection in two seconds uses gRPC, and may end before `close`.
    assert {type(outcome) for outcome in outcomes} <= {NotConnected, SessionLost, int}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_stream_that_begins_while_sockets_are_given_up_uses_grpc(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool
) -> None:
    """The caller sees no error."""
    original = SocketConnector.search
    given_up: list[SocketStreams] = []

    def search(connector: SocketConnector, session: ClientSession) -> SocketStreams | None:
        pool = original(connector, session)
        if pool is not None and not given_up:
            given_up.append(pool)
            connector._disconnect(pool)
        return pool

    keys = fresh(f"given up {asynchronous}", 4)
    async with async_client(server) as other:
        if asynchronous:
            store_all(client, keys)
        monkeypatch.setattr(SocketConnector, "search", search)
        if asynchronous:
            assert await other.load(keys, filled(4, PART)) == 4
        else:
            store_all(client, keys)
    assert given_up


def test_a_refused_hello_makes_a_stream_use_grpc(server: ServerProcess, client: Client) -> None:
    """The client needs another connection while the server has no bulk process."""
    keys = fresh("refused", 4)
    pool = client._transport._sockets._streams  # type: ignore[attr-defined]
    for connection in pool._idle:
        connection.close()
    pool._idle.clear()
    with RawSession(server.endpoint, NAMESPACE, engine_id="raw") as session:
        kill_bulk(server)
        wait_until(lambda: not locate(session).unix_suffix)
    store_all(client, keys)
    assert_serves(client, keys)


@pytest.mark.slow
def test_a_slow_answer_to_the_first_hello_is_awaited(
    route: Route, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that retried too early would never reach a process that is short of processors."""
    keys = fresh("slow hello", 4)
    with route.session(NAMESPACE, "raw") as session:
        path = Path(str(route.address(session)))
    with delay_proxy(path, delay=3.0) as address:
        name = "_CONNECT_SECONDS"
        monkeypatch.setattr(socket_streams, name, DEFAULTS[socket_streams, name])
        host, _, port = address.partition(":")
        monkeypatch.setattr(SocketConnector, "_address", lambda *_: (host, int(port)))
        with Client(server.endpoint, namespace=NAMESPACE, transport="tcp") as client:
            wait_for_bulk(client)
            store_all(client, keys)
            assert_serves(client, keys)


def test_attempts_of_a_load_are_bounded(server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load whose frames always arrive damaged fails after a few attempts and leaves no lease."""
    keys = fresh("damaged", 4)
    store_all(client, keys)
    asked = []
    original = SocketStreams.pull
    monkeypatch.setattr(SocketStreams, "pull", lambda *given: (asked.append(given), original(*given)))
    monkeypatch.setattr(socket_streams, "checksum_on", lambda *_: 0)
    with pytest.raises(part_streams.ChecksumMismatch):  # type: ignore[attr-defined]
        client.load(keys, filled(len(keys), PART))
    assert len(asked) == part_streams.ATTEMPTS
    server.wait_for(lambda status: not status.leases)


def test_a_hanging_bulk_process_is_killed(route: Route, server: ServerProcess) -> None:
    """The server kills it if it does not answer for five seconds."""
    keys = fresh("killed", 12)
    with route.session(NAMESPACE, "killer") as session, route.open(session) as connection:
        store_id = prepare(session, keys)
        connection.send(push_call(store_id), *(data_frame(bytes(PART), number * PART) for number in range(8)))
        wait_until(lambda: locate(session, store_id).received_bytes)
        pid = kill_bulk(server, signal.SIGSTOP)
        discard = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, failed_items=range(12))
        session.cache.CompleteStore(discard, timeout=TIMEOUT / 2)
        assert bulk_pid(server.pid) != pid
        assert server.status().quarantined_bytes == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_bulk_process_ends_with_the_server(tmp_path: Path, number: int) -> None:
    """It ignores SIGTERM to all processes of the service, so that the server can drain.

    If the server is killed, no process and no memory of it remains.
    """
    keys = fresh("end", 4)
    with serving("unix", tmp_path) as route, route.client(NAMESPACE) as client:
        wait_for_bulk(client)
        pid = kill_bulk(route.server, signal.SIGTERM)
        store_all(client, keys)
        assert bulk_pid(route.server.pid) == pid
        if number == signal.SIGTERM:
            assert route.server.terminate() == 0
            assert not [*tmp_path.glob("s*")]
        else:
            route.server.kill()

        def over() -> bool:
            try:
                return not list(Path(f"/proc/{pid}/fd").iterdir())
            except OSError:  # its parent has collected the exit code
                return True

        wait_until(over)


async def test_the_bulk_process_starts_once_threads_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server cannot create a thread to watch its child, it tries again later."""
    lives: list[BulkProcess] = []
    lived = asyncio.Event()

    async def live(process: BulkProcess) -> None:
        lives.append(process)
        if len(lives) == 1:
            raise RuntimeError("can't start new thread")
        lived.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(BulkProcess, "_run_once", live)
    anything: Any = SimpleNamespace(
        received=None,
        limits=SimpleNamespace(max_frame_bytes=1),
        endpoints=(),
        bulk=BulkConfig(),
        tls=SimpleNamespace(cert=None),
    )
    process = BulkProcess(anything, anything, anything, anything)
    process.locate()
    await asyncio.wait_for(lived.wait(), TIMEOUT)
    await process.close()


@pytest.mark.slow
def test_a_slow_writer_keeps_its_store(tmp_path: Path) -> None:
    """A store lives as long as some of its bytes arrive now and then."""
    with (
        serving("unix", tmp_path, config="[leases]\ndefault = 2\n") as route,
        route.session(NAMESPACE, "slow") as session,
        route.open(session) as connection,
    ):
        store_id = prepare(session, fresh("slow", 1))
        connection.send(push_call(store_id))
        for offset, _ in zip(range(0, PART, PART // 16), polls(interval=0.25), strict=False):
            connection.send(data_frame(bytes(PART // 16), offset))
        connection.send(frames.pack_end(1))
        assert transfer_pb2.PushResponse.FromString(connection.answer()[1]).received_bytes == PART
        complete = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id)
        session.cache.CompleteStore(complete, timeout=TIMEOUT)


def test_streams_use_the_server_if_the_bulk_port_is_unreachable(tmp_path: Path) -> None:
    """A client that reaches only the server stores and loads.

    Others use the bulk process over TCP.
    """
    keys = fresh("firewall")
    with serving("tcp", tmp_path, region=128 * MIB, lmdb=16 * MIB) as route:
        with (
            delay_proxy(route.endpoint, host="127.0.0.2") as through_a_firewall,
            Client(through_a_firewall, namespace=NAMESPACE) as far,
            route.client(NAMESPACE) as near,
        ):
            far.wait_until_connected(60)
            wait_for_bulk(near)
            store_all(far, keys)
            assert_serves(far, keys)
            assert_serves(near, keys)
            assert not far._transport._sockets.found  # type: ignore[attr-defined]
        listening = listeners(bulk_pid(route.server.pid))
        assert listening
        assert listening <= {"0100007F", "0000000000000000FFFF00000100007F"}, "127.0.0.1, plain or mapped to IPv6"


def listeners(pid: int | None) -> set[str]:
    """Returns the addresses on which a process listens by TCP, in the kernel's notation."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


def test_a_configured_port_is_used(tmp_path: Path) -> None:
    """The next bulk process uses it again."""
    with (
        ReservedPort() as reserved,
        serving("tcp", tmp_path, config=f"[bulk]\ntcp_port = {reserved.number}") as route,
        route.session(NAMESPACE, "raw") as session,
    ):
        for _ in range(2):
            assert route.address(session) == ("127.0.0.1", reserved.number)
            route.open(session).socket.close()  # fails if the port belongs to a dead process
            pid = kill_bulk(route.server, 0)
            server_nice = os.getpriority(os.PRIO_PROCESS, route.server.pid)
            assert os.getpriority(os.PRIO_PROCESS, pid) >= min(server_nice + 1, 19), "19 is the kernel's maximum"
            kill_bulk(route.server)
            # The server then names a port only once the new process listens.
            wait_until(lambda: bulk_pid(route.server.pid) not in (None, pid))  # noqa: B023 - called here


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]", "localhost"])
def test_a_used_port_ends_the_start(tmp_path: Path, host: str) -> None:
    """A firewall would not know another port, and clients would silently be slower."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "kvtier.toml"
        config.write_text(f"insecure = true\nbulk.tcp_port = {port}\n")
        reason = refused_start(tmp_path, "--config", f"{config}", listen=f"{host}:0")
    assert reason == f"bulk.tcp_port = {port}: cannot listen on {host.strip('[]')}: Address already in use"


@pytest.mark.parametrize(
    ("listen", "clients"),
    {
        "[::]": ["127.0.0.1", "[::1]"],
        "0.0.0.0": ["127.0.0.1", "[::1]"],  # noqa: S104
        "localhost": ["127.0.0.1", "[::1]"],
        "[::1]": ["[::1]"],
        "127.0.0.1": ["127.0.0.1"],
    }.items(),
)
def test_clients_of_both_families_use_sockets(tmp_path: Path, listen: str, clients: list[str]) -> None:
    """The port for streams accepts the same families as the port of gRPC."""
    families = {family for family, *_ in socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)}
    if listen == "localhost" and len(families) < 2:
        clients = [host for host in clients if host.startswith("[") == (socket.AF_INET6 in families)]
    with launch(tmp_path, "--insecure", "--cpu-only", listen=f"{listen}:0") as server:
        [port] = server.wait_ready()["ports"]
        for host in clients:
            with Client(f"{host}:{port}", namespace=namespace_of(PART), transport="tcp") as client:
                wait_for_bulk(client)
        assert server.end() == 0


def test_connections_are_closed_while_no_bulk_process_runs(tmp_path: Path) -> None:
    """So clients use gRPC at once. A flood of connections costs the server nothing else."""
    with ReservedPort() as reserved, serving("tcp", tmp_path, config=f"[bulk]\ntcp_port = {reserved.number}") as route:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", reserved.number)) as connection:
                connection.settimeout(60)
                assert connection.recv(1) == b""
        assert bulk_pid(route.server.pid) is None
        with route.session(NAMESPACE, "raw") as session:
            route.open(session).socket.close()


def test_remote_clients_use_grpc_without_a_port(tmp_path: Path) -> None:
    """A client that prefers sockets streams over gRPC, and its status says so."""
    keys = fresh("no port", 4)
    with serving("tcp", tmp_path, config="[bulk]\ntcp = false") as route, route.client(NAMESPACE) as client:
        client.wait_until_connected(60)
        with route.session(NAMESPACE, "raw") as session:
            assert route.address(session) == ("127.0.0.1", 0)
        store_all(client, keys)
        assert_serves(client, keys)
        assert client.transport == "grpc"


class _AcceptingServer(Channel):
    """A server that accepts every hello and answers nothing else."""

    def __init__(self) -> None:
        connection: Any = None
        super().__init__(connection)
        self.broker: Any = None

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        message = None if "slower" in header else decode_from_child(payload)
        if isinstance(message, Handshake):
            threading.Thread(target=self.broker._take, args=(Accepted(message.stream, "acme"),)).start()

    def __iter__(self) -> Iterator[Any]:
        threading.Event().wait()
        yield


def broker_client_of() -> BrokerClient:
    channel: Any = _AcceptingServer()
    channel.broker = BrokerClient(channel)
    broker: BrokerClient = channel.broker
    return broker


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Returns a server of streams in this process, with two connections and short time-outs."""
    monkeypatch.setattr(connection_places, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(broker_client, "_FIRST_SECONDS", 0.3)
    monkeypatch.setattr(broker_client, "_WATCH_SECONDS", 0.05)
    broker = broker_client_of()
    threading.Thread(target=broker._watch, daemon=True).start()
    unused: Any = None
    [listener] = bind_tcp(["127.0.0.1"], 0)
    StreamServer(broker, unused, LimitConfig(max_frame_bytes=PART), unused).serve(listener)
    return listener.getsockname()


def test_idle_connections_make_room(address: tuple[str, int]) -> None:
    """A connection beyond the limit replaces the one that was idle longest."""
    with contextlib.ExitStack() as opened:
        connections = [opened.enter_context(RawSocket(address, HELLO)) for _ in range(2)]
        assert [each.answer() for each in connections] == [(0, b"")] * 2
        connections.append(opened.enter_context(RawSocket(address, HELLO)))
        assert connections[2].answer() == (0, b"")
        ended = wait_until(lambda: [each for each in connections if is_readable(each)])
        assert len(ended) == 1
        assert ended[0] is not connections[2]
        assert ended[0].is_ended()


def test_an_ended_connection_makes_room(address: tuple[str, int]) -> None:
    """More connections than the limit, one after another, are all served."""
    for _ in range(4):
        with RawSocket(address, HELLO) as connection:
            assert connection.answer() == (0, b"")


def is_readable(connection: RawSocket) -> bool:
    """Returns whether bytes or the end of a connection have arrived."""
    connection.socket.setblocking(False)
    try:
        connection.socket.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        connection.socket.settimeout(TIMEOUT)
    return True


def test_a_slow_request_is_closed(address: tuple[str, int]) -> None:
    """An incomplete request occupies a thread briefly, even if some bytes arrive regularly."""
    with RawSocket(address, HELLO) as connection:
        assert connection.answer() == (0, b"")
        connection.send(frames.pack_call(1, frames.PUSH, bytes(1000))[:20])
        with pytest.raises(ConnectionError):  # noqa: PT012 - one of many sends
            for _ in polls(TIMEOUT, 0.1):
                connection.send(b"x")


def test_a_connection_without_a_thread_is_closed(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be created, the connection is closed; the next one is served normally."""
    starts: list[threading.Thread] = []
    original = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "kvtier-stream":
            starts.append(thread)
            if len(starts) < 4:
                raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(3):
        with RawSocket(address) as connection:
            assert connection.is_ended()
    with RawSocket(address, HELLO) as connection:
        assert connection.answer() == (0, b"")


def test_streams_without_progress_are_late() -> None:
    """A long stream at a normal rate is not late; repeating the same bytes is not progress."""
    stream = broker_client_of().open(Caller(b"", 1, None, [], is_local=True), lambda: None)
    began = stream._began_at
    assert not stream.is_too_slow(began + 9)
    assert stream.is_too_slow(began + 11)
    stream.sizes = [100 << 20]
    assert not stream.is_too_slow(began + 29)
    assert stream.is_too_slow(began + 31)
    stream.received = 50 << 20
    assert not stream.is_too_slow(began + 79)
    assert stream.is_too_slow(began + 81)
    stream.received = 1 << 40
    assert stream.is_too_slow(began + 131)


def test_slow_bytes_do_not_extend_the_deadline() -> None:
    """A stream ends at its deadline, even if some bytes arrive regularly."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                hello = frames.unpack_hello(connection.recv(frames.HELLO_BYTES, socket.MSG_WAITALL))
                connection.sendall(frames.pack_answer(hello.number, 0))
                head = connection.recv(frames.HEAD_BYTES, socket.MSG_WAITALL)
                while not ended.wait(0.1):
                    connection.sendall(data_frame(b"x", number=frames.unpack_head(head)[2]))

        thread = threading.Thread(target=serve)
        thread.start()
        target = SocketTarget(("127.0.0.1", listener.getsockname()[1]), REF, Credentials())
        pool = SocketStreams(target)
        memory = bytearray(PART)
        sink = part_streams.PartReceiver([address_of(memory)[0]], [PART])
        session = ClientSession(REF, session_pb2.CapabilitiesResponse(), None, "")
        pull = Pull(session, transfer_pb2.PullRequest(), sink, 1.0)
        started = time.monotonic()
        timer = threading.Timer(TIMEOUT, ended.set)
        timer.start()
        try:
            with pytest.raises(DeadlineExceeded):
                pool.pull(pull)
        finally:
            ended.set()
            timer.cancel()
            thread.join()
        assert time.monotonic() - started < TIMEOUT / 2


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_stopped_bulk_process_delays_streams_only_briefly(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool
) -> None:
    """After a SIGSTOP of the process, loads and stores use gRPC long before their time-out."""
    keys, more = fresh(f"stopped {asynchronous}", 2), fresh(f"stopped too {asynchronous}", 2)
    monkeypatch.setattr(socket_streams, "_STALL_SECONDS", 0.5)
    monkeypatch.setattr(socket_calls, "_CONNECT_SECONDS", DEFAULTS[socket_calls, "_CONNECT_SECONDS"])
    store_all(client, keys)
    buffers = filled(len(keys), PART)
    async with async_client(server, timeouts=Timeouts(connect=60, call=60, transfer=600)) as other:
        pid = kill_bulk(server, signal.SIGSTOP)
        try:
            if asynchronous:
                found = await asyncio.wait_for(other.load(keys, buffers), 120)
                stored = await asyncio.wait_for(other.store(more, [payload(key, PART) for key in more]), 120)
            else:
                found = await asyncio.to_thread(client.load, keys, buffers)
                stored = await asyncio.to_thread(client.store, more, [payload(key, PART) for key in more])
        finally:
            with contextlib.suppress(ProcessLookupError):  # killed at the end of the store
                os.kill(pid, signal.SIGCONT)
    assert found == len(keys)
    assert all(is_payload(key, part) for key, part in zip(keys, buffers, strict=True))
    assert set(stored) == {StoreStatus.GRANTED}


@pytest.mark.parametrize("ends", [True, False])
async def test_streams_that_begin_again_are_not_stuck(monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> None:
    """A client can begin streams of a store again and again. A kill ends those of all tenants."""
    monkeypatch.setattr(supervisor, "_ROUND_SECONDS", 0.01)
    loop, kills, jump = asyncio.get_running_loop(), list[str](), 0.0
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + jump)
    rounds = iter(["ends", "slow"] if ends else ["slow"])

    def streams(_: int) -> list[asyncio.Event]:
        nonlocal jump
        jump = supervisor._DETACH_SECONDS
        stream, detached = next(rounds, None), asyncio.Event()
        if stream == "ends":
            detached.set()
        return [detached] if stream else []

    async def idle(_: int) -> None: ...

    broker: Any = SimpleNamespace(end_streams_of_store=streams, writers=SimpleNamespace(idle=idle))
    anything: Any = SimpleNamespace(limits=None, bulk=None, endpoints=(), tls=SimpleNamespace(cert=None))
    process = BulkProcess(anything, anything, broker, anything)
    child: Any = SimpleNamespace(kill=lambda: kills.append("killed"), send=lambda *_: None)
    process._child = child
    await process.end_writers(1)
    assert kills == ([] if ends else ["killed"])
