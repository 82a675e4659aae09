"""Frames of `TransferService`, encoded and decoded without a protobuf copy of their payload.

A frame is a `PushRequest` or `PullResponse` whose last field is `payload`. It consists of the other
fields as serialized by protobuf, and then the tag, the length and the bytes of the payload. The
generated messages would copy the payload at each end. These copies cost a third to a half of the
throughput of a stream.

Server and client use these functions as gRPC serializers, on any thread. Other implementations can
use the generated messages, because the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from ..v1.transfer_pb2 import PullResponse, PushRequest

__all__ = [
    "FRAME_BYTES",
    "Head",
    "decode_pull_frame",
    "decode_push_frame",
    "encode_pull_frame",
    "frame_head",
]

_Fields = TypeVar("_Fields", PushRequest, PullResponse)

FRAME_BYTES: Final = 1 << 20
"""Default payload size of a frame. A frame and its copies fit into a processor's cache."""

_VARINT: Final = 0
_FIXED64: Final = 1
_DELIMITED: Final = 2
_FIXED32: Final = 5
_PAYLOAD_TAG: Final = PushRequest.PAYLOAD_FIELD_NUMBER << 3 | _DELIMITED
_TAGS: Final = range(1 << 3, 2**32)
_MORE: Final = 0x80  # bit in a byte of a varint: another byte follows


class Head(NamedTuple):
    """Bytes before the payload. The caller writes the checksum (uint64) at `checksum_at`."""

    data: bytes
    checksum_at: int


def frame_head(fields: PushRequest | PullResponse, payload_bytes: int) -> Head:
    """Returns the head of a frame. `fields` has neither checksum nor payload."""
    start = fields.SerializeToString() + bytes((fields.XXH3_64_FIELD_NUMBER << 3 | _FIXED64,))
    return Head(start + bytes(8) + bytes((_PAYLOAD_TAG,)) + _varint(payload_bytes), len(start))


def encode_pull_frame(offset_bytes: int, xxh3_64: int, payload: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """Returns a `PullResponse` with these buffers as payload. Copies the buffers once."""
    size = sum(memoryview(piece).nbytes for piece in payload)
    head = PullResponse(offset_bytes=offset_bytes, xxh3_64=xxh3_64).SerializeToString()
    if not size:
        return head
    return b"".join((head, bytes((_PAYLOAD_TAG,)), _varint(size), *payload))


def decode_push_frame(message: bytes) -> tuple[PushRequest, memoryview]:
    """Splits a `PushRequest` into its other fields and a view of its payload.

    Unknown fields are skipped. Raises ValueError if the message is not a frame, or if `payload` is
    not the last field.
    """
    return _decode(PushRequest, message)


def decode_pull_frame(message: bytes) -> tuple[PullResponse, memoryview]:
    """Splits a `PullResponse` as `decode_push_frame` does."""
    return _decode(PullResponse, message)


def _decode(kind: type[_Fields], message: bytes) -> tuple[_Fields, memoryview]:
    head_end, payload_start = _find_payload(message)
    try:
        fields = kind.FromString(message[:head_end])
    except DecodeError as error:
        raise ValueError(f"not a {kind.DESCRIPTOR.name}: {error}") from error
    return fields, memoryview(message)[payload_start:]


def _find_payload(message: bytes) -> tuple[int, int]:
    """Returns the end of the other fields and the start of the payload.

    If there is no payload, both are the end of the message.
    """
    position, end = 0, len(message)
    while position < end:
        tag, value_start = _read_varint(message, position)
        if tag not in _TAGS:
            raise ValueError(f"malformed tag at byte {position} of a frame")
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
    raise ValueError(f"invalid wire type {wire_type} at byte {position} of a frame")


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & ~_MORE) << (7 * index)
        if byte < _MORE:
            return value, position + index + 1
    raise ValueError(f"malformed number at byte {position} of a frame")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= _MORE:
        encoded.append(value & ~_MORE & 0xFF | _MORE)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
