"""Streams of the bulk process: progress reports, and refusals by the server."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness.bulk import data_frame

from kvtier.cuda.host.socket_io import Connection
from kvtier.protos.v1 import transfer_pb2
from kvtier.protos.wire import socket_frames as frames
from kvtier.server.bulk import broker_client
from kvtier.server.bulk.broker_client import BrokerClient, PushedStore, Stream
from kvtier.server.bulk.messages import (
    Accepted,
    Begin,
    Caller,
    Detached,
    Granted,
    Moved,
    Ping,
    Pong,
    Refusal,
    decode_from_child,
)
from kvtier.server.bulk.streams import StreamServer
from kvtier.server.config.schema import LimitConfig
from kvtier.server.refused import Refused


class Server:
    """The server's end of the channel: records messages, and may answer the begin of a stream."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.answer: Callable[[Begin], None] = lambda _: None

    def send(self, _: object, payload: bytes) -> None:
        message = decode_from_child(payload)
        self.sent.append(message)
        if isinstance(message, Begin):
            self.answer(message)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def broker(server: Any) -> BrokerClient:
    return BrokerClient(server)


def stream_of(broker: BrokerClient) -> Stream:
    return broker.open(Caller(b"s", 1, None, [], is_local=True), lambda: None)


def test_progress_is_reported_during_a_stream(
    server: Server, broker: BrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many bytes, and after some time. Each report renews the store or the lease."""
    now = 1000.0
    monkeypatch.setattr(broker_client, "time", SimpleNamespace(monotonic=lambda: now))
    stream, most = stream_of(broker), broker_client._REPORT_BYTES
    stream.moved(0, most - 1)
    assert server.sent == []
    stream.moved(most - 1, 1)
    assert server.sent == [Moved(stream.number, most, [0, most])]
    stream.moved(most, 5)
    assert len(server.sent) == 1
    now += broker_client._REPORT_SECONDS
    stream.moved(most + 5, 5)
    assert server.sent[1:] == [Moved(stream.number, 10, [most, most + 10])]


def test_a_refused_stream_does_not_delay_others(server: Server, broker: BrokerClient) -> None:
    """The reading thread ends its connection, and serves others before the stream has detached."""
    stuck, other = stream_of(broker), stream_of(broker)
    aborted: list[bool] = []
    stuck.abort = lambda: aborted.append(True)
    with stuck.touching:
        broker._take(Refusal(stuck.number, "STORE_NOT_FOUND", "ended"))
        broker._take(Accepted(other.number, "acme"))
        broker._take(Ping())
        assert other.handshake() == "acme"
        assert aborted == [True]
        assert [each for each in server.sent if isinstance(each, Detached | Pong)] == [Pong()]
    assert server.sent[-1] == Detached(stuck.number)
    with pytest.raises(Refused, match="ended"):
        stuck.check()


def test_a_refused_stream_detaches_once(server: Server, broker: BrokerClient) -> None:
    """It detaches at once if it does not access the region."""
    stream = stream_of(broker)
    broker._take(Refusal(stream.number, "STORE_NOT_FOUND", "ended"))
    assert server.sent == [Detached(stream.number)]
    with stream.touching:
        pass
    assert server.sent == [Detached(stream.number)]


def test_an_ended_stream_keeps_no_memory(broker: BrokerClient) -> None:
    """The slots of a long stream take megabytes, and the garbage collector runs seldom."""
    stream = stream_of(broker)
    with stream.touching:
        stream.moved(0, 4)
    broker.close(stream)
    kept = weakref.ref(stream)
    gc.disable()
    try:
        del stream
        assert kept() is None
    finally:
        gc.enable()


def test_a_refused_stream_reports_its_last_progress(server: Server, broker: BrokerClient) -> None:
    """The frame that is complete when the refusal arrives counts."""
    stream = stream_of(broker)
    with stream.touching:
        broker._take(Refusal(stream.number, "STORE_NOT_FOUND", "ended"))
        stream.moved(0, 4)
    assert server.sent == [Detached(stream.number, 4, [0, 4])]


def test_two_streams_do_not_write_to_the_same_bytes(broker: BrokerClient) -> None:
    """The later one ends the earlier one, and waits for the end of its frame."""
    store, first, second, third = PushedStore(), *(stream_of(broker) for _ in range(3))
    aborted, gaps = threading.Event(), list[tuple[int, int]]()
    first.abort = aborted.set
    assert store.begin_frame(first, 0, 4) == [(0, 4)]
    assert store.begin_frame(third, 6, 8) == [(6, 8)]
    assert not aborted.is_set()
    waiting = threading.Thread(target=lambda: gaps.extend(store.begin_frame(second, 2, 6)))
    waiting.start()
    assert aborted.wait(60)
    assert not gaps
    store.end_frame(first, arrived=True)
    waiting.join(60)
    assert gaps == [(4, 6)]


def test_bytes_of_a_stream_that_ends_meanwhile_are_not_overwritten(server: Server, broker: BrokerClient) -> None:
    """It ends between the grant and the begin of another stream of the store."""
    streams = [stream_of(broker)]
    server.answer = lambda begin: broker._take(Granted(begin.stream, [0], [4]))
    streams[0].begin(1)

    def answer(begin: Begin) -> None:
        broker._take(Granted(begin.stream, [0], [4]))
        ending = streams.pop()
        ending.store.begin_frame(ending, 0, 2)
        ending.store.end_frame(ending, arrived=True)
        broker.close(ending)

    server.answer = answer
    later = stream_of(broker)
    later.begin(1)
    assert later.store.begin_frame(later, 0, 4) == [(2, 4)]


@pytest.mark.parametrize("ended", [False, True])
def test_a_push_writes_nothing_to_an_ended_store(server: Server, broker: BrokerClient, *, ended: bool) -> None:
    """The refusal arrives between the grant and the first frame."""
    stream = stream_of(broker)
    region: Any = SimpleNamespace(memory=memoryview(bytearray(4)), digests=[0])
    unused: Any = None
    streams = StreamServer(broker, region, LimitConfig(), unused)
    request = transfer_pb2.PushRequest(store_id=1, complete=True).SerializeToString()

    def answer(begin: Begin) -> None:
        broker._take(Granted(begin.stream, [0], [4]))
        if ended:
            broker._take(Refusal(begin.stream, "STORE_NOT_FOUND", "the store has ended"))

    server.answer = answer
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data_frame(b"data") + frames.pack_end(1))
        if ended:
            with pytest.raises(Refused, match="the store has ended"):
                streams._push(Connection(ours), stream, 1, request)
        else:
            assert streams._push(Connection(ours), stream, 1, request)
    assert bytes(region.memory) == (bytes(4) if ended else b"data")


@pytest.mark.parametrize("ended", [False, True])
def test_a_pull_reads_nothing_of_an_ended_lease(server: Server, broker: BrokerClient, *, ended: bool) -> None:
    """The refusal arrives between the grant and the first frame."""
    stream = stream_of(broker)
    region: Any = SimpleNamespace(memory=memoryview(b"data"), digests=[0])
    unused: Any = None
    streams = StreamServer(broker, region, LimitConfig(), unused)

    def answer(begin: Begin) -> None:
        broker._take(Granted(begin.stream, [0], [4]))
        if ended:
            broker._take(Refusal(begin.stream, "LEASE_NOT_FOUND", "the lease has ended"))

    server.answer = answer
    ours, theirs = socket.socketpair()
    with ours, theirs:
        request = transfer_pb2.PullRequest(lease_id=1, items=[0]).SerializeToString()
        with pytest.raises(Refused, match="the lease has ended") if ended else contextlib.nullcontext():
            streams._pull(Connection(ours), stream, 1, request)
        ours.shutdown(socket.SHUT_WR)
        assert (b"data" in theirs.recv(1024)) is not ended
