"""The bulk process: streams, slots and the server if it is killed, hangs or is unreachable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import xxhash
from harness.bulk import bulk_pid, bulk_streams, locate, wait_for_bulk, wait_until_received
from harness.delay_proxy import delay_proxy
from harness.long_timeouts import DEFAULTS, wait_until
from harness.payloads import assert_serves, filled, is_payload, key_of, namespace_of, payload
from harness.push_frames import encode_push_frame
from harness.raw import RawSession, refusal_of
from harness.server_process import MIB, ServerProcess
from harness.signals import stop

from kvtier.client import AsyncClient, Client, NotConnected, SessionLost, StoreStatus, Timeouts, part_streams
from kvtier.client.transport import bulk_connector
from kvtier.client.transport.bulk_connector import BulkConnector, BulkStreams, GrpcStreams
from kvtier.protos.endpoint import parse_endpoint
from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.wire.grpc_frames import decode_pull_frame
from kvtier.server.bulk import supervisor
from kvtier.server.bulk.supervisor import BulkProcess
from kvtier.server.config.schema import BulkConfig

PART = 1 * MIB
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(48)]
TIMEOUT = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Yields a server whose region holds 128 blocks."""
    with ServerProcess(tmp_path, region=128 * MIB, lmdb=16 * MIB) as process:
        yield process.start()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """Yields a client whose streams go to the bulk process."""
    with Client(server.endpoint, namespace=NAMESPACE, transport="grpc") as client:
        client.wait_until_connected(60)
        wait_for_bulk(client)
        yield client


@pytest.fixture
def session(server: ServerProcess) -> Iterator[RawSession]:
    """Yields a session that calls RPCs directly; its streams go to the bulk process."""
    with (
        RawSession(server.endpoint, NAMESPACE, engine_id="raw") as session,
        bulk_streams(session, server.endpoint),
    ):
        yield session


def store_all(client: Client, keys: list[bytes] = KEYS) -> None:
    """Stores blocks with payloads that depend on the key."""
    assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}


def prepare(session: RawSession, keys: list[bytes] = KEYS) -> int:
    """Prepares a store of these blocks; returns its id."""
    request = cache_pb2.PrepareStoreRequest(session=session.ref, keys=keys)
    store_id: int = session.cache.PrepareStore(request, timeout=TIMEOUT).store_id
    assert store_id
    return store_id


def frame_of(session: RawSession, store_id: int, data: bytes, offset: int = 0) -> bytes:
    """Returns one frame of a store."""
    return encode_push_frame(offset, xxhash.xxh3_64_intdigest(data), [data], session=session.ref, store_id=store_id)


@contextlib.contextmanager
def pushing(session: RawSession, store_id: int) -> Iterator[Any]:
    """Yields a stream that has sent one frame to a store, and sends more when `more` is called."""
    go_on = threading.Event()

    def frames() -> Iterator[bytes]:
        for number in range(9):  # the server sees 8 MiB of them
            yield frame_of(session, store_id, b"\xee" * PART, number * PART)
        go_on.wait(TIMEOUT)
        yield frame_of(session, store_id, b"\xee" * PART, 9 * PART)

    call = session.push.future(frames(), timeout=TIMEOUT)  # type: ignore[attr-defined]
    call.go_on = go_on.set
    wait_until(lambda: locate(session, store_id).received_bytes)
    assert not call.done()
    try:
        yield call
    finally:
        go_on.set()
        call.cancel()


def kill_bulk(server: ServerProcess, number: int = signal.SIGKILL) -> int:
    """Sends a signal to the bulk process; returns its pid."""
    pid = bulk_pid(server.pid)
    assert pid is not None
    if number == signal.SIGSTOP:
        stop(pid)
    else:
        os.kill(pid, number)
    return pid


def cut_bulk(server: ServerProcess) -> None:
    """Closes the connection between this process and the bulk process."""
    cut = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            if connection.getpeername() == f"{server.path}.bulk":
                connection.shutdown(socket.SHUT_RDWR)
                cut += 1
    assert cut


BREAKS: dict[str, Callable[[ServerProcess], object]] = {"process": kill_bulk, "connection": cut_bulk}


