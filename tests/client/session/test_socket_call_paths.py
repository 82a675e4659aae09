"""Calls over a socket: system calls, deadlines, and connections that the server has closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness.certificates import Authority
from harness.polling import wait_until
from harness.signals import interrupted_at

from kvtier.client.errors import DeadlineExceeded, KVTierError, ServerError, SessionLost
from kvtier.client.session import socket_calls
from kvtier.client.session.socket_calls import SocketCalls, SocketTarget
from kvtier.client.transport.socket_calls_aio import AsyncSocketCalls
from kvtier.cuda.host import socket_io
from kvtier.cuda.host.socket_io import Connection, TlsConnection
from kvtier.protos.credentials import Credentials
from kvtier.protos.v1 import common_pb2
from kvtier.protos.wire import socket_frames as frames

REF = common_pb2.SessionRef(session_id=bytes(16), epoch=1)
SOON = 20.0
BIG = 300_000
LARGE_REQUEST = 8 << 20
"""More than the buffers of a connection hold."""

Script = Callable[["Server", Connection], object]


class Server:
    """A server that answers hellos. After that its connections run a script each, in order."""

    def __init__(self, family: int, directory: Path) -> None:
        self.executed: list[bytes] = []
        self.scripts: list[Script] = []
        """For the next connections; a further one echoes the messages of its calls."""
        self.connections: list[Connection] = []
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(str(directory / "s") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.target = SocketTarget(self._listener.getsockname(), REF, Credentials(), is_chosen=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                script = self.scripts.pop(0) if self.scripts else echo
                self._threads.append(threading.Thread(target=self._serve, args=(sock, script)))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket, script: Script) -> None:
        with sock, contextlib.suppress(OSError):
            connection = Connection(sock)
            connection.set_deadline(SOON)
            hello = frames.unpack_hello(connection.read(frames.HELLO_BYTES))
            connection.send([frames.pack_answer(hello.number, 0)])
            self.connections.append(connection)
            script(self, connection)

    def call(self, connection: Connection) -> tuple[int, bytes]:
        """Reads and executes the next call; returns its number and its message."""
        length, _, number = frames.unpack_head(connection.read(frames.HEAD_BYTES))
        message = frames.unpack_call(connection.read(length))[1]
        self.executed.append(message)
        return number, message

    def stop(self) -> None:
        """Refuses further connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()

    def close(self) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()


def echo(server: Server, connection: Connection) -> None:
    while True:
        number, message = server.call(connection)
        connection.send([frames.pack_answer(number, 0, message)])


def ends_within_a_call(_: Server, connection: Connection) -> None:
    """Closes the connection after a part of the first call."""
    connection.read(1000)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    started = Server(getattr(request, "param", socket.AF_UNIX), tmp_path)
    yield started
    started.close()


@pytest.fixture
def calls(server: Server) -> Iterator[SocketCalls]:
    made = SocketCalls(server.target)
    yield made
    made.close()


