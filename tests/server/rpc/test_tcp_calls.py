"""The TCP port for plain sockets: calls of remote clients, connection limits, and settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.bulk import bulk_pid, locate, wait_for_bulk
from harness.long_timeouts import wait_until
from harness.payloads import assert_serves, filled, is_payload, key_of, namespace_of, payload
from harness.ports import ReservedPort
from harness.raw import RawSession
from harness.server_process import MIB, ServerProcess

from kvtier.client import AsyncClient, Client, StoreStatus
from kvtier.protos.v1 import common_pb2, transfer_pb2
from kvtier.protos.wire import tcp_frames
from kvtier.protos.wire.attach import REPLY_BYTES, Purpose, pack_request, unpack_reply
from kvtier.protos.wire.call_frames import pack_call, unpack_answer, unpack_length
from kvtier.server.bulk import broker_client as control_module
from kvtier.server.bulk import tcp_streams as plain_module
from kvtier.server.bulk.broker_client import BrokerClient
from kvtier.server.bulk.tcp_streams import TcpStreamServer

PART = 64 << 10
NAMESPACE = namespace_of(PART)
TIMEOUT = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server that also listens on TCP."""
    with ServerProcess(tmp_path_factory.mktemp("calls"), region=32 * MIB, lmdb=16 * MIB, tcp=True) as process:
        yield process.start()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[RawSession]:
    """Yields a session without a client."""
    with RawSession(server.tcp, NAMESPACE, engine_id="raw") as session:
        yield session


def connect(port: int, ref: common_pb2.SessionRef, purpose: Purpose = Purpose.CALLS) -> socket.socket:
    """Returns a connection that has sent a first message with this purpose."""
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT)
    connection.sendall(pack_request(ref.session_id, ref.epoch, purpose))
    return connection


def port_of(session: RawSession) -> int:
    """Returns the port for plain sockets."""
    port: int = wait_until(lambda: locate(session).plain_port)
    return port


def received(connection: socket.socket) -> bytes:
    """Returns the bytes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            data += piece
    return data


def test_remote_calls_use_the_port_of_streams(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote client makes no gRPC call once it knows the port, and reports its transport."""
    keys = [key_of(number, salt="calls") for number in range(8)]
    with Client(server.tcp, namespace=NAMESPACE, engine_id="calls", transport="tcp") as client:
        client.wait_until_connected(60)
        wait_for_bulk(client)
        assert client.transport == "tcp"
        monkeypatch.setattr(client._transport, "_calls", {})
        assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}
        buffers = filled(len(keys), PART)
        assert client.load(keys, buffers) == len(keys)
        assert all(is_payload(key, found) for key, found in zip(keys, buffers, strict=True))
        session = client._transport.session
        assert session is not None
        assert session.calls is not None
        assert session.transport_reason == "set by the client"
        request = transfer_pb2.LocateRequest(session=session.ref)
        answer = session.calls.call("TransferService/Locate", request.SerializeToString(), TIMEOUT)
        assert answer is not None
        assert transfer_pb2.LocateResponse.FromString(answer).plain_port
        # The session of the previous test may still be closing.
        mine = [session.transport for session in server.status().sessions if session.engine_id == "calls"]
        assert mine == ["tcp"]


def test_remote_asyncio_calls_use_the_port(server: ServerProcess) -> None:
    keys = [key_of(number, salt="aio") for number in range(8)]

    async def run() -> None:
        async with AsyncClient(server.tcp, namespace=NAMESPACE, transport="tcp") as client:
            await client.wait_until_connected(60)
            await asyncio.to_thread(wait_for_bulk, client)
            session = client._transport.session
            while session is None or session.calls is None:
                await client.lookup(keys)
                await asyncio.sleep(0.01)
                session = client._transport.session
            assert client.transport == "tcp"
            client._transport._calls = {}
            await client.store(keys, [payload(key, PART) for key in keys])
            buffers = filled(len(keys), PART)
            assert await client.load(keys, buffers) == len(keys)
            assert all(is_payload(key, found) for key, found in zip(keys, buffers, strict=True))

    asyncio.run(run())


def test_refused_connections(session: RawSession) -> None:
    """Calls need a session, and the region is never handed out over TCP."""
    port = port_of(session)
    stranger = common_pb2.SessionRef(session_id=b"x" * 16, epoch=session.ref.epoch)
    for ref, purpose in ((stranger, Purpose.CALLS), (session.ref, Purpose.REGION)):
        with connect(port, ref, purpose) as connection:
            reply = received(connection)
        assert not reply or unpack_reply(reply) is None


