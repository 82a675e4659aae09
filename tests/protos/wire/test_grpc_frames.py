"""Frames of streams: the bytes equal protobuf's, and malformed ones raise ValueError."""

from __future__ import annotations

import random

import pytest
from harness.push_frames import encode_push_frame
from hypothesis import given
from hypothesis import strategies as st

from kvtier.protos.v1.common_pb2 import SessionRef
from kvtier.protos.v1.transfer_pb2 import PullResponse, PushRequest
from kvtier.protos.wire.grpc_frames import decode_pull_frame, decode_push_frame, encode_pull_frame

U64 = st.integers(0, 2**64 - 1)
PIECES = st.lists(st.binary(max_size=300), max_size=4)
SESSIONS = st.none() | st.builds(SessionRef, session_id=st.binary(max_size=16), epoch=U64)
UNKNOWN_FIELDS = (
    b"\x30\xff\x01",  # 6: varint
    b"\x39" + bytes(8),  # 7: fixed64
    b"\x45" + bytes(4),  # 8: fixed32
    b"\x4a\x03abc",  # 9: delimited
    b"\x78\x01",  # 15, but a varint
    b"\x80\x80\x01\x00",  # 2048: varint
)


@given(offset=U64, checksum=U64, pieces=PIECES, session=SESSIONS, store_id=U64)
def test_push_frames_are_push_requests(
    offset: int, checksum: int, pieces: list[bytes], session: SessionRef | None, store_id: int
) -> None:
    """Any serialized `PushRequest` decodes to its fields and its payload."""
    fields = PushRequest(session=session, store_id=store_id, offset_bytes=offset, xxh3_64=checksum)
    message = PushRequest(payload=b"".join(pieces))
    message.MergeFrom(fields)
    decoded, payload = decode_push_frame(message.SerializeToString())
    assert (decoded, bytes(payload)) == (fields, message.payload)


@given(offset=U64, checksum=U64, pieces=PIECES)
def test_pull_frames_are_pull_responses(offset: int, checksum: int, pieces: list[bytes]) -> None:
    """An encoded frame is the serialized message, and decodes to its fields and payload."""
    message = PullResponse(offset_bytes=offset, xxh3_64=checksum, payload=b"".join(pieces))
    encoded = encode_pull_frame(offset, checksum, pieces)
    assert encoded == message.SerializeToString()
    decoded, payload = decode_pull_frame(encoded)
    assert (decoded, bytes(payload)) == (PullResponse(offset_bytes=offset, xxh3_64=checksum), message.payload)


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_long_payloads(size: int) -> None:
    """Lengths at which their varint grows by a byte."""
    payload = random.Random(size).randbytes(size)
    encoded = encode_pull_frame(1, 2, [payload])
    assert PullResponse.FromString(encoded).payload == payload
    assert decode_pull_frame(encoded)[1] == payload


def test_payload_is_a_view() -> None:
    """Decoding does not copy the payload."""
    encoded = encode_pull_frame(0, 0, [b"payload"])
    assert decode_pull_frame(encoded)[1].obj is encoded


def test_wide_items_count_in_bytes() -> None:
    """A view with items of several bytes is sent completely."""
    wide = memoryview(bytes(range(16))).cast("Q")
    assert decode_pull_frame(encode_pull_frame(0, 0, [wide]))[1] == bytes(range(16))


@pytest.mark.parametrize("unknown", UNKNOWN_FIELDS)
def test_unknown_fields_are_skipped(unknown: bytes) -> None:
    """A newer peer may send other fields before the payload."""
    encoded = encode_pull_frame(7, 9, [b"bytes"])
    at = encoded.index(b"\x7a")
    fields, payload = decode_pull_frame(encoded[:at] + unknown + encoded[at:])
    assert (fields.offset_bytes, fields.xxh3_64, bytes(payload)) == (7, 9, b"bytes")


@pytest.mark.parametrize(
    "message",
    [
        encode_pull_frame(7, 9, [b"bytes"]) + b"\x08\x01",
        encode_pull_frame(7, 9, [b"bytes"]) + b"\x7a\x01x",
        encode_pull_frame(7, 9, [b"bytes"])[:-1],
        b"\x7a",
        b"\x7a\xff",
        b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x08",
        b"\x11\x00\x00",
        b"\x0a\x05ab",
        b"\x00\x01",
        b"\x0b\x08\x01\x0c",
        b"\x0e\x01",
        b"\xff\xff\xff\xff\xff\x01\x01",
    ],
    ids=[
        "field after payload",
        "two payloads",
        "payload cut short",
        "no length",
        "half a length",
        "endless length",
        "no value",
        "half a fixed64",
        "half a string",
        "field zero",
        "group",
        "wire type 6",
        "tag beyond 32 bits",
    ],
)
def test_malformed_frames_are_refused(message: bytes) -> None:
    """They raise ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 - the wording is for people
        decode_pull_frame(message)


@given(
    message=st.binary(max_size=60)
    | st.tuples(PIECES, st.binary(max_size=8)).map(lambda x: encode_push_frame(1, 2, x[0])[:-1] + x[1])
)
def test_arbitrary_bytes_never_break_the_decoder(message: bytes) -> None:
    """The decoder raises only ValueError; frames that it accepts mean the same to protobuf."""
    try:
        fields, payload = decode_push_frame(message)
    except ValueError:
        return
    expected = PushRequest.FromString(message)
    assert payload == expected.payload
    expected.ClearField("payload")
    assert fields.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
