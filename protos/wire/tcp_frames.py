"""Frames of Push and Pull over TCP to the bulk process. gRPC would copy each byte five times.

- Request: a head, and a `PushRequest` or `PullRequest` without payload.
- Frames: each has a head and bytes. The head has a checksum of the bytes and a checksum of itself.
  The bytes are a piece of the sequence that `TransferService` describes. In a Push the client sends
  frames, in a Pull the server. The last frame has no bytes.
- Answer: a head, and a `PushResponse` or `PullResponse`. Then the client may send the next request.

The server may send a refusal (reason and text) instead of an answer or a frame, and then closes the
connection. Numbers are little-endian. A connection that begins with an attach request (module
`attach`) carries calls instead (module `call_frames`).
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

import xxhash

__all__ = [
    "ANSWER_BYTES",
    "FRAME_HEAD_BYTES",
    "MAX_MESSAGE_BYTES",
    "REQUEST_BYTES",
    "FrameHead",
    "Method",
    "pack_answer",
    "pack_frame_head",
    "pack_refusal",
    "pack_request",
    "unpack_answer",
    "unpack_frame_head",
    "unpack_refusal",
    "unpack_request",
]

_MAGIC: Final = b"KVP1"
_REQUEST: Final = struct.Struct("<4sBI")
_FRAME: Final = struct.Struct("<QQQ")
_CHECK: Final = struct.Struct("<I")
_ANSWER: Final = struct.Struct("<?I")

REQUEST_BYTES: Final = _REQUEST.size
FRAME_HEAD_BYTES: Final = _FRAME.size + _CHECK.size
ANSWER_BYTES: Final = _ANSWER.size
MAX_MESSAGE_BYTES: Final = 1 << 20
"""Largest message after a head."""


class Method(enum.IntEnum):
    PUSH = 1
    PULL = 2


class FrameHead(NamedTuple):
    """Head of a frame: offset in the sequence, length and checksum of the frame's bytes."""

    offset: int
    nbytes: int
    xxh3_64: int


def pack_request(method: Method, message: bytes) -> bytes:
    return _REQUEST.pack(_MAGIC, method, len(message)) + message


def unpack_request(head: bytes | bytearray) -> tuple[Method, int]:
    """Returns the method and the length of the message that follows. Raises ValueError."""
    magic, method, nbytes = _REQUEST.unpack(head)
    if magic != _MAGIC or nbytes > MAX_MESSAGE_BYTES:
        raise ValueError("not a request of this version")
    return Method(method), nbytes


def pack_frame_head(offset: int, nbytes: int, xxh3_64: int) -> bytes:
    """Returns the head of a frame. A frame of 0 bytes ends the stream."""
    head = _FRAME.pack(offset, nbytes, xxh3_64)
    return head + _CHECK.pack(xxhash.xxh32_intdigest(head))


def unpack_frame_head(head: bytes | bytearray) -> FrameHead:
    """Returns the fields of a head. Raises ValueError if the head's checksum does not match."""
    fields, (check,) = head[: _FRAME.size], _CHECK.unpack(head[_FRAME.size :])
    if xxhash.xxh32_intdigest(bytes(fields)) != check:
        raise ValueError("the head of a frame arrived damaged")
    return FrameHead(*_FRAME.unpack(fields))


def pack_answer(message: bytes) -> bytes:
    return _ANSWER.pack(True, len(message)) + message


def pack_refusal(reason: str, text: str) -> bytes:
    message = f"{reason}\n{text}".encode()[:MAX_MESSAGE_BYTES]
    return _ANSWER.pack(False, len(message)) + message


def unpack_answer(head: bytes | bytearray) -> tuple[bool, int]:
    """Returns False for a refusal, and the length of the message. Raises ValueError."""
    granted, nbytes = _ANSWER.unpack(head)
    if nbytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"an answer has {nbytes} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return granted, nbytes


def unpack_refusal(message: bytes | bytearray) -> tuple[str, str]:
    """Returns the reason and the text."""
    reason, _, text = message.decode(errors="replace").partition("\n")
    return reason, text
