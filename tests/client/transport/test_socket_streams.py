"""Push and Pull over sockets. The peer is the other end of a socket pair."""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvtier.client.effects import Pull, Push
from kvtier.client.errors import ChecksumMismatch, DeadlineExceeded, LeaseLost, SessionLost
from kvtier.client.part_streams import PartReceiver, PartSender
from kvtier.client.session.session import ClientSession
from kvtier.client.session.socket_calls import SocketTarget
from kvtier.client.transport import socket_streams
from kvtier.client.transport.aio_transport import AsyncGrpcTransport, _run_to_end
from kvtier.client.transport.socket_streams import SocketStreams
from kvtier.client.transport.sync_transport import GrpcTransport
from kvtier.cuda.host.socket_io import Connection, checksum
from kvtier.protos.credentials import Credentials
from kvtier.protos.error_reasons import status_of
from kvtier.protos.v1 import common_pb2, session_pb2, transfer_pb2
from kvtier.protos.wire import socket_frames as frames

REF = common_pb2.SessionRef(session_id=bytes(16), epoch=1)
SOON = 20.0


class Streams(SocketStreams):
    """Streams of a session that has one connection, to `peer`."""

    def __init__(self) -> None:
        super().__init__(SocketTarget("/unused", REF, Credentials()))
        ours, theirs = socket.socketpair()
        self.put(Connection(ours), intact=True)
        self.peer = Connection(theirs)
        self.session = ClientSession(REF, session_pb2.CapabilitiesResponse(), None, "")
        self.memory = (ctypes.c_char * 4)()

    def call(self) -> int:
        """The peer reads a call; returns its number."""
        length, _, number = frames.unpack_head(self.peer.read(frames.HEAD_BYTES))
        self.peer.read(length)
        return number

    def load(self, timeout: float) -> Pull:
        sink = PartReceiver([ctypes.addressof(self.memory)], [4])
        return Pull(self.session, transfer_pb2.PullRequest(session=REF), sink, timeout)


@pytest.fixture
def streams() -> Iterator[Streams]:
    streams = Streams()
    yield streams
    streams.peer.close()
    streams.close()


@pytest.fixture
def executor(streams: Streams) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool
        streams.peer.shutdown()  # ends a stream that a fault has left waiting


@pytest.mark.parametrize("sent", [b"good", b"evil"])
def test_a_damaged_frame_is_refused(streams: Streams, executor: ThreadPoolExecutor, sent: bytes) -> None:
    """The bytes are received in place; the checksum of the frame is of other bytes."""
    effect = streams.load(SOON)

    def answer() -> None:
        number = streams.call()
        head = frames.pack_data_head(number, 0, 4, checksum([memoryview(b"good")]))
        end = frames.pack_answer(number, 0, transfer_pb2.PullResponse().SerializeToString())
        streams.peer.send([head, sent, end])

    answered = executor.submit(answer)
    if sent == b"good":
        streams.pull(effect)
    else:
        with pytest.raises(ChecksumMismatch):
            streams.pull(effect)
    answered.result(SOON)
    effect.sink.end_stream()
    assert effect.sink.missing == ([] if sent == b"good" else [0])


def test_a_stream_to_a_silent_peer_ends_at_its_deadline(streams: Streams, executor: ThreadPoolExecutor) -> None:
    pulled: Future[None] = executor.submit(streams.pull, streams.load(0.05))
    assert isinstance(pulled.exception(SOON), DeadlineExceeded)


