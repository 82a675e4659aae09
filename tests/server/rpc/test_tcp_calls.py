"""The port for plain sockets, beside its streams: calls of clients on other hosts, who may hold a thread, and settings."""

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
from kvtier.server.bulk import client as control_module
from kvtier.server.bulk import tcp_streams as plain_module
from kvtier.server.bulk.client import BrokerClient
from kvtier.server.bulk.tcp_streams import TcpStreamServer

PART = 64 << 10
NAMESPACE = namespace_of(PART)
TIMEOUT = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that also listens on TCP."""
    with ServerProcess(tmp_path_factory.mktemp("calls"), region=32 * MIB, lmdb=16 * MIB, tcp=True) as process:
        yield process.start()


@pytest.fixture
def session(server: ServerProcess) -> Iterator[RawSession]:
    """A session without a client."""
    with RawSession(server.tcp, NAMESPACE, engine_id="raw") as session:
        yield session


def knock(port: int, ref: common_pb2.SessionRef, purpose: Purpose = Purpose.CALLS) -> socket.socket:
    """Returns a connection that has asked for what `purpose` says."""
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT)
    connection.sendall(pack_request(ref.session_id, ref.epoch, purpose))
    return connection


def port_of(session: RawSession) -> int:
    """Returns the port for plain sockets."""
    port: int = wait_until(lambda: locate(session).plain_port)
    return port


def received(connection: socket.socket) -> bytes:
    """Returns what comes until the other side hangs up."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            data += piece
    return data


def test_calls_go_the_way_of_the_bytes(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of another host makes no call of gRPC once it has found the port, and says how its bytes move."""
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
        assert session.transport_reason == "asked for"
        request = transfer_pb2.LocateRequest(session=session.ref)
        answer = session.calls.call("TransferService/Locate", request.SerializeToString(), TIMEOUT)
        assert answer is not None
        assert transfer_pb2.LocateResponse.FromString(answer).plain_port
        # The session of the test before may still be on its way out.
        mine = [session.transport for session in server.status().sessions if session.engine_id == "calls"]
        assert mine == ["tcp"]


def test_calls_of_asyncio(server: ServerProcess) -> None:
    """So does one of asyncio."""
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


def test_who_is_refused(session: RawSession) -> None:
    """Without a session there are no calls; and nobody is handed the region this way, whoever he is."""
    port = port_of(session)
    stranger = common_pb2.SessionRef(session_id=b"x" * 16, epoch=session.ref.epoch)
    for ref, purpose in ((stranger, Purpose.CALLS), (session.ref, Purpose.REGION)):
        with knock(port, ref, purpose) as connection:
            reply = received(connection)
        assert not reply or unpack_reply(reply) is None


def test_a_connection_for_calls_ends_with_its_session(server: ServerProcess, session: RawSession) -> None:
    """What came in by way of the bulk process is the server's own: it outlives that process, and ends with the session."""
    with knock(port_of(session), session.ref) as connection:
        assert unpack_reply(connection.recv(REPLY_BYTES, socket.MSG_WAITALL)) is not None
        pid = bulk_pid(server.pid)
        assert pid is not None
        os.kill(pid, 9)
        wait_until(lambda: bulk_pid(server.pid) not in (None, pid))
        request = transfer_pb2.LocateRequest(session=session.ref)
        connection.sendall(pack_call(b"TransferService/Locate", request.SerializeToString()))
        length = unpack_length(connection.recv(4, socket.MSG_WAITALL))
        assert unpack_answer(connection.recv(length, socket.MSG_WAITALL))[0] == 0
        session.fall()
        assert received(connection) == b""


def test_ports_that_are_set(tmp_path: Path) -> None:
    """Both ports are the ones of the configuration, also in the process' next life."""
    with contextlib.ExitStack() as opened:
        ports = [opened.enter_context(ReservedPort()).number for _ in range(2)]
        config = f"[bulk]\ntcp_port = {ports[0]}\ngrpc_port = {ports[1]}"
        server = opened.enter_context(ServerProcess(tmp_path, config=config, tcp=True).start())
        session = opened.enter_context(RawSession(server.tcp, NAMESPACE, engine_id="raw"))
        for _ in range(2):
            port_of(session)
            where = locate(session)
            assert [where.plain_port, where.port] == ports
            socket.create_connection(("127.0.0.1", where.plain_port), TIMEOUT).close()  # it is no dead process' port
            pid = bulk_pid(server.pid)
            assert pid is not None
            assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, server.pid)
            os.kill(pid, 9)
            # Once there is another process the server has noticed, and names no port until that one listens.
            wait_until(lambda: bulk_pid(server.pid) not in (None, pid))  # noqa: B023 - called here


def test_a_port_that_is_set_and_taken(tmp_path: Path) -> None:
    """What cannot be had is not served elsewhere: a firewall would know nothing of it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        ServerProcess(tmp_path, config=f"[bulk]\ntcp_port = {taken.getsockname()[1]}", tcp=True).start() as server,
        RawSession(server.tcp, NAMESPACE, engine_id="raw") as session,
    ):
        wait_until(lambda: locate(session).port)
        assert not locate(session).plain_port


def test_without_plain_sockets(tmp_path: Path) -> None:
    """Where they are not offered, a client that prefers them streams over gRPC, and says so."""
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


class _Nobody:
    """A server that hears nothing and says nothing."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, _: object, payload: bytes) -> None:
        self.said.append(payload)

    def __iter__(self) -> Iterator[Any]:
        threading.Event().wait()
        yield


@pytest.fixture
def plain_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two connections at most, and little patience, in this process."""
    monkeypatch.setattr(plain_module, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(control_module, "_FIRST_SECONDS", 0.3)
    monkeypatch.setattr(control_module, "_WATCH_SECONDS", 0.05)
    nobody: Any = _Nobody()
    control = BrokerClient(nobody)
    threading.Thread(target=control._watch, daemon=True).start()
    region: Any = SimpleNamespace(memory=memoryview(bytearray(16)))
    handover: Any = None
    return SimpleNamespace(port=TcpStreamServer(control, region, PART, handover).listen(("127.0.0.1",), 0))


def test_who_asks_for_nothing_makes_room(plain_server: Any) -> None:
    """As many connections as there may be: one more takes the place of the one that has been idle for the longest time."""
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


def test_a_request_that_trickles(plain_server: Any) -> None:
    """A request that does not come to its end holds no thread for long, however often a little of it comes."""
    with socket.create_connection(("127.0.0.1", plain_server.port), TIMEOUT) as connection:
        connection.sendall(tcp_frames.pack_request(tcp_frames.Method.PUSH, bytes(1000))[:20])
        with pytest.raises(ConnectionError):  # noqa: PT012 - one of many sends
            for _ in range(int(TIMEOUT / 0.1)):
                connection.sendall(b"x")
                time.sleep(0.1)


def test_which_streams_are_late() -> None:
    """One that moves what was asked for at a rate is not, however long it is; one that sends the same bytes again and again is."""
    nobody: Any = _Nobody()
    stream = BrokerClient(nobody).open("tcp", lambda: None)
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