ON_BOTH = pytest.mark.parametrize("server", [socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"], indirect=True)
IN_LOOP = pytest.mark.parametrize("in_loop", [False, True], ids=["sync", "aio"])


class Recorded:
    """An object that records which of its methods are called."""

    def __init__(self, recorded: object, used: list[str]) -> None:
        self._recorded = recorded
        self._used = used

    def __getattr__(self, name: str) -> Any:
        self._used.append(name)
        return getattr(self._recorded, name)


def recorded_call(calls: SocketCalls, message: bytes) -> list[str]:
    """Returns the system calls of a call."""
    assert calls.call("x/y", message, SOON) == message
    used: list[str] = []
    connection: Any = calls._idle[0]
    connection.socket, connection._poll = Recorded(connection.socket, used), Recorded(connection._poll, used)
    assert calls.call("x/y", message, SOON) == message
    return used


@ON_BOTH
@pytest.mark.parametrize(("nbytes", "received"), [(100, ["recv_into"]), (BIG, ["recv_into", "recvmsg_into"])])
def test_a_call_has_three_system_calls(calls: SocketCalls, nbytes: int, received: list[str]) -> None:
    """The first finds whether the server has closed the connection.

    A large answer needs one more, because its length is not known before.
    """
    assert recorded_call(calls, bytes(nbytes)) == ["poll", "sendmsg", *received]


def test_a_call_over_tls_has_three_system_calls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pair.cert, pair.key)
    asking = ssl.create_default_context(cafile=authority.ca)
    for context in (serving, asking):
        context.set_alpn_protocols(["p"])
    ours, theirs = socket.socketpair()
    calls = SocketCalls(SocketTarget(("127.0.0.1", 1), REF, Credentials()))

    def serve() -> None:
        connection = TlsConnection(theirs, serving)
        connection.handshake()
        connection.send([b"hello"])
        with contextlib.suppress(ConnectionError):
            while True:
                length, _, number = frames.unpack_head(connection.read(frames.HEAD_BYTES))
                _, message = frames.unpack_call(connection.read(length))
                connection.send([frames.pack_answer(number, 0, message)])

    with ours, theirs:
        thread = threading.Thread(target=serve)
        thread.start()
        client = TlsConnection(ours, asking, server_hostname="127.0.0.1")
        client.handshake()
        # Behind the handshake the server sends session tickets. The answer to a hello follows them.
        assert client.read(5) == b"hello"
        calls.put(client, intact=True)
        assert recorded_call(calls, b"message") == ["poll", "sendmsg", "recv_into"]
        big = bytes(BIG)
        assert calls.call("x/y", big, SOON) == big
        calls.close()
        thread.join()


@ON_BOTH
@pytest.mark.parametrize("abrupt", [False, True], ids=["close", "reset"])
def test_a_call_passes_over_connections_that_the_server_has_closed(
    server: Server, calls: SocketCalls, *, abrupt: bool
) -> None:
    """No byte of the call has arrived there, so it is made on another connection."""
    held = idle(calls, server, 3)
    for connection in server.connections[1:]:
        if abrupt:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown()
    wait_until(lambda: all(each.is_readable() for each in held[1:]))
    assert calls.call("x/y", b"one", SOON) == b"one"
    assert (server.executed, len(server.connections), calls._idle) == ([b"one"], 3, held[:1])
    server.connections[0].shutdown()
    wait_until(held[0].is_readable)
    assert calls.call("x/y", b"two", SOON) == b"two"
    assert (server.executed, len(server.connections)) == ([b"one", b"two"], 4)


def idle(calls: SocketCalls, server: Server, number: int) -> list[Connection]:
    """Opens connections, in the order of those of the server."""
    held = []
    for each in range(number):
        held.append(calls.take(SOON))
        wait_until(lambda each=each: len(server.connections) > each)  # type: ignore[misc]
    for connection in held:
        calls.put(connection, intact=True)
    return held


@ON_BOTH
def test_a_call_without_a_server_uses_grpc(server: Server, calls: SocketCalls) -> None:
    """The server has ended, and with it its connections."""
    [held] = idle(calls, server, 1)
    server.stop()
    server.connections[0].shutdown()
    wait_until(held.is_readable)
    assert calls.call("x/y", b"two", SOON) is None
    assert calls.refusal
    assert server.executed == []


@ON_BOTH
def test_a_call_that_may_have_been_executed_is_not_repeated(server: Server, calls: SocketCalls) -> None:
    server.scripts = [echo, lambda server, connection: server.call(connection)]
    idle(calls, server, 2)
    with pytest.raises(SessionLost):
        calls.call("x/y", b"one", SOON)
    assert (server.executed, len(calls._idle)) == ([b"one"], 1)


@ON_BOTH
def test_a_call_that_was_sent_in_part_fails(server: Server, calls: SocketCalls) -> None:
    """A server executes no incomplete call."""
    server.scripts = [ends_within_a_call]
    with pytest.raises(SessionLost):
        calls.call("x/y", bytes(LARGE_REQUEST), SOON)
    assert (server.executed, calls._idle) == ([], [])


@ON_BOTH
def test_a_close_ends_calls_in_progress(server: Server, calls: SocketCalls) -> None:
    """Although the server does not answer, and the deadline is far away."""
    server.scripts = [lambda server, connection: (server.call(connection), connection.read(1))]
    with ThreadPoolExecutor(1) as executor:
        called = executor.submit(calls.call, "x/y", b"one", 3600.0)
        wait_until(lambda: server.executed == [b"one"])
        calls.close()
        assert isinstance(called.exception(SOON), SessionLost)


@pytest.mark.parametrize("error", [TimeoutError, BrokenPipeError])
def test_an_error_after_the_send_does_not_repeat_the_call(
    server: Server, calls: SocketCalls, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """A signal handler of the engine can raise such an error at any line."""
    connection = idle(calls, server, 2)[1]
    send = connection.send

    def interrupted(pieces: list[bytes]) -> None:
        send(pieces)
        raise error

    monkeypatch.setattr(connection, "send", interrupted)
    with pytest.raises(SessionLost):
        calls.call("x/y", b"one", SOON)
    assert calls.call("x/y", b"two", SOON) == b"two"
    wait_until(lambda: len(server.executed) == 2)
    assert sorted(server.executed) == [b"one", b"two"]


def outcome_of(target: SocketTarget, timeout: float, *, in_loop: bool) -> bytes | KVTierError | None:
    """Makes one call; returns its answer or its error."""

    async def run() -> bytes | None:
        calls = AsyncSocketCalls(SocketCalls(target))
        try:
            return await calls.call("x/y", b"message", timeout)
        finally:
            calls.close()

    try:
        if in_loop:
            return asyncio.run(run())
        with contextlib.closing(SocketCalls(target)) as calls:
            return calls.call("x/y", b"message", timeout)
    except KVTierError as error:
        return error


@ON_BOTH
@IN_LOOP
@pytest.mark.parametrize("nbytes", [0, 1000])
def test_an_answer_that_comes_byte_by_byte_ends_at_the_deadline(server: Server, nbytes: int, *, in_loop: bool) -> None:
    def drip(server: Server, connection: Connection) -> None:
        number, _ = server.call(connection)
        answer = frames.pack_answer(number, 0, bytes(100_000))
        connection.send([answer[:nbytes]])
        for byte in answer[nbytes:]:
            connection.send([bytes((byte,))])
            time.sleep(0.02)

    server.scripts = [drip]
    began = time.monotonic()
    assert isinstance(outcome_of(server.target, 0.2, in_loop=in_loop), DeadlineExceeded)
    assert 0.19 < time.monotonic() - began < SOON


@IN_LOOP
@pytest.mark.parametrize("cut", [1, 12, 13, 14, 70_000])
def test_an_answer_in_two_parts(server: Server, cut: int, *, in_loop: bool) -> None:
    def parted(server: Server, connection: Connection) -> None:
        number, _ = server.call(connection)
        answer = frames.pack_answer(number, 0, b"x" * 100_000)
        connection.send([answer[:cut]])
        time.sleep(0.02)
        connection.send([answer[cut:]])

    server.scripts = [parted]
    assert outcome_of(server.target, SOON, in_loop=in_loop) == b"x" * 100_000


@IN_LOOP
@pytest.mark.parametrize("cut", [0, 5, 13, 50_000])
def test_an_answer_that_ends_early(server: Server, cut: int, *, in_loop: bool) -> None:
    def ending(server: Server, connection: Connection) -> None:
        number, _ = server.call(connection)
        connection.send([frames.pack_answer(number, 0, bytes(100_000))[:cut]])

    server.scripts = [ending]
    assert isinstance(outcome_of(server.target, SOON, in_loop=in_loop), SessionLost)


@pytest.mark.parametrize("extra", [1, 13, 1000, 100_000])
def test_bytes_after_an_answer_end_the_connection(server: Server, calls: SocketCalls, extra: int) -> None:
    """The answer is whole. The next call uses another connection."""

    def babble(server: Server, connection: Connection) -> None:
        number, _ = server.call(connection)
        connection.send([frames.pack_answer(number, 0, b"one") + bytes(extra)])
        server.call(connection)

    server.scripts = [babble]
    assert [calls.call("x/y", text, SOON) for text in (b"1", b"2", b"3")] == [b"one", b"2", b"3"]
    assert (server.executed, len(server.connections)) == ([b"1", b"2", b"3"], 2)


def test_an_answer_of_more_than_a_gibibyte_is_refused(server: Server, calls: SocketCalls) -> None:
    def boast(server: Server, connection: Connection) -> None:
        number, _ = server.call(connection)
        head = bytearray(frames.pack_answer(number, 0))
        head[:4] = struct.pack("<I", frames.MAX_ANSWER_BYTES + 1)
        connection.send([bytes(head)])

    server.scripts = [boast]
    with pytest.raises(ServerError):
        calls.call("x/y", b"one", SOON)
    assert not calls._idle


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@ON_BOTH
def test_an_interrupt_at_any_line_never_mixes_answers(server: Server, calls: SocketCalls) -> None:
    """The connection of an interrupted call carries no other call, unless its answer was read."""
    for event in range(1000):
        call = b"%d" % event
        with interrupted_at(event, socket_calls, socket_io, frames) as lines:
            assert calls.call("x/y", call, SOON) == call
        assert calls.call("x/y", b"next", SOON) == b"next", f"after {call!r}"
        assert server.executed.count(call) <= 1
        if len(lines) <= event:
            break
    assert 30 < event < 999
    assert not calls._lock.locked()
    assert list(calls._open) == calls._idle
