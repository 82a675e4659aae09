"""ZMTP of the publisher: what peers may send, in any pieces, and what ends a connection."""

from __future__ import annotations

import pytest
from harness.zmtp_peer import GREETING, command, frame, ready, subscription
from hypothesis import given
from hypothesis import strategies as st

from kvtier.server.events.zmtp import MAX_FRAME_BYTES, Frame, NullMechanism, Peer, ProtocolError, wire_of

OPENING = GREETING + ready(b"SUB")


def peer() -> Peer:
    return Peer(NullMechanism(b"PUB"), (b"SUB", b"XSUB"))


def taken(data: bytes, made: Peer | None = None) -> list[list[bytes]]:
    return list((made or peer()).receive(data))


@given(st.lists(st.integers(1, 40), max_size=20))
def test_messages_in_any_pieces(sizes: list[int]) -> None:
    """Subscriptions of both versions of the protocol, and requests."""
    data = OPENING + subscription(b"topic") + command(b"SUBSCRIBE", b"x" * 300) + command(b"CANCEL", b"topic")
    data += frame(b"", flags=1) + frame(bytes(8))
    made, found = peer(), []
    for size in [*sizes, len(data)]:
        found += taken(data[:size], made)
        data = data[size:]
    assert found == [[b"\x01topic"], [b"\x01" + b"x" * 300], [b"\x00topic"], [b"", bytes(8)]]
    assert made.is_ready


def test_a_ping_has_an_answer() -> None:
    made = peer()
    assert taken(OPENING + command(b"PING", b"\0\x05context"), made) == []
    assert bytes(made.outgoing).endswith(command(b"PONG", b"context"))


@pytest.mark.parametrize("length", [0, 1, 255, 256, 70_000])
def test_frames_of_any_length_are_encoded(length: int) -> None:
    body = b"x" * length
    assert wire_of(Frame(body, has_more=True)) == frame(body, flags=1)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"\xff" + bytes(9) + GREETING[10:],
        GREETING[:10] + b"\x01" + GREETING[11:],
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
        GREETING + subscription(b""),
        GREETING + ready(b"PUB"),
        GREETING + command(b"READY"),
        GREETING + command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xffSUB"),
        GREETING + command(b"READY", b"\xff"),
        GREETING + command(b"HELLO"),
        GREETING + command(b""),
        GREETING + b"\x04\x00",
        OPENING + b"\x08\x00",
        OPENING + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
        OPENING + b"\x02" + b"\xff" * 8,
        OPENING + frame(b"", flags=1) * 5,
        OPENING + command(b"PING", b"\0\0" + bytes(17)),
    ],
)
def test_a_peer_that_breaks_the_rules(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        taken(data)


@given(data=st.binary(max_size=200), is_open=st.booleans())
def test_arbitrary_bytes(data: bytes, *, is_open: bool) -> None:
    """They end the connection or have no effect; nothing else is raised, and little is kept."""
    made = peer()
    try:
        taken((OPENING if is_open else GREETING) + data, made)
    except ProtocolError:
        return
    assert len(made.outgoing) < 4096