def test_a_connection_for_calls_ends_with_its_session(server: ServerProcess, session: RawSession) -> None:
    """The server itself owns it: it outlives the bulk process that accepted it."""
    with connect(port_of(session), session.ref) as connection:
        assert unpack_reply(connection.recv(REPLY_BYTES, socket.MSG_WAITALL)) is not None
        pid = bulk_pid(server.pid)
        assert pid is not None
        os.kill(pid, 9)
        wait_until(lambda: bulk_pid(server.pid) not in (None, pid))
        request = transfer_pb2.LocateRequest(session=session.ref)
        connection.sendall(pack_call(b"TransferService/Locate", request.SerializeToString()))
        length = unpack_length(connection.recv(4, socket.MSG_WAITALL))
        assert unpack_answer(connection.recv(length, socket.MSG_WAITALL))[0] == 0
        session.end()
        assert received(connection) == b""


def test_configured_ports_are_used(tmp_path: Path) -> None:
    """Both ports are used again by the next bulk process."""
    with contextlib.ExitStack() as opened:
        ports = [opened.enter_context(ReservedPort()).number for _ in range(2)]
        config = f"[bulk]\ntcp_port = {ports[0]}\ngrpc_port = {ports[1]}"
        server = opened.enter_context(ServerProcess(tmp_path, config=config, tcp=True).start())
        session = opened.enter_context(RawSession(server.tcp, NAMESPACE, engine_id="raw"))
        for _ in range(2):
            port_of(session)
            where = locate(session)
            assert [where.plain_port, where.port] == ports
            # fails if the port belongs to a dead process
            socket.create_connection(("127.0.0.1", where.plain_port), TIMEOUT).close()
            pid = bulk_pid(server.pid)
            assert pid is not None
            assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, server.pid)
            os.kill(pid, 9)
            # After the restart the server has noticed the end, and names a port only once the new
            # process listens.
            wait_until(lambda: bulk_pid(server.pid) not in (None, pid))  # noqa: B023 - called here


def test_a_used_port_is_not_replaced(tmp_path: Path) -> None:
    """A firewall would not know another port."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        ServerProcess(tmp_path, config=f"[bulk]\ntcp_port = {taken.getsockname()[1]}", tcp=True).start() as server,
        RawSession(server.tcp, NAMESPACE, engine_id="raw") as session,
    ):
        wait_until(lambda: locate(session).port)
        assert not locate(session).plain_port


def test_streams_use_grpc_without_plain_sockets(tmp_path: Path) -> None:
    """A client that prefers plain sockets streams over gRPC, and its status says so."""
    keys = [key_of(number) for number in range(4)]
    with (
        ServerProcess(tmp_path, config="[bulk]\ntcp = false", tcp=True).start() as server,
        Client(server.tcp, namespace=NAMESPACE, transport="tcp") as client,
    ):
        client.wait_until_connected(60)
        wait_for_bulk(client)
        assert client.transport == "grpc"
        client.store(keys, [payload(key, PART) for key in keys])
        assert_serves(client, keys)


class _SilentServer:
    """A server that sends and receives nothing."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, _: object, payload: bytes) -> None:
        self.said.append(payload)

    def __iter__(self) -> Iterator[Any]:
        threading.Event().wait()
        yield


@pytest.fixture
def plain_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a server in this process with two connections at most and short timeouts."""
    monkeypatch.setattr(plain_module, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(control_module, "_FIRST_SECONDS", 0.3)
    monkeypatch.setattr(control_module, "_WATCH_SECONDS", 0.05)
    silent: Any = _SilentServer()
    control = BrokerClient(silent)
    threading.Thread(target=control._watch, daemon=True).start()
    region: Any = SimpleNamespace(memory=memoryview(bytearray(16)))
    handover: Any = None
    return SimpleNamespace(port=TcpStreamServer(control, region, PART, handover).listen(("127.0.0.1",), 0))


def test_idle_connections_make_room(plain_server: Any) -> None:
    """A connection beyond the limit replaces the one that was idle longest."""
    with contextlib.ExitStack() as opened:
        connections = []
        for _ in range(3):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", plain_server.port), TIMEOUT))
            connections.append(connection)
            time.sleep(0.2)
        assert connections[0].recv(1) == b""
        for connection in connections[1:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_a_slow_request_is_closed(plain_server: Any) -> None:
    """An incomplete request occupies a thread briefly, even if some bytes arrive regularly."""
    with socket.create_connection(("127.0.0.1", plain_server.port), TIMEOUT) as connection:
        connection.sendall(tcp_frames.pack_request(tcp_frames.Method.PUSH, bytes(1000))[:20])
        with pytest.raises(ConnectionError):  # noqa: PT012 - one of many sends
            for _ in range(int(TIMEOUT / 0.1)):
                connection.sendall(b"x")
                time.sleep(0.1)


def test_streams_without_progress_are_late() -> None:
    """A long stream at a normal rate is not late; repeating the same bytes is not progress."""
    silent: Any = _SilentServer()
    stream = BrokerClient(silent).open("tcp", lambda: None)
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
