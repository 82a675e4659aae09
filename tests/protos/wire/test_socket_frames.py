"""Frames of the socket protocol: round trips and malformed frames."""

from __future__ import annotations

import os

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
    CrossedFrameError,
    DataHead,
    FrameKind,
    Purpose,
    check_number,
    next_call_number,
    pack_answer,
    pack_call,
    pack_data_head,
    pack_end,
    pack_hello,
    pack_region_answer,
    purpose_of,
    unpack_answer,
    unpack_call,
    unpack_call_head,
    unpack_data_head,
    unpack_head,
    unpack_hello,
    unpack_region_answer,
)

UINT64 = st.integers(0, 2**64 - 1)


@given(
    purpose=st.sampled_from(Purpose),
    session_id=st.binary(min_size=16, max_size=16),
    epoch=UINT64,
    number=UINT64,
    token=st.text("abcXYZ-", max_size=MAX_TOKEN_BYTES),
)
def test_hellos_round_trip(purpose: Purpose, session_id: bytes, epoch: int, number: int, token: str) -> None:
    """A hello names the purpose, the session, a number and the length of the token that follows."""
    packed = pack_hello(purpose, session_id, epoch, number, token)
    assert unpack_hello(packed[:HELLO_BYTES]) == (purpose, session_id, epoch, number, len(token))
    assert packed[HELLO_BYTES:] == token.encode()
    assert purpose_of(packed[:5]) is purpose


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pack_hello(Purpose.CALLS, bytes(16), 1, 2)[:-1],
        b"KVT2" + pack_hello(Purpose.CALLS, bytes(16), 1, 2)[4:],
        b"KVT3\x09" + pack_hello(Purpose.CALLS, bytes(16), 1, 2)[5:],
        pack_hello(Purpose.CALLS, bytes(16), 1, 2, "x" * (MAX_TOKEN_BYTES + 1))[:HELLO_BYTES],
    ],
)
def test_malformed_hellos(data: bytes) -> None:
    """A hello that is too short, of another version or purpose, or with a long token is refused."""
    with pytest.raises(ValueError, match="hello of this version"):
        unpack_hello(data)


@pytest.mark.parametrize("start", [b"", b"KVT3", b"KVT3\x00", b"KVT2\x02", CALLS_PROTOCOL.encode()])
def test_other_bytes_have_no_purpose(start: bytes) -> None:
    with pytest.raises(ValueError, match="hello of this version"):
        purpose_of(start)


@given(number=UINT64, name=st.binary(min_size=1, max_size=255), message=st.binary(max_size=2000))
def test_calls_round_trip(number: int, name: bytes, message: bytes) -> None:
    """A call is a head with its length, and that many bytes with name and message."""
    packed = pack_call(number, name, message)
    assert unpack_head(packed) == (len(packed) - HEAD_BYTES, FrameKind.CALL, number)
    assert unpack_call(packed[HEAD_BYTES:]) == (name, message)


@given(number=UINT64, code=st.sampled_from(sorted(STATUS_OF_CODE)), message=st.binary(max_size=2000))
def test_answers_round_trip(number: int, code: int, message: bytes) -> None:
    """With every gRPC status code."""
    packed = pack_answer(number, code, message)
    assert unpack_head(packed) == (len(packed) - HEAD_BYTES, FrameKind.ANSWER, number)
    assert unpack_answer(packed[HEAD_BYTES:]) == (code, message)


@given(number=UINT64, offset=UINT64, nbytes=st.integers(0, 2**32 - DATA_HEAD_BYTES), checksum=UINT64)
def test_data_heads_round_trip(number: int, offset: int, nbytes: int, checksum: int) -> None:
    packed = pack_data_head(number, offset, nbytes, checksum)
    assert unpack_head(packed) == (DATA_HEAD_BYTES - HEAD_BYTES + nbytes, FrameKind.DATA, number)
    assert unpack_data_head(packed) == DataHead(number, offset, nbytes, checksum)


@given(bit=st.integers(0, 8 * DATA_HEAD_BYTES - 1))
def test_one_wrong_bit_in_a_data_head(bit: int) -> None:
    """Each bit of the head is covered by its checksum."""
    damaged = bytearray(pack_data_head(9, 3, 1 << 20, 7))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="damaged"):
        unpack_data_head(damaged)


@given(number=UINT64, size=UINT64, begin=UINT64, end=UINT64)
def test_the_range_of_a_region_round_trips(number: int, size: int, begin: int, end: int) -> None:
    code, message = unpack_answer(pack_region_answer(number, size, begin, end)[HEAD_BYTES:])
    assert (code, unpack_region_answer(message)) == (0, (size, begin, end))


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
        unpack_head(b"\x00\x00\x00\x00\x09" + bytes(8))


def head_of(number: int) -> bytes:
    return pack_call(number % 2**64, b"a/b", b"")[:HEAD_BYTES]


@given(last=UINT64, step=st.integers(1, 2**31 - 1))
def test_numbers_that_follow(last: int, step: int) -> None:
    """Numbers of one process grow, also beyond the largest one."""
    assert unpack_call_head(head_of(last + step), last) == (4, (last + step) % 2**64)


@given(last=UINT64, calls=st.integers(-(2**31), 2**31), processes=st.integers(1, 2**22))
def test_numbers_of_another_process_do_not_follow(last: int, calls: int, processes: int) -> None:
    """The difference of their process ids is in the upper half."""
    for number in ((processes << 32) + calls, -(processes << 32) + calls):
        with pytest.raises(CrossedFrameError, match="cannot follow"):
            unpack_call_head(head_of(last + number), last)


@pytest.mark.parametrize("step", [0, -1, 2**31, 2**63])
def test_repeated_and_earlier_numbers_do_not_follow(step: int) -> None:
    with pytest.raises(CrossedFrameError, match="cannot follow"):
        unpack_call_head(head_of(5 + step), 5)


def test_another_frame_instead_of_a_call() -> None:
    with pytest.raises(ValueError, match="not a call"):
        unpack_call_head(pack_end(6), 5)


def test_a_process_numbers_its_calls() -> None:
    """A forked child continues with numbers that do not follow those of its parent."""
    first, second = next_call_number(), next_call_number()
    assert (second - first) % 2**64 == 1
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, next_call_number().to_bytes(8, "little"))
        os._exit(0)
    inherited = int.from_bytes(os.read(reader, 8), "little")
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    third = next_call_number()
    for number, last in ((inherited, second), (third, inherited)):
        with pytest.raises(CrossedFrameError):
            unpack_call_head(head_of(number), last)
    assert unpack_call_head(head_of(third), second)[1] == third


def test_a_frame_of_another_call() -> None:
    number = unpack_head(pack_end(7))[2]
    check_number(number, 7)
    with pytest.raises(CrossedFrameError, match="call 7 arrived instead of one of call 8"):
        check_number(number, 8)
