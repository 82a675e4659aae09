"""Connections of a session: which are used again, and what ends an attempt to connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.polling import async_wait_until, wait_until

from kvtier.client.errors import KVTierError, SessionLost
from kvtier.client.session import socket_calls
from kvtier.client.session.socket_calls import MAX_IDLE, SocketCalls, SocketTarget
from kvtier.client.transport.socket_calls_aio import AsyncSocketCalls, _Connection
from kvtier.cuda.host.socket_io import Connection
from kvtier.protos.credentials import Credentials
from kvtier.protos.error_reasons import status_of
from kvtier.protos.v1 import common_pb2
from kvtier.protos.wire import socket_frames as frames

REF = common_pb2.SessionRef(session_id=bytes(16), epoch=1)
SOON = 20.0
LONG = 3600.0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """A server's socket, whose connections stay without an answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "s.sock"))
        sock.listen()
        yield sock


def target_of(listener: socket.socket) -> SocketTarget:
    return SocketTarget(listener.getsockname(), REF, Credentials(), is_chosen=True)


class Pairs:
    """Connected sockets: of the client, and of the server."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self.peers: list[socket.socket] = []

    def new(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.settimeout(SOON)
        self.peers.append(self._opened.enter_context(theirs))
        return self._opened.enter_context(ours)


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    with contextlib.ExitStack() as opened:
        yield Pairs(opened)


def test_a_pool_keeps_few_idle_connections(listener: socket.socket, pairs: Pairs) -> None:
    """Each needs a descriptor of the server. Those beyond the limit are closed at once."""
    calls = SocketCalls(target_of(listener))
    for _ in range(MAX_IDLE + 2):
        calls.put(Connection(pairs.new()), intact=True)
    assert all(peer.recv(1) == b"" for peer in pairs.peers[MAX_IDLE:])
    pairs.peers[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        pairs.peers[0].recv(1)
    calls.close()


def test_a_closed_pool_keeps_no_connection(listener: socket.socket, pairs: Pairs) -> None:
    """A call that was in progress returns its connection after the end of the session."""
    calls = SocketCalls(target_of(listener))
    calls.close()
    calls.put(Connection(pairs.new()), intact=True)
    assert pairs.peers[0].recv(1) == b""


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_connection_that_its_caller_forgets_is_closed(listener: socket.socket) -> None:
    """A KeyboardInterrupt can come between the take and the first statement of the caller."""
    calls = SocketCalls(target_of(listener))
    ours, theirs = socket.socketpair()
    theirs.settimeout(SOON)
    calls.put(Connection(ours), intact=True)
    del ours
    with theirs:
        forgotten = calls.take(SOON)
        del forgotten
        assert theirs.recv(1) == b""
    calls.close()


def test_a_connection_that_the_server_has_closed_is_not_used(listener: socket.socket, pairs: Pairs) -> None:
    calls = SocketCalls(target_of(listener))
    kept, lost = Connection(pairs.new()), Connection(pairs.new())
    for each in (kept, lost):
        calls.put(each, intact=True)
    pairs.peers[1].close()
    assert calls.take(SOON) is kept
    calls.put(kept, intact=False)
    assert pairs.peers[0].recv(1) == b"", "not intact"
    calls.close()


def test_a_close_ends_attempts_to_connect(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts the connection and hangs: the close does not wait for it."""
    monkeypatch.setattr(socket_calls, "_CONNECT_SECONDS", LONG)
    calls = SocketCalls(target_of(listener))
    with ThreadPoolExecutor(1) as executor:
        called = executor.submit(calls.call, "x/y", b"", LONG)
        wait_until(lambda: calls._connecting)
        [waiting] = calls._connecting
        calls.close()
        try:
            assert isinstance(called.exception(SOON), SessionLost)
        finally:
            waiting.shutdown()


async def test_a_close_ends_attempts_to_connect_on_a_loop(listener: socket.socket) -> None:
    calls = AsyncSocketCalls(SocketCalls(target_of(listener)))
    called = asyncio.create_task(calls.call("x/y", b"", LONG))
    await async_wait_until(lambda: bool(calls._connecting))
    calls.close()
    done, _ = await asyncio.wait([called], timeout=SOON)
    called.cancel()
    assert done
    assert isinstance(called.exception(), SessionLost)


async def test_a_close_ends_calls_in_progress_on_a_loop(listener: socket.socket, pairs: Pairs) -> None:
    """Although the server does not answer, and the deadline is far away."""
    calls = AsyncSocketCalls(SocketCalls(target_of(listener)))
    await put_idle(calls, pairs)
    called = asyncio.create_task(calls.call("x/y", b"", LONG))
    await asyncio.to_thread(pairs.peers[0].recv, frames.HEAD_BYTES)
    calls.close()
    done, _ = await asyncio.wait([called], timeout=SOON)
    called.cancel()
    assert done
    assert isinstance(called.exception(), SessionLost)


async def put_idle(calls: AsyncSocketCalls, pairs: Pairs) -> None:
    calls._put(_Connection(*await asyncio.open_connection(sock=pairs.new().dup())), intact=True)


async def test_idle_connections_on_a_loop(listener: socket.socket, pairs: Pairs) -> None:
    """As with threads: few are kept, and none that the server has closed is used."""
    calls = AsyncSocketCalls(SocketCalls(target_of(listener)))
    for _ in range(MAX_IDLE + 1):
        await put_idle(calls, pairs)
    assert len(calls._idle) == MAX_IDLE
    [*kept, last] = calls._idle
    pairs.peers[MAX_IDLE - 1].close()
    await last.reader.read()
    assert calls._take_idle() is kept[-1]
    calls._put(kept[-1], intact=False)
    calls.close()


@pytest.mark.parametrize("reason", ["UNKNOWN_SESSION", "LIMIT_EXCEEDED"])
async def test_a_refused_connection_gets_no_call(listener: socket.socket, reason: str) -> None:
    """The caller then uses gRPC. The server gets no byte after the hello."""
    after = []

    def refuse() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(SOON)
            hello = frames.unpack_hello(sock.recv(frames.HELLO_BYTES, socket.MSG_WAITALL))
            sock.sendall(frames.pack_error(hello.number, status_of(reason, "no")))
            with contextlib.suppress(ConnectionError):
                after.append(sock.recv(1))

    calls = AsyncSocketCalls(SocketCalls(target_of(listener)))
    refused = asyncio.get_running_loop().run_in_executor(None, refuse)
    try:
        answer: object = await calls.call("x/y", b"", SOON)
    except KVTierError as error:
        answer = error
    await refused
    calls.close()
    assert answer is None
    assert b"".join(after) == b""
