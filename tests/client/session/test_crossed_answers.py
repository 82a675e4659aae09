"""A server that answers another call: the client ends the connection and returns nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.client.effects import Pull, Push
from kvtier.client.errors import DeadlineExceeded, KVTierError, NotConnected, SessionLost
from kvtier.client.part_streams import PartReceiver, PartSender
from kvtier.client.session.session import AttachError, Attachment, ClientSession
from kvtier.client.session.socket_calls import SocketCalls, SocketTarget
from kvtier.client.transport.socket_calls_aio import AsyncSocketCalls
from kvtier.client.transport.socket_streams import SocketStreams
from kvtier.cuda.host.socket_io import Connection, checksum
from kvtier.protos.credentials import Credentials
from kvtier.protos.v1 import common_pb2, session_pb2, transfer_pb2
from kvtier.protos.wire import socket_frames as frames

REF = common_pb2.SessionRef(session_id=bytes(16), epoch=1)
SOON = 20.0
WRONG = [-1, 1, 1 << 32, 1 << 63]
"""Differences between the number of the call and that of the answer."""
EVIL = b"evil"


class Peer:
    """A server whose connections run a script. `call` reads the next call; returns its number."""

    def __init__(self, address: str, script: Callable[[Peer, Connection], object]) -> None:
        self.address = address
        self.connections = 0
        self.calls: list[int] = []
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            connection = Connection(sock)
            connection.set_deadline(SOON)
            hello = frames.unpack_hello(connection.read(frames.HELLO_BYTES))
            connection.send([frames.pack_answer(hello.number, 0)])
            self._script(self, connection)
            connection.read(1)  # until the client has closed the connection

    def call(self, connection: Connection) -> int:
        length, kind, number = frames.unpack_head(connection.read(frames.HEAD_BYTES))
        assert kind is frames.FrameKind.CALL
        connection.read(length)
        self.calls.append(number)
        return number

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Callable[[Callable[[Peer, Connection], object]], SocketTarget]]:
    """Starts a peer with a script; returns its address as a client needs it."""
    with contextlib.ExitStack() as opened:

        def start(script: Callable[[Peer, Connection], object]) -> SocketTarget:
            address = str(tmp_path / "peer.sock")
            opened.callback(Peer(address, script).close)
            return SocketTarget(address, REF, Credentials(), is_chosen=True)

        yield start


def answered(step: int, message: bytes = EVIL) -> Callable[[Peer, Connection], object]:
    """Answers each call with a number that differs by `step`."""

    def script(peer: Peer, connection: Connection) -> None:
        while True:
            number = (peer.call(connection) + step) % (1 << 64)
            connection.send([frames.pack_answer(number, 0, message)])

    return script


def late(peer: Peer, connection: Connection) -> None:
    """Answers the first call of all only after the client has given up."""
    number = peer.call(connection)
    if peer.connections == 1:
        with contextlib.suppress(OSError):
            connection.read(1)
        connection.send([frames.pack_answer(number, 0, EVIL)])
    else:
        connection.send([frames.pack_answer(number, 0, b"good")])


def doubled(peer: Peer, connection: Connection) -> None:
    """Answers each call twice."""
    while True:
        number = peer.call(connection)
        connection.send([frames.pack_answer(number, 0, b"%d" % len(peer.calls)) * 2])


def called(target: SocketTarget, timeouts: list[float], *, in_loop: bool) -> list[bytes | KVTierError | None]:
    """Makes a call for each time-out; returns answers and errors."""

    async def run() -> list[bytes | KVTierError | None]:
        calls, outcomes = AsyncSocketCalls(SocketCalls(target)), list[bytes | KVTierError | None]()
        for timeout in timeouts:
            try:
                outcomes.append(await calls.call("x/y", b"", timeout))
            except KVTierError as error:
                outcomes.append(error)
        calls.close()
        return outcomes

    if in_loop:
        return asyncio.run(run())
    calls, outcomes = SocketCalls(target), list[bytes | KVTierError | None]()
    for timeout in timeouts:
        try:
            outcomes.append(calls.call("x/y", b"", timeout))
        except KVTierError as error:
            outcomes.append(error)
    calls.close()
    return outcomes


IN_LOOP = pytest.mark.parametrize("in_loop", [False, True], ids=["sync", "aio"])


@IN_LOOP
@pytest.mark.parametrize("step", WRONG)
def test_an_answer_to_another_call(peer: Callable[..., SocketTarget], step: int, *, in_loop: bool) -> None:
    """The call fails as if the connection had broken, because its own answer is unknown."""
    outcomes = called(peer(answered(step)), [SOON, SOON], in_loop=in_loop)
    assert [type(each) for each in outcomes] == [SessionLost, SessionLost]


@IN_LOOP
def test_right_answers(peer: Callable[..., SocketTarget], *, in_loop: bool) -> None:
    """All calls use one connection."""
    connections = []

    def script(peer: Peer, connection: Connection) -> None:
        connections.append(connection)
        answered(0, b"good")(peer, connection)

    assert called(peer(script), [SOON] * 3, in_loop=in_loop) == [b"good"] * 3
    assert len(connections) == 1


@IN_LOOP
def test_a_late_answer_is_not_that_of_the_next_call(peer: Callable[..., SocketTarget], *, in_loop: bool) -> None:
    first, second = called(peer(late), [0.1, SOON], in_loop=in_loop)
    assert isinstance(first, DeadlineExceeded)
    assert second == b"good"


@IN_LOOP
def test_a_second_answer_to_a_call(peer: Callable[..., SocketTarget], *, in_loop: bool) -> None:
    """It is never the answer to the next call: that call fails, or uses another connection."""
    outcomes = called(peer(doubled), [SOON] * 6, in_loop=in_loop)
    answers = [int(each) for each in outcomes if isinstance(each, bytes)]
    assert answers
    assert answers == sorted(set(answers))
    assert all(isinstance(each, bytes | SessionLost) for each in outcomes)


@contextlib.contextmanager
def memory_file() -> Iterator[int]:
    """Returns the descriptor of a sealed file in memory: a region of one page, and its digests."""
    descriptor = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    yield descriptor
    os.close(descriptor)


def test_a_hello_with_the_answer_to_another_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = str(tmp_path / "peer.sock")
        listener.bind(address)
        listener.listen()

        def serve() -> None:
            for _ in range(2):
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    hello = frames.unpack_hello(sock.recv(frames.HELLO_BYTES, socket.MSG_WAITALL))
                    sock.sendall(frames.pack_answer((hello.number + 1) % (1 << 64), 0))
                    sock.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        target = SocketTarget(address, REF, Credentials(), is_chosen=True)
        with pytest.raises(ConnectionError, match="instead of"):
            target.connect(frames.Purpose.CALLS, SOON)
        assert called(target, [SOON], in_loop=True) == [None]
        thread.join()


@pytest.mark.parametrize("step", [0, *WRONG])
def test_a_region_with_the_answer_to_another_hello(tmp_path: Path, step: int) -> None:
    """The client maps no region that came with the answer to another hello."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, memory_file() as region:
        address = str(tmp_path / "peer.shm")
        listener.bind(address)
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                hello = frames.unpack_hello(sock.recv(frames.HELLO_BYTES, socket.MSG_WAITALL))
                number = (hello.number + step) % (1 << 64)
                answer = frames.pack_region_answer(number, mmap.PAGESIZE, 0, mmap.PAGESIZE)
                socket.send_fds(sock, [answer], [region])
                sock.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        target = SocketTarget(address, REF, Credentials(), is_chosen=True)
        with contextlib.nullcontext() if step == 0 else pytest.raises(AttachError, match="instead of"):
            Attachment.connect(target, address).close()
        thread.join()


