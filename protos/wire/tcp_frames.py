"""What travels over a plain TCP socket to the bulk process, where gRPC would copy each byte five times on its way.

A request is its head and a `PushRequest` or `PullRequest` without a payload. Frames follow, from the client for a Push and
from the server for a Pull: a head, with a checksum of its own, and the bytes, each a piece of the sequence that
`TransferService` tells of. A frame of no bytes ends them. Then the server answers: a head, and a `PushResponse` or
`PullResponse`; the next request may come. Or it refuses, with reason and text, perhaps in mid-stream, and hangs up. Numbers
have their lowest byte first. A connection that begins like one to the server's own socket, for calls (`attach`), is one for calls.
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
"""Largest message behind a head."""


class Method(enum.IntEnum):
    """What is asked for."""

    PUSH = 1
    PULL = 2


class FrameHead(NamedTuple):
    """What comes before the bytes of a frame."""

    offset: int
    nbytes: int
    xxh3_64: int


def pack_request(method: Method, message: bytes) -> bytes:
    """Returns a request, its message included."""
    return _REQUEST.pack(_MAGIC, method, len(message)) + message


def unpack_request(head: bytes | bytearray) -> tuple[Method, int]:
    """Returns the method, and the bytes of the message that follows. Raises ValueError for what is no request."""
    magic, method, nbytes = _REQUEST.unpack(head)
    if magic != _MAGIC or nbytes > MAX_MESSAGE_BYTES:
        raise ValueError("not a request of this version")
    return Method(method), nbytes


def pack_frame_head(offset: int, nbytes: int, xxh3_64: int) -> bytes:
    """Returns the head of a frame; no bytes end the frames. Its checksum keeps bytes from going where a damaged head says."""
    head = _FRAME.pack(offset, nbytes, xxh3_64)
    return head + _CHECK.pack(xxhash.xxh32_intdigest(head))


def unpack_frame_head(head: bytes | bytearray) -> FrameHead:
    """Returns the head of a frame. Raises ValueError for one that arrived damaged."""
    fields, (check,) = head[: _FRAME.size], _CHECK.unpack(head[_FRAME.size :])
    if xxhash.xxh32_intdigest(bytes(fields)) != check:
        raise ValueError("the head of a frame arrived damaged")
    return FrameHead(*_FRAME.unpack(fields))


def pack_answer(message: bytes) -> bytes:
    """Returns an answer, its message included."""
    return _ANSWER.pack(True, len(message)) + message


def pack_refusal(reason: str, text: str) -> bytes:
    """Returns a refusal."""
    message = f"{reason}\n{text}".encode()[:MAX_MESSAGE_BYTES]
    return _ANSWER.pack(False, len(message)) + message


def unpack_answer(head: bytes | bytearray) -> tuple[bool, int]:
    """Returns whether it is an answer and no refusal, and the bytes of what follows. Raises ValueError for nonsense."""
    granted, nbytes = _ANSWER.unpack(head)
    if nbytes > MAX_MESSAGE_BYTES:
        raise ValueError("an answer that is too long")
    return granted, nbytes


def unpack_refusal(message: bytes | bytearray) -> tuple[str, str]:
    """Returns reason and text of a refusal."""
    reason, _, text = message.decode(errors="replace").partition("\n")
    return reason, text
