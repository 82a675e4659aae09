"""Pulls from a peer that sends wrong bytes, refuses, hangs or dies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from harness.payloads import payload

from kvtier.client import (
    ChecksumMismatch,
    DeadlineExceeded,
    KVTierError,
    LeaseLost,
    NotConnected,
    ServerError,
    SessionLost,
)
from kvtier.client.session import socket_calls
from kvtier.cuda.host.socket_io import Connection, checksum
from kvtier.protos.credentials import Credentials
from kvtier.protos.error_reasons import status_of
from kvtier.protos.v1 import common_pb2
from kvtier.protos.wire import socket_frames as frames
from kvtier.server.peers.pull import PeerStreams

PART = 4096
BYTES = [memoryview(payload(b"%d" % number, PART)) for number in range(3)]
SEQUENCE = memoryview(b"".join(BYTES))
CALL = 7
"""Number of all calls and hellos."""
ANSWER = frames.pack_answer(CALL, 0)


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (frames, socket_calls):
        monkeypatch.setattr(module, "next_call_number", lambda: CALL)


def _frame(offset: int, nbytes: int, *, damaged: bool = False, number: int = CALL) -> bytes:
    piece = SEQUENCE[offset : offset + nbytes]
    return frames.pack_data_head(number, offset, nbytes, checksum([piece]) ^ damaged) + bytes(piece)


@contextlib.contextmanager
def _peer(serve: Callable[[Connection], object]) -> Iterator[PeerStreams]:
    """A peer that accepts one hello and one call, and then does what `serve` does."""

    def run() -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                connection = Connection(sock)
                connection.read(frames.HELLO_BYTES)
                connection.send([ANSWER])
                connection.read(frames.unpack_head(connection.read(frames.HEAD_BYTES))[0])
                serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        ref = common_pb2.SessionRef(session_id=bytes(16), epoch=1)
        connections = PeerStreams(listener.getsockname(), ref, Credentials(), "")
        try:
            yield connections
        finally:
            connections.close()
            thread.join()


def _pull(connections: PeerStreams, seconds: float = 30.0) -> list[np.ndarray]:
    target = [np.zeros(PART, np.uint8) for _ in BYTES]
    connections.pull(7, [4, 5, 6], [memoryview(part) for part in target], seconds)
    return target


def test_a_pull_fills_the_parts() -> None:
    """Frames may end within a part."""
    ends = [_frame(0, 5000), _frame(5000, 7000), _frame(12000, 288), ANSWER]
    with _peer(lambda connection: connection.send(ends)) as connections:
        assert b"".join(map(bytes, _pull(connections))) == SEQUENCE


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ([_frame(0, 5000), _frame(5000, 7288, damaged=True), ANSWER], ChecksumMismatch),
        ([_frame(0, 5000), ANSWER], ChecksumMismatch),
        ([_frame(5000, 7288), ANSWER], ChecksumMismatch),
        ([_frame(0, 12288), _frame(0, 12288), ANSWER], ChecksumMismatch),
        ([_frame(0, 5000), _frame(0, 5000)], ChecksumMismatch),
        ([_frame(0, 0)], ChecksumMismatch),
        ([_frame(0, 12288)[:100]], NotConnected),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], NotConnected),
        ([frames.pack_error(CALL, status_of("LEASE_NOT_FOUND", "gone"))], LeaseLost),
        ([frames.pack_answer(CALL, 5, b"\xff" * 9)], ServerError),
        ([_frame(0, 12288), frames.pack_answer(CALL, 0, b"\xff" * 9)], ServerError),
        ([_frame(0, 12288), frames.pack_answer(CALL, 0, bytes(1 << 20))], ServerError),
        ([_frame(0, 5000), _frame(5000, 7288, number=6), ANSWER], NotConnected),
        ([_frame(0, 12288), frames.pack_answer(6, 0)], NotConnected),
    ],
    ids=[
        "damaged",
        "too few",
        "not from the start",
        "twice",
        "a piece twice",
        "an empty piece",
        "closed",
        "another protocol",
        "refused",
        "no status",
        "no response",
        "a long response",
        "bytes of another call",
        "answer to another call",
    ],
)
def test_wrong_answers_are_errors(sent: list[bytes], error: type[KVTierError]) -> None:
    """Only a refusal has a reason."""
    with _peer(lambda connection: connection.send(sent)) as connections, pytest.raises(error) as caught:
        _pull(connections)
    assert bool(caught.value.reason) is (error is LeaseLost)


def test_a_peer_that_hangs_costs_only_the_deadline() -> None:
    ended = threading.Event()
    with _peer(lambda _: ended.wait(60)) as connections:
        with pytest.raises(DeadlineExceeded):
            _pull(connections, 0.2)
        ended.set()


def test_close_ends_a_running_pull() -> None:
    begun, ended = threading.Event(), threading.Event()

    def serve(_: Connection) -> None:
        begun.set()
        ended.wait(60)

    with _peer(serve) as connections:
        closer = threading.Thread(target=lambda: begun.wait(60) and connections.close())
        closer.start()
        with pytest.raises(SessionLost):
            _pull(connections)
        ended.set()
        closer.join()
