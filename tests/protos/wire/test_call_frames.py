"""Frames of calls over a socket: round trips and malformed frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.protos.wire.call_frames import (
    LENGTH_BYTES,
    STATUS_OF_CODE,
    pack_answer,
    pack_call,
    unpack_answer,
    unpack_call,
    unpack_length,
)


@given(name=st.binary(min_size=1, max_size=255), message=st.binary(max_size=2000))
def test_requests_round_trip(name: bytes, message: bytes) -> None:
    """A request is its length, and that many bytes with name and message."""
    packed = pack_call(name, message)
    assert unpack_length(packed) == len(packed) - LENGTH_BYTES
    assert unpack_call(packed[LENGTH_BYTES:]) == (name, message)


@given(code=st.sampled_from(sorted(STATUS_OF_CODE)), message=st.binary(max_size=2000))
def test_answers_round_trip(code: int, message: bytes) -> None:
    """With every gRPC status code."""
    packed = pack_answer(code, message)
    assert unpack_length(packed) == len(packed) - LENGTH_BYTES
    assert unpack_answer(packed[LENGTH_BYTES:]) == (code, message)


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00message", b"\x05abcd"])
def test_malformed_requests(body: bytes) -> None:
    """A request without a name, or with a name longer than the body, is refused."""
    with pytest.raises(ValueError, match="not a call"):
        unpack_call(body)


@pytest.mark.parametrize("body", [b"", b"\x11", b"\xff"])
def test_malformed_answers(body: bytes) -> None:
    """An answer without a valid status code is refused."""
    with pytest.raises(ValueError, match="not an answer"):
        unpack_answer(body)
