"""Frames of the socket protocol: round trips and malformed frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.protos.wire.socket_frames import (
    CALLS_PROTOCOL,
    DATA_HEAD_BYTES,
    HEAD_BYTES,
    HELLO_BYTES,
    MAX_TOKEN_BYTES,
    STATUS_OF_CODE,
    DataHead,
    FrameKind,
    Purpose,
    pack_answer,
    pack_call,
    pack_data_head,
    pack_hello,
    pack_region_answer,
    purpose_of,
    unpack_answer,
    unpack_call,
    unpack_data_head,
    unpack_head,
    unpack_hello,
    unpack_region_bytes,
)

UINT64 = st.integers(0, 2**64 - 1)


@given(
    purpose=st.sampled_from(Purpose),
    session_id=st.binary(min_size=16, max_size=16),
    epoch=UINT64,
    token=st.text("abcXYZ-", max_size=MAX_TOKEN_BYTES),
)
def test_hellos_round_trip(purpose: Purpose, session_id: bytes, epoch: int, token: str) -> None:
    """A hello names the purpose, the session and the length of the token that follows."""
    packed = pack_hello(purpose, session_id, epoch, token)
    assert unpack_hello(packed[:HELLO_BYTES]) == (purpose, session_id, epoch, len(token))
    assert packed[HELLO_BYTES:] == token.encode()
    assert purpose_of(packed[:5]) is purpose


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pack_hello(Purpose.CALLS, bytes(16), 1)[:-1],
        b"KVT1" + pack_hello(Purpose.CALLS, bytes(16), 1)[4:],
        b"KVT2\x09" + pack_hello(Purpose.CALLS, bytes(16), 1)[5:],
        pack_hello(Purpose.CALLS, bytes(16), 1, "x" * (MAX_TOKEN_BYTES + 1))[:HELLO_BYTES],
    ],
)
def test_malformed_hellos(data: bytes) -> None:
    """A hello that is too short, of another version or purpose, or with a long token is refused."""
    with pytest.raises(ValueError, match="hello of this version"):
        unpack_hello(data)


@pytest.mark.parametrize("start", [b"", b"KVT2", b"KVT2\x00", b"KVT1\x02", CALLS_PROTOCOL.encode()])
def test_other_bytes_have_no_purpose(start: bytes) -> None:
    with pytest.raises(ValueError, match="hello of this version"):
        purpose_of(start)


@given(name=st.binary(min_size=1, max_size=255), message=st.binary(max_size=2000))
def test_calls_round_trip(name: bytes, message: bytes) -> None:
    """A call is a head with its length, and that many bytes with name and message."""
    packed = pack_call(name, message)
    assert unpack_head(packed) == (len(packed) - HEAD_BYTES, FrameKind.CALL)
    assert unpack_call(packed[HEAD_BYTES:]) == (name, message)


@given(code=st.sampled_from(sorted(STATUS_OF_CODE)), message=st.binary(max_size=2000))
def test_answers_round_trip(code: int, message: bytes) -> None:
    """With every gRPC status code."""
    packed = pack_answer(code, message)
    assert unpack_head(packed) == (len(packed) - HEAD_BYTES, FrameKind.ANSWER)
    assert unpack_answer(packed[HEAD_BYTES:]) == (code, message)


@given(offset=UINT64, nbytes=st.integers(0, 2**32 - DATA_HEAD_BYTES), checksum=UINT64)
def test_data_heads_round_trip(offset: int, nbytes: int, checksum: int) -> None:
    packed = pack_data_head(offset, nbytes, checksum)
    assert unpack_head(packed) == (DATA_HEAD_BYTES - HEAD_BYTES + nbytes, FrameKind.DATA)
    assert unpack_data_head(packed) == DataHead(offset, nbytes, checksum)


@given(bit=st.integers(0, 8 * DATA_HEAD_BYTES - 1))
def test_one_wrong_bit_in_a_data_head(bit: int) -> None:
    """Each bit of the head is covered by its checksum."""
    damaged = bytearray(pack_data_head(3, 1 << 20, 7))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="damaged"):
        unpack_data_head(damaged)


@given(size=UINT64)
def test_the_size_of_a_region_round_trips(size: int) -> None:
    code, message = unpack_answer(pack_region_answer(size)[HEAD_BYTES:])
    assert (code, unpack_region_bytes(message)) == (0, size)


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00message", b"\x05abcd"])
def test_malformed_calls(body: bytes) -> None:
    """A call without a name, or with a name longer than the body, is refused."""
    with pytest.raises(ValueError, match="not a call"):
        unpack_call(body)


@pytest.mark.parametrize("body", [b"", b"\x11", b"\xff"])
def test_malformed_answers(body: bytes) -> None:
    """An answer without a valid status code is refused."""
    with pytest.raises(ValueError, match="not an answer"):
        unpack_answer(body)


def test_an_unknown_kind_of_frame() -> None:
    with pytest.raises(ValueError, match="9"):
        unpack_head(b"\x00\x00\x00\x00\x09")