def count_asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Returns a list that collects the items of every Pull."""
    asked: list[list[int]] = []
    original = GrpcStreams.pull

    def pull(self: GrpcStreams, effect: Any, *rest: Any) -> None:
        asked.append(list(effect.request.items))
        original(self, effect, *rest)

    monkeypatch.setattr(GrpcStreams, "pull", pull)
    return asked


@pytest.mark.parametrize("what", BREAKS)
def test_an_interrupted_load_resumes(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After process or connection end, only the missing blocks are requested again (B4)."""
    store_all(client)
    asked = count_asked(monkeypatch)
    taken: list[int] = []
    original = part_streams.PartReceiver.take

    def take(sink: Any, message: bytes) -> None:
        original(sink, message)
        taken.append(len(message))
        if len(taken) == 8:
            BREAKS[what](server)

    monkeypatch.setattr(part_streams.PartReceiver, "take", take)
    buffers = filled(len(KEYS), PART)
    assert client.load(KEYS, buffers) == len(KEYS)
    assert all(is_payload(key, found) for key, found in zip(KEYS, buffers, strict=True))
    assert asked[0] == [*range(len(KEYS))]
    assert len(asked) == 2
    assert 0 < len(asked[1]) <= len(KEYS) - 8
    assert asked[1] == [*range(len(KEYS) - len(asked[1]), len(KEYS))]


