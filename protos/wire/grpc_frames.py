"""The frames of `TransferService`, sent and taken without copying their payload through a protobuf message.

A frame is a `PushRequest` or `PullResponse` whose last field is `payload`. So it is the small message of the other
fields, serialized by protobuf as usual, followed by one tag, one length and the raw bytes. A protobuf `bytes` field
costs a copy at each end, a third to a half of the rate of a bulk stream.

Both sides hand these functions to gRPC's raw-bytes handlers; any thread may call them. Peers in other languages can use
the generated messages: the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from ..v1.common_pb2 import SessionRef
from ..v1.transfer_pb2 import PullResponse, PushRequest

__all__ = [
    "FRAME_BYTES",
    "Head",
    "decode_pull_frame",
    "decode_push_frame",
    "encode_pull_frame",
    "encode_push_frame",
    "pull_head",
    "push_head",
]

_Fields = TypeVar("_Fields", PushRequest, PullResponse)

FRAME_BYTES: Final = 1 << 20
"""Payload of a frame where nothing asks for less: what both ends make of it, and gRPC's own copies, stay in a processor's cache."""

_VARINT: Final = 0
_FIXED64: Final = 1
_DELIMITED: Final = 2
_FIXED32: Final = 5
_PAYLOAD_TAG: Final = PushRequest.PAYLOAD_FIELD_NUMBER << 3 | _DELIMITED
_TAGS: Final = range(1 << 3, 2**32)
_MORE: Final = 0x80  # the bit of a varint's byte that says that another one follows


class Head(NamedTuple):
    """What comes before the payload of a frame. Its checksum is still to be filled in, whatever it is."""

    data: bytes
    checksum_at: int
    """Where its 8 bytes are, the lowest first."""


def push_head(fields: PushRequest, payload_bytes: int) -> Head:
    """Returns the head of a frame with these fields, whose own checksum and payload are empty, for some payload."""
    return _head(fields, PushRequest.XXH3_64_FIELD_NUMBER, payload_bytes)


def pull_head(fields: PullResponse, payload_bytes: int) -> Head:
    """Returns the head of a frame with these fields, whose own checksum and payload are empty, for some payload."""
    return _head(fields, PullResponse.XXH3_64_FIELD_NUMBER, payload_bytes)


def _head(fields: Message, checksum_field: int, payload_bytes: int) -> Head:
    start = fields.SerializeToString() + bytes((checksum_field << 3 | _FIXED64,))
    return Head(start + bytes(8) + bytes((_PAYLOAD_TAG,)) + _varint(payload_bytes), len(start))


def encode_push_frame(
    offset_bytes: int,
    xxh3_64: int,
    payload: Sequence[bytes | bytearray | memoryview],
    *,
    session: SessionRef | None = None,
    store_id: int = 0,
) -> bytes:
    """Returns the bytes of a `PushRequest`; its payload is the given buffers, one after the other.

    `session` and `store_id` belong in the first frame of a stream only. Copies the payload once, holding the GIL.
    """
    fields = PushRequest(session=session, store_id=store_id, offset_bytes=offset_bytes, xxh3_64=xxh3_64)
    return _encode(fields, payload)


def encode_pull_frame(offset_bytes: int, xxh3_64: int, payload: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Returns the bytes of a `PullResponse`; its payload is the given buffers, one after the other.

    Copies the payload once, holding the GIL.
    """
    return _encode(PullResponse(offset_bytes=offset_bytes, xxh3_64=xxh3_64), payload)


def decode_push_frame(message: bytes) -> tuple[PushRequest, memoryview]:
    """Splits a `PushRequest` into its fields, `payload` left empty, and a view of the payload.

    Unknown fields are skipped. Raises `ValueError` for whatever is not a frame, and where `payload` is not the last
    field.
    """
    return _decode(PushRequest, message)


def decode_pull_frame(message: bytes) -> tuple[PullResponse, memoryview]:
    """Splits a `PullResponse` into its fields, `payload` left empty, and a view of the payload.

    Errors as `decode_push_frame`.
    """
    return _decode(PullResponse, message)


def _encode(fields: Message, payload: Sequence[bytes | bytearray | memoryview]) -> bytes:
    size = sum(memoryview(piece).nbytes for piece in payload)
    head = fields.SerializeToString()
    if not size:
        return head
    return b"".join((head, bytes((_PAYLOAD_TAG,)), _varint(size), *payload))


def _decode(kind: type[_Fields], message: bytes) -> tuple[_Fields, memoryview]:
    head_end, payload_start = _find_payload(message)
    try:
        fields = kind.FromString(message[:head_end])
    except DecodeError as error:
        raise ValueError(f"not a {kind.DESCRIPTOR.name}: {error}") from error
    return fields, memoryview(message)[payload_start:]


def _find_payload(message: bytes) -> tuple[int, int]:
    """Returns where the fields before the payload end and where its bytes start; both the end without one."""
    position, end = 0, len(message)
    while position < end:
        tag, value_start = _read_varint(message, position)
        if tag not in _TAGS:
            raise ValueError(f"a malformed tag at byte {position} of a frame")
        if tag == _PAYLOAD_TAG:
            size, payload_start = _read_varint(message, value_start)
            if payload_start + size != end:
                raise ValueError("the payload of a frame is cut short, or is not its last field")
            return position, payload_start
        position = _skip(message, value_start, tag & 7)
        if position > end:
            raise ValueError("a frame is cut short")
    return end, end


def _skip(message: bytes, position: int, wire_type: int) -> int:
    if wire_type == _VARINT:
        return _read_varint(message, position)[1]
    if wire_type == _FIXED64:
        return position + 8
    if wire_type == _FIXED32:
        return position + 4
    if wire_type == _DELIMITED:
        size, start = _read_varint(message, position)
        return start + size
    raise ValueError(f"wire type {wire_type} at byte {position} of a frame")


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & ~_MORE) << (7 * index)
        if byte < _MORE:
            return value, position + index + 1
    raise ValueError(f"a malformed number at byte {position} of a frame")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= _MORE:
        encoded.append(value & ~_MORE & 0xFF | _MORE)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