@pytest.mark.parametrize("where", ["data", "answer"])
@pytest.mark.parametrize("step", WRONG)
def test_a_pull_gets_frames_of_another_call(peer: Callable[..., SocketTarget], step: int, where: str) -> None:
    """The bytes do not count as received. The client retries over gRPC after `NotConnected`."""

    def script(peer: Peer, connection: Connection) -> None:
        number = peer.call(connection)
        wrong = (number + step) % (1 << 64)
        data = wrong if where == "data" else number
        head = frames.pack_data_head(data, 0, 4, checksum([memoryview(EVIL)]))
        connection.send([head, EVIL, frames.pack_answer(wrong, 0)])

    streams = SocketStreams(peer(script))
    memory = (ctypes.c_char * 4)(*b"none")
    sink = PartReceiver([ctypes.addressof(memory)], [4])
    session = ClientSession(REF, session_pb2.CapabilitiesResponse(), None, "")
    with pytest.raises(NotConnected, match="instead of"):
        streams.pull(Pull(session, transfer_pb2.PullRequest(session=REF), sink, SOON))
    sink.end_stream()
    assert not sink.completed
    if where == "data":
        assert sink.missing == [0]
        assert memory.raw == b"none"
    streams.close()


@pytest.mark.parametrize("step", WRONG)
def test_a_push_gets_the_answer_to_another_call(peer: Callable[..., SocketTarget], step: int) -> None:
    def script(peer: Peer, connection: Connection) -> None:
        number = peer.call(connection)
        data = frames.unpack_data_head(connection.read(frames.DATA_HEAD_BYTES))
        assert (data.number, connection.read(data.nbytes)) == (number, b"good")
        assert connection.read(frames.HEAD_BYTES) == frames.pack_end(number)
        done = transfer_pb2.PushResponse(received_bytes=4, completed=True)
        connection.send([frames.pack_answer((number + step) % (1 << 64), 0, done.SerializeToString())])

    streams = SocketStreams(peer(script))
    memory = (ctypes.c_char * 4)(*b"good")
    session = ClientSession(REF, session_pb2.CapabilitiesResponse(), None, "")
    source = PartSender(REF, 1, [ctypes.addressof(memory)], [4])
    with pytest.raises(NotConnected, match="instead of"):
        streams.push(Push(session, source, 0, 4, complete=True, timeout=SOON))
    streams.close()