def test_an_interrupted_asynchronous_load_resumes(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    original = part_streams.PartReceiver.take

    def take(sink: Any, message: bytes) -> None:
        original(sink, message)
        taken.append(len(message))
        if len(taken) == 8:
            kill_bulk(server)

    async def run() -> None:
        async with AsyncClient(server.endpoint, namespace=NAMESPACE, transport="grpc") as client:
            await client.wait_until_connected(60)
            await asyncio.to_thread(wait_for_bulk, client)
            await client.store(KEYS, [payload(key, PART) for key in KEYS])
            monkeypatch.setattr(part_streams.PartReceiver, "take", take)
            buffers = filled(len(KEYS), PART)
            assert await client.load(KEYS, buffers) == len(KEYS)
            assert all(is_payload(key, found) for key, found in zip(KEYS, buffers, strict=True))

    asyncio.run(run())


def test_a_cancelled_asynchronous_store_is_not_retried(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are returned at once."""
    begun, sending = [], threading.Event()
    original = part_streams.PartSender.frames

    def frames(source: Any, start: int, step: int, *, complete: bool) -> Iterator[bytes]:
        begun.append(start)
        for frame in original(source, start, step, complete=complete):
            yield frame
            sending.set()
            time.sleep(0.05)

    async def run() -> None:
        async with AsyncClient(server.endpoint, namespace=NAMESPACE, transport="grpc") as client:
            await client.wait_until_connected(60)
            await asyncio.to_thread(wait_for_bulk, client)
            store = asyncio.ensure_future(client.store(KEYS, [payload(key, PART) for key in KEYS]))
            await asyncio.to_thread(sending.wait, TIMEOUT)
            store.cancel()
            with pytest.raises(asyncio.CancelledError):
                await store
            assert (await client.status()).stores == 0

    monkeypatch.setattr(part_streams.PartSender, "frames", frames)
    asyncio.run(run())
    assert begun == [0]


def test_hanging_streams_block_nothing_else(server: ServerProcess, client: Client) -> None:
    """The loop's threads stay free, waiting streams can be cancelled, and `close` ends all."""
    store_all(client)

    async def run() -> None:
        timeouts = Timeouts(connect=60, call=60, transfer=600)
        other = AsyncClient(server.endpoint, namespace=NAMESPACE, transport="grpc", timeouts=timeouts)
        await other.wait_until_connected(60)
        await asyncio.to_thread(wait_for_bulk, other)
        pid = kill_bulk(server, signal.SIGSTOP)
        try:
            loads = [asyncio.ensure_future(other.load(KEYS[:1], filled(1, PART))) for _ in range(80)]
            await asyncio.to_thread(wait_until, lambda: server.status().leases == len(loads))
            await asyncio.wait_for(asyncio.to_thread(time.sleep, 0), 60)
            loads[-1].cancel()
            await asyncio.wait(loads[-1:], timeout=60)
            assert loads[-1].cancelled()
            await asyncio.wait_for(other.close(), 60)
            outcomes = await asyncio.wait_for(asyncio.gather(*loads[:-1], return_exceptions=True), 60)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert {type(outcome) for outcome in outcomes} <= {NotConnected, SessionLost}

    asyncio.run(run())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_on_an_abandoned_channel_takes_the_other_route(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool
) -> None:
    """The caller sees no error of gRPC."""
    original = BulkConnector.monitored

    @contextlib.contextmanager
    def monitored(route: BulkConnector, streams: BulkStreams) -> Iterator[None]:
        route._disconnect(streams)
        with original(route, streams):
            yield

    async def run() -> None:
        async with AsyncClient(server.endpoint, namespace=NAMESPACE, transport="grpc") as other:
            await other.wait_until_connected(60)
            await asyncio.to_thread(wait_for_bulk, other)
            monkeypatch.setattr(BulkConnector, "monitored", monitored)
            assert await other.load(KEYS[:4], filled(4, PART)) == 4

    store_all(client)
    if asynchronous:
        asyncio.run(run())
        return
    monkeypatch.setattr(BulkConnector, "monitored", monitored)
    keys = [key_of(number, salt="given up") for number in range(4)]
    store_all(client, keys)
    assert_serves(client, keys)


@pytest.mark.parametrize("what", BREAKS)
def test_an_interrupted_store_resumes(
    server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """After process or connection end, only frames that may be missing are sent again."""
    starts: list[int] = []
    original = part_streams.PartSender.frames

    def frames(source: Any, start: int, step: int, *, complete: bool) -> Iterator[bytes]:
        starts.append(start)
        for number, frame in enumerate(original(source, start, step, complete=complete)):
            if number == 30 and not start:
                wait_until_received(client, source, 20 * MIB)
                BREAKS[what](server)
            yield frame

    monkeypatch.setattr(part_streams.PartSender, "frames", frames)
    store_all(client)
    assert starts[0] == 0
    assert len(starts) == 2
    assert 20 * MIB <= starts[1] < 31 * MIB
    monkeypatch.undo()
    assert_serves(client, KEYS)


def test_a_slow_handshake_with_the_bulk_process_succeeds(
    server: ServerProcess, session: RawSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that retried too early would never reach a process that is short of processors."""
    suffix = wait_until(lambda: locate(session).socket_suffix)
    with delay_proxy(Path(f"{server.path}{suffix}"), delay=3.0) as address:
        monkeypatch.setattr(bulk_connector, "_CONNECT_SECONDS", DEFAULTS[bulk_connector, "_CONNECT_SECONDS"])
        monkeypatch.setattr(BulkConnector, "_endpoint_of", lambda *_: parse_endpoint(address))
        with Client(server.endpoint, namespace=NAMESPACE, transport="grpc") as client:
            client.wait_until_connected(60)
            wait_for_bulk(client)
            store_all(client)
            assert_serves(client, KEYS)


def test_attempts_of_a_load_are_bounded(server: ServerProcess, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load whose frames always arrive damaged fails after a few attempts and leaves no lease."""
    store_all(client)
    asked = count_asked(monkeypatch)
    monkeypatch.setattr(part_streams.xxhash, "xxh3_64_intdigest", lambda _: 0)
    with pytest.raises(part_streams.ChecksumMismatch):
        client.load(KEYS, filled(len(KEYS), PART))
    assert len(asked) == part_streams.ATTEMPTS
    server.wait_for(lambda status: not status.leases)


def test_a_killed_bulk_process_is_replaced(server: ServerProcess, client: Client) -> None:
    """Clients find the new process, and stores in the meantime succeed."""
    before = kill_bulk(server)
    store_all(client)
    wait_until(lambda: bulk_pid(server.pid) not in (None, before))
    wait_for_bulk(client)
    assert_serves(client, KEYS)
    assert server.alive


@pytest.mark.usefixtures("client")
def test_the_bulk_process_ends_with_the_server(server: ServerProcess) -> None:
    """Also if the server is killed, no process and no memory of it remains."""
    pid = bulk_pid(server.pid)
    server.kill()

    def over() -> bool:
        try:
            return not list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # its parent has collected the exit code
            return True

    wait_until(over)


def test_the_bulk_process_ignores_sigterm(server: ServerProcess, client: Client) -> None:
    """SIGTERM to all processes of the service lets the server drain; the child runs until then."""
    pid = kill_bulk(server, signal.SIGTERM)
    store_all(client)
    assert bulk_pid(server.pid) == pid
    assert server.terminate() == 0
    assert not Path(f"{server.path}.bulk").exists()


def test_slots_of_an_ended_session_are_reused_when_no_stream_can_write(
    server: ServerProcess, session: RawSession
) -> None:
    """The slots stay reserved while a stream might still write to them, and no longer (B4.5)."""
    store_id = prepare(session)
    with pushing(session, store_id):
        pid = kill_bulk(server, signal.SIGSTOP)
        session.end()
        server.wait_for(lambda status: status.quarantined_bytes == len(KEYS) * PART)
        time.sleep(0.5)
        assert server.status().quarantined_bytes == len(KEYS) * PART
        os.kill(pid, signal.SIGCONT)
        server.wait_for(lambda status: status.quarantined_bytes == 0)


def test_slots_are_free_after_the_bulk_process_ends(server: ServerProcess, session: RawSession) -> None:
    """All its writers have ended with it."""
    store_id = prepare(session)
    with pushing(session, store_id) as call:
        pid = kill_bulk(server, signal.SIGSTOP)
        session.end()
        server.wait_for(lambda status: status.quarantined_bytes == len(KEYS) * PART)
        os.kill(pid, signal.SIGKILL)
        server.wait_for(lambda status: status.quarantined_bytes == 0)
        assert refusal_of(call.exception())[0] == "UNAVAILABLE"


def test_a_completion_waits_for_the_streams_of_its_store(session: RawSession) -> None:
    """A late frame must not reach a slot that already belongs to another block."""
    store_id = prepare(session)
    with pushing(session, store_id) as call:
        complete = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id)
        session.cache.CompleteStore(complete, timeout=TIMEOUT)
        call.go_on()
        assert refusal_of(call.exception()) == ("NOT_FOUND", "STORE_NOT_FOUND")
    lookup = cache_pb2.LookupRequest(session=session.ref, keys=KEYS[:2], mode=cache_pb2.LOOKUP_MODE_EACH)
    lease = session.cache.Lookup(lookup, timeout=TIMEOUT)
    pull = transfer_pb2.PullRequest(session=session.ref, lease_id=lease.lease_id, items=[0])
    found = b"".join(bytes(decode_pull_frame(frame)[1]) for frame in session.pull(pull, timeout=TIMEOUT))
    assert found == b"\xee" * PART


def test_repeated_bytes_do_not_complete_a_store(session: RawSession) -> None:
    """A store that received one half twice is incomplete."""
    store_id = prepare(session, KEYS[:2])
    frame = transfer_pb2.PushRequest(complete=True).SerializeToString()
    frame += frame_of(session, store_id, b"\xee" * PART)
    answer = session.push(iter([frame, frame]), timeout=TIMEOUT)
    assert (answer.received_bytes, answer.completed) == (2 * PART, False)


def test_a_hanging_bulk_process_is_killed(server: ServerProcess, session: RawSession) -> None:
    """It delays the end of a store by less than a client's call timeout."""
    store_id = prepare(session)
    with pushing(session, store_id):
        pid = kill_bulk(server, signal.SIGSTOP)
        abort = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, abort=True)
        session.cache.CompleteStore(abort, timeout=TIMEOUT / 2)
        assert Timeouts.__dataclass_fields__["call"].default / 2 >= supervisor._END_SECONDS
        assert bulk_pid(server.pid) != pid
    assert server.status().quarantined_bytes == 0
    prepare(session)


def test_the_bulk_process_starts_once_threads_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server cannot create a thread to watch its child, it tries again later."""
    lives: list[BulkProcess] = []

    async def run() -> None:
        lived = asyncio.Event()

        async def live(process: BulkProcess) -> None:
            lives.append(process)
            if len(lives) == 1:
                raise RuntimeError("can't start new thread")
            lived.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(BulkProcess, "_run_once", live)
        anything: Any = SimpleNamespace(
            received=None, limits=None, endpoints=(), bulk=BulkConfig(), tls=SimpleNamespace(cert=None)
        )
        process = BulkProcess(anything, anything, anything, anything)
        process.endpoints()
        await asyncio.wait_for(lived.wait(), TIMEOUT)
        await process.close()

    asyncio.run(run())


def test_a_slow_writer_keeps_its_store(tmp_path: Path) -> None:
    """A store lives as long as some of its bytes arrive now and then."""
    with (
        ServerProcess(tmp_path, config="[leases]\ndefault = 2\n").start() as server,
        RawSession(server.endpoint, NAMESPACE, engine_id="slow") as session,
        bulk_streams(session, server.endpoint),
    ):
        store_id = prepare(session, KEYS[:1])

        def frames() -> Iterator[bytes]:
            for number in range(16):
                time.sleep(0.25)
                yield frame_of(session, store_id, b"\xee" * (PART // 16), number * PART // 16)

        assert session.push(frames(), timeout=TIMEOUT).received_bytes == PART
        complete = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id)
        session.cache.CompleteStore(complete, timeout=TIMEOUT)


def test_a_slow_reader_needs_little_memory(server: ServerProcess, session: RawSession) -> None:
    """Of 600 MiB that a client does not read, the process buffers a few frames.

    Other clients are served.
    """
    with Client(server.endpoint, namespace=NAMESPACE) as writer:
        writer.wait_until_connected(60)
        store_all(writer)
        lookup = cache_pb2.LookupRequest(session=session.ref, keys=KEYS)
        lease = session.cache.Lookup(lookup, timeout=TIMEOUT)
        items = [*range(len(KEYS))] * 12
        pid = bulk_pid(server.pid)
        before = own_bytes(pid)
        request = transfer_pb2.PullRequest(session=session.ref, lease_id=lease.lease_id, items=items)
        stalled = [session.pull(request, timeout=TIMEOUT) for _ in range(4)]
        for stream in stalled:
            next(stream)
        time.sleep(1)
        assert own_bytes(pid) < before + 100 * MIB
        with Client(server.endpoint, namespace=NAMESPACE, transport="grpc") as reader:
            reader.wait_until_connected(60)
            wait_for_bulk(reader)
            assert_serves(reader, KEYS)
        for stream in stalled:
            stream.cancel()


def own_bytes(pid: int | None) -> int:
    """Returns the anonymous resident memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_only_the_owner_can_connect(server: ServerProcess, session: RawSession) -> None:
    """Its socket has the mode 0600, like the server's."""
    assert Path(f"{server.path}.bulk").stat().st_mode & 0o777 == 0o600
    assert locate(session).port == 0


def test_streams_use_the_server_if_the_bulk_port_is_unreachable(tmp_path: Path) -> None:
    """A client that reaches only the server stores and loads.

    Others use the bulk process over TCP.
    """
    with ServerProcess(tmp_path, region=128 * MIB, lmdb=16 * MIB, tcp=True).start() as server:
        with (
            delay_proxy(server.tcp, host="127.0.0.2") as through_a_firewall,
            Client(through_a_firewall, namespace=NAMESPACE, transport="grpc") as far,
            Client(server.tcp, namespace=NAMESPACE, transport="grpc") as near,
        ):
            far.wait_until_connected(60)
            near.wait_until_connected(60)
            wait_for_bulk(near)
            store_all(far)
            assert not far._transport._bulk.found  # type: ignore[attr-defined]
            assert_serves(far, KEYS)
            assert_serves(near, KEYS)
            assert not far._transport._bulk.found  # type: ignore[attr-defined]
        listening = listeners(bulk_pid(server.pid))
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


def test_streams_beyond_the_limit_are_refused(server: ServerProcess, session: RawSession) -> None:
    """Stalled streams occupy all 64 threads; meanwhile clients stream through the server itself."""
    store_ids = [prepare(session, [key_of(number, salt="many")]) for number in range(70)]
    with contextlib.ExitStack() as stack, Client(server.endpoint, namespace=NAMESPACE, transport="grpc") as client:
        client.wait_until_connected(60)
        wait_for_bulk(client)
        go_on = threading.Event()

        def frames(store_id: int) -> Iterator[bytes]:
            yield frame_of(session, store_id, b"x")
            go_on.wait(TIMEOUT)

        calls = [session.push.future(frames(store_id), timeout=TIMEOUT) for store_id in store_ids]  # type: ignore[attr-defined]
        stack.callback(lambda: [call.cancel() for call in calls])
        stack.callback(go_on.set)
        wait_until(lambda: sum(call.done() for call in calls) == 6)
        assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        store_all(client, KEYS[:8])
        assert_serves(client, KEYS[:8])
