"""Blocking connections, with and without TLS: bytes, deadlines and ends."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.certificates import Authority

from kvtier.cuda.host import socket_io
from kvtier.cuda.host.socket_io import Connection, TlsConnection, checksum

Pair = tuple[Connection, Connection]


def contexts(directory: Path, offered: str | None = "p") -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns contexts of a server with the application protocol "p", and of a client."""
    authority = Authority(directory)
    pair = authority.issue("server")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pair.cert, pair.key)
    asking = ssl.create_default_context(cafile=authority.ca)
    serving.set_alpn_protocols(["p"])
    if offered is not None:
        asking.set_alpn_protocols([offered])
    return serving, asking


@contextlib.contextmanager
def connected(server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> Iterator[Pair]:
    """Yields both ends of a connection, before their handshake."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if server is None or client is None:
            yield Connection(ours), Connection(theirs)
        else:
            yield TlsConnection(ours, server), TlsConnection(theirs, client, server_hostname="127.0.0.1")


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Runs calls on threads of their own; returns their results or errors."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


@pytest.fixture(params=["plain", "tls"])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Yields both ends of an established connection."""
    with connected(*(contexts(tmp_path) if request.param == "tls" else (None, None))) as pair:
        if request.param == "tls":
            assert together(*(end.handshake for end in pair)) == [None, None]  # type: ignore[attr-defined]
        yield pair


def test_pieces_and_views_of_any_size(pair: Pair) -> None:
    """More pieces than one system call takes, with empty ones, arrive in order."""
    data = random.Random(1).randbytes(3_000_000)
    cuts = [0, 0, 1, *range(2, 3000, 2), 70_000, len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(cuts)]
    found = bytearray(len(data))
    views = [memoryview(found)[start : start + 999] for start in range(0, len(data), 999)]
    assert together(lambda: pair[0].send(pieces), lambda: pair[1].receive(views)) == [None, None]
    assert found == data
    assert checksum(views) == checksum([memoryview(data)])


def test_bytes_that_have_arrived_are_readable(pair: Pair) -> None:
    reader, sender = pair
    assert not reader.is_readable()
    sender.send([b"abcdef"])
    assert reader.read(2) == b"ab"
    assert reader.is_readable()
    assert reader.read(4) == b"cdef"
    assert not reader.is_readable()


def test_the_end_of_the_peer_is_an_error(pair: Pair) -> None:
    pair[0].send([b"ab"])
    pair[0].close()
    with pytest.raises(ConnectionResetError):
        pair[1].read(3)
    assert pair[1].is_readable()


def test_a_deadline_covers_all_calls(pair: Pair) -> None:
    """Bytes that arrive regularly do not extend it; a connection without one waits."""
    ended = threading.Event()

    def drip() -> None:
        while not ended.wait(0.05):
            pair[0].send([b"x"])

    thread = threading.Thread(target=drip)
    thread.start()
    began = time.monotonic()
    pair[1].set_deadline(0.5)
    try:
        with pytest.raises(BlockingIOError):
            pair[1].read(10_000)
    finally:
        ended.set()
        thread.join()
    assert 0.4 < time.monotonic() - began < 20
    pair[1].set_deadline(0.2)
    with pytest.raises(BlockingIOError):
        pair[1].send([bytes(64 << 20)])


def test_shutdown_ends_a_waiting_call(pair: Pair) -> None:
    timer = threading.Timer(0.1, pair[1].shutdown)
    timer.start()
    with pytest.raises(ConnectionResetError):
        pair[1].read(1)
    timer.join()


def test_peeked_bytes_stay() -> None:
    with connected(None, None) as (ours, theirs):
        ours.send([b"abc"])
        assert (theirs.peek(2), theirs.peek(3), theirs.read(3)) == (b"ab", b"abc", b"abc")


def test_records_of_one_byte_are_read_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server waits after every 64 of them, and longer each time. Other records have no wait."""
    with connected(*contexts(tmp_path)) as (server, client):
        together(server.handshake, client.handshake)  # type: ignore[attr-defined]
        pauses: list[float] = []
        monkeypatch.setattr(socket_io, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
        found = bytearray(70_001)
        for size, most in ((70_001, 0), (200, 0), (1, 9)):
            count = 640 if size == 1 else 1
            pieces = [bytes(size)] * count
            together(partial(client.send, pieces), partial(server.receive, [memoryview(found)[: size * count]]))
            assert (len(pauses), sorted(pauses)) == (most, pauses)
        server._short_records = 64 * 5000 - 1  # type: ignore[attr-defined]
        server._hold_back()  # type: ignore[attr-defined]
        assert pauses[-1] == max(pauses) == 0.25, "also after very many records"


@pytest.mark.parametrize("offered", ["q", None])
def test_a_handshake_needs_a_common_protocol(tmp_path: Path, offered: str | None) -> None:
    server, client = contexts(tmp_path, offered)
    with connected(server, client) as pair:
        errors = together(*(end.handshake for end in pair))  # type: ignore[attr-defined]
        assert [type(error) for error in errors] == [ssl.SSLError] * 2


def test_a_stalled_peer_is_detected_before_the_deadline(pair: Pair) -> None:
    """A call ends after the stall limit if no byte moves, otherwise at the deadline."""
    ours, theirs = pair
    ours.set_deadline(60, 0.2)
    sender = threading.Thread(target=lambda: [(time.sleep(0.05), theirs.send([b"x"])) for _ in range(10)])
    sender.start()
    assert ours.read(10) == b"x" * 10
    sender.join()
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        ours.read(1)
    with pytest.raises(BlockingIOError):
        ours.send([bytes(64 << 20)])
    assert time.monotonic() - began < 30


class SlowSocket:
    """A socket that sends or receives three bytes per call and takes four seconds for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sent, self.limits = 100.0, bytearray(), list[int]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def fileno(self) -> int:
        return 0

    def setsockopt(self, _level: int, _option: int, value: bytes) -> None:
        self.limits.append(int.from_bytes(value[:8], "little"))

    def sendmsg(self, pieces: list[memoryview]) -> int:
        self.now += 4
        data = b"".join(pieces)[:3]
        self.sent += data
        return len(data)


def test_equal_deadlines_need_one_limit_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is too short or too long for the next deadline is replaced."""
    slow: Any = SlowSocket(monkeypatch)
    connection = Connection(slow, idle_seconds=120)
    for seconds, limits in (
        (1000, [1010]),
        (1000, []),
        (1000.001, []),
        (950, []),
        (2000, [2020]),
        (1000, [1010]),
        (None, [120, 120]),
        (115, []),
        (100, [101]),
    ):
        connection.set_deadline(seconds)
        connection.send([b"abc"])
        assert slow.limits[-len(limits) :] == limits
        slow.limits.clear()


def test_a_deadline_after_another_one(pair: Pair) -> None:
    """A call waits for the time of its own deadline."""
    ours, theirs = pair
    for seconds in (60, 0.2, 60):
        ours.set_deadline(seconds)
        theirs.send([b"x"])
        assert ours.read(1) == b"x"
        with contextlib.ExitStack() as opened:
            began = time.monotonic()
            if seconds < 1:
                opened.enter_context(pytest.raises(BlockingIOError))
            else:
                timer = threading.Timer(0.5, theirs.send, [[b"y"]])
                timer.start()
                opened.callback(timer.join)
            assert ours.read_some(10) == b"y"
        assert 0.1 < time.monotonic() - began < 20


def test_bytes_are_read_as_they_arrive(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send([b"abc"])
    assert ours.read_some(2) == b"ab"
    assert ours.read_some(9) == b"c"
    theirs.close()
    with pytest.raises(ConnectionResetError):
        ours.read_some(1)


def test_a_slow_peer_gets_every_byte_once_within_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call to the kernel is limited to the time that is left of the deadline."""
    slow: Any = SlowSocket(monkeypatch)
    connection = Connection(slow)
    connection.set_deadline(10)
    slow.limits.clear()
    connection.send([b"abcde", b"fgh"])
    assert (slow.sent, slow.limits) == (b"abcdefgh", [10, 6, 2])
    with pytest.raises(BlockingIOError):
        connection.send([b"late"])