def test_the_end_of_a_session_ends_its_streams(
    streams: Streams, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the deadline of the stream."""
    monkeypatch.setattr(socket_streams, "_STALL_SECONDS", 3600.0)
    pulled: Future[None] = executor.submit(streams.pull, streams.load(3600))
    streams.peer.read(frames.HEAD_BYTES)  # the stream waits for its answer
    streams.session.end()
    assert isinstance(pulled.exception(SOON), SessionLost)


def test_a_refusal_during_a_push_is_its_error(streams: Streams, executor: ThreadPoolExecutor) -> None:
    """The server refuses the call and reads no more. The client then cannot send the rest."""
    memory = (ctypes.c_char * (8 << 20))()
    source = PartSender(REF, 1, [ctypes.addressof(memory)], [len(memory)])

    def refuse() -> None:
        number = streams.call()
        streams.peer.send([frames.pack_error(number, status_of("STORE_NOT_FOUND", "no such store"))])
        streams.peer.socket.shutdown(socket.SHUT_RD)

    refused = executor.submit(refuse)
    with pytest.raises(LeaseLost, match="no such store"):
        streams.push(Push(streams.session, source, 0, 1 << 20, complete=True, timeout=SOON))
    refused.result(SOON)


class Retried:
    """Stands for the sockets. A stream is interrupted, and then replaced by a second one."""

    found = False

    def __init__(self, interrupt: Callable[[], object]) -> None:
        self._interrupt = interrupt
        self.started, self.first, self.second = threading.Event(), threading.Event(), threading.Event()

    def stream(self, session: ClientSession, move: Callable[[Any], Any]) -> None:
        def push(_: Any, on_start: Callable[[Any], object]) -> None:
            on_start(SimpleNamespace(cancel=self.first.set))
            self.started.set()
            self._interrupt()
            assert self.first.wait(SOON)
            on_start(SimpleNamespace(cancel=self.second.set))

        move(SimpleNamespace(push=push))


def interrupt_a_wait() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize("interrupt", [interrupt_a_wait, _thread.interrupt_main], ids=["in a wait", "before a wait"])
def test_an_interrupt_also_cancels_the_stream_of_a_retry(
    request: pytest.FixtureRequest, interrupt: Callable[[], object]
) -> None:
    """That stream starts after the interrupt, which waits for its end.

    `interrupt_main` ends no system call, as a signal that arrives right before one.
    """
    transport = GrpcTransport.__new__(GrpcTransport)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores the signal
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    sockets = transport._sockets = Retried(interrupt)
    with pytest.raises(KeyboardInterrupt):
        transport._stream(mock.Mock(), lambda streams, on_start: streams.push(None, on_start))
    assert sockets.second.is_set()


@pytest.mark.parametrize("runs", [True, False])
def test_an_interrupt_at_the_start_of_the_thread_of_a_stream(monkeypatch: pytest.MonkeyPatch, *, runs: bool) -> None:
    """A signal handler can run right before or after the call that starts the thread.

    The stream that runs is cancelled, and has ended when the interrupt is raised. Without a stream
    at that time, none begins afterwards: the caller reuses its memory.
    """
    transport = GrpcTransport.__new__(GrpcTransport)
    sockets = transport._sockets = Retried(lambda: None)
    kept: list[Callable[[], None]] = []
    start = _thread.start_new_thread

    def interrupted(run: Callable[[], None], arguments: tuple[()]) -> None:
        kept.append(run)
        if runs:
            start(run, arguments)
            assert sockets.started.wait(SOON)
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        transport._stream(mock.Mock(), lambda streams, on_start: streams.push(None, on_start))
    assert sockets.second.is_set() == runs
    if not runs:
        kept[0]()
        assert not sockets.started.is_set()


async def test_a_cancellation_also_cancels_the_stream_of_a_retry() -> None:
    transport = AsyncGrpcTransport.__new__(AsyncGrpcTransport)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    sockets = transport._sockets = Retried(lambda: loop.call_soon_threadsafe(task.cancel))
    with ThreadPoolExecutor(1) as threads:
        transport._stream_threads = threads
        with pytest.raises(asyncio.CancelledError):
            await transport._stream(mock.Mock(), lambda streams, on_start: streams.push(None, on_start))
    task.uncancel()
    assert sockets.second.is_set()


async def test_a_cancellation_shortens_work_that_runs_to_its_end() -> None:
    """The caller waits for the end of the work, and is cancelled then."""
    cancelled, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await cancelled.wait()
        ended.set()

    task = asyncio.create_task(_run_to_end(work(), cancelled.set))
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=SOON)
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done
    assert ended.is_set()
