"""Connections of the protocol RESP2: any bytes of a peer are answers or one kind of error."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.remote.resp import Answer, ErrorAnswer, RespConnection, command

SECONDS = 20.0


def connected() -> tuple[RespConnection, socket.socket]:
    ours, theirs = socket.socketpair()
    connection = RespConnection(ours)
    connection.set_deadline(time.monotonic() + SECONDS)
    return connection, theirs


def answers_to(sent: bytes, count: int = 1) -> list[Answer]:
    connection, peer = connected()
    peer.sendall(sent)  # fits into the buffer of the socket
    peer.shutdown(socket.SHUT_WR)
    try:
        return [connection.read() for _ in range(count)]
    finally:
        connection.close()
        peer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"+OK\r\n", b"OK"),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$5\r\na\r\nbc\r\n", b"a\r\nbc"),
        (b"-OOM no memory\r\n", ErrorAnswer("OOM no memory")),
        (b"*2\r\n:1\r\n*1\r\n$1\r\nx\r\n", [1, [b"x"]]),
        (b"$9000\r\n" + b"v" * 9000 + b"\r\n", b"v" * 9000),
    ],
)
def test_answers(sent: bytes, answer: Answer) -> None:
    assert answers_to(sent) == [answer]
    assert answers_to(sent + b":7\r\n" + sent, 3) == [answer, 7, answer]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"+OK",
        b"+OK\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$+5\r\nhello\r\n",
        b"$5 \r\nhello\r\n",
        b"$3\r\nhello\r\n",
        b"$5\r\nhel",
        b"$1048577\r\n",
        b"$99999999999\r\n",
        b":1.5\r\n",
        b":\r\n",
        b"*65537\r\n",
        b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        b"+" + b"x" * 5000 + b"\r\n",
    ],
)
def test_other_bytes_are_an_error(sent: bytes) -> None:
    with pytest.raises(StoreUnavailableError):
        answers_to(sent)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9000), max_size=5),
    shorter=st.integers(0, 9000),
    cuts=st.lists(st.integers(1, 30000), max_size=5),
)
def test_a_value_fills_its_pieces(sizes: list[int], shorter: int, cuts: list[int]) -> None:
    """However the pieces and the packets divide it, and what follows is the next answer."""
    value = bytes(number % 251 for number in range(max(0, sum(sizes) - shorter)))
    sent = b"$%d\r\n%b\r\n:5\r\n" % (len(value), value)
    connection, peer = connected()

    def write() -> None:
        ends = sorted({*cuts, len(sent)})
        for start, end in zip([0, *ends], ends, strict=False):
            peer.sendall(sent[start:end])

    writer = threading.Thread(target=write)
    writer.start()
    pieces = [memoryview(bytearray(size)) for size in sizes]
    assert connection.read_value(pieces) == len(value)
    assert b"".join(pieces)[: len(value)] == value
    assert connection.read() == 5
    writer.join()
    connection.close()
    peer.close()


def test_a_value_that_is_too_large_is_skipped() -> None:
    connection, peer = connected()
    peer.sendall(b"$6000\r\n" + b"x" * 6000 + b"\r\n+next\r\n")
    assert connection.read_value([memoryview(bytearray(5))]) == 6000
    assert connection.read() == b"next"
    connection.close()
    peer.close()


def test_calls_end_at_the_deadline() -> None:
    """Also if the peer sends a byte now and then, or receives nothing."""
    connection, peer = connected()
    connection.set_deadline(time.monotonic() + 0.05)
    with pytest.raises(StoreUnavailableError, match="deadline"):
        connection.read()
    connection.set_deadline(time.monotonic() + 0.05)
    with pytest.raises(StoreUnavailableError, match="deadline"):
        connection.send([bytes(16 << 20)])
    connection.close()
    peer.close()


def test_commands() -> None:
    assert command(b"SET", b"k\r\n", b"") == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$0\r\n\r\n"
