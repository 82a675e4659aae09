"""Calls over a Unix socket: what one side packs the other takes apart, and nothing else."""

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
def test_calls_come_as_they_went(name: bytes, message: bytes) -> None:
    """A request is its length, and as many bytes, in which name and message are found again."""
    packed = pack_call(name, message)
    assert unpack_length(packed) == len(packed) - LENGTH_BYTES
    assert unpack_call(packed[LENGTH_BYTES:]) == (name, message)


@given(code=st.sampled_from(sorted(STATUS_OF_CODE)), message=st.binary(max_size=2000))
def test_answers_come_as_they_went(code: int, message: bytes) -> None:
    """So is an answer, with any status that gRPC knows."""
    packed = pack_answer(code, message)
    assert unpack_length(packed) == len(packed) - LENGTH_BYTES
    assert unpack_answer(packed[LENGTH_BYTES:]) == (code, message)


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x00message", b"\x05abcd"])
def test_what_is_no_call(body: bytes) -> None:
    """A request without a name, or with a name that goes beyond its end, is refused."""
    with pytest.raises(ValueError, match="not a call"):
        unpack_call(body)


@pytest.mark.parametrize("body", [b"", b"\x11", b"\xff"])
def test_what_is_no_answer(body: bytes) -> None:
    """So is an answer without a status, or with one that there is not."""
    with pytest.raises(ValueError, match="not an answer"):
        unpack_answer(body)
