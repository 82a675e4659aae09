"""Frames of the socket protocol, the fast path for calls and for the bytes of blocks.

`docs/wire.md` describes the protocol: sockets, TLS, states, limits and errors. A connection begins
with a hello of the client, which the server answers. After that each call is one frame, with data
frames after it for a Push and before its answer for a Pull. All numbers are little-endian.

Each frame has the number of its call, which both sides compare. So if two processes use one
connection by mistake, such as after a fork, neither reads the answer to a call of the other.
"""

from __future__ import annotations

import enum
import itertools
import os
import struct
from types import MappingProxyType
from typing import Final, NamedTuple

import grpc
import xxhash
from google.rpc import status_pb2

__all__ = [
    "CALLS_PROTOCOL",
    "DATA_HEAD_BYTES",
    "HEAD_BYTES",
    "HELLO_BYTES",
    "MAX_ANSWER_BYTES",
    "MAX_TOKEN_BYTES",
    "PULL",
    "PURPOSE_BYTES",
    "PUSH",
    "REGION_ANSWER_BYTES",
    "STATUS_OF_CODE",
    "STREAMS_PROTOCOL",
    "CrossedFrameError",
    "DataHead",
    "FrameKind",
    "Hello",
    "Purpose",
    "check_number",
    "next_call_number",
    "pack_answer",
    "pack_call",
    "pack_data_head",
    "pack_end",
    "pack_error",
    "pack_hello",
    "pack_region_answer",
    "purpose_of",
    "unpack_answer",
    "unpack_call",
    "unpack_call_head",
    "unpack_data_head",
    "unpack_head",
    "unpack_hello",
    "unpack_region_answer",
]

_MAGIC: Final = b"KVT3"
_HELLO: Final = struct.Struct("<4sB16sQQH")
_HEAD: Final = struct.Struct("<IBQ")
_DATA: Final = struct.Struct("<IBQQQ")
_CHECK: Final = struct.Struct("<I")
_REGION: Final = struct.Struct("<3Q")  # size of the region, begin and end of the client's pool

HELLO_BYTES: Final = _HELLO.size
"""Bytes of a hello without its token."""
PURPOSE_BYTES: Final = 5
"""Bytes at the start of a hello that tell its purpose."""
HEAD_BYTES: Final = _HEAD.size
DATA_HEAD_BYTES: Final = _DATA.size + _CHECK.size
REGION_ANSWER_BYTES: Final = HEAD_BYTES + 1 + _REGION.size
"""Bytes of the answer that carries the region's descriptor. An answer with an error is longer."""
MAX_TOKEN_BYTES: Final = 512
MAX_ANSWER_BYTES: Final = 1 << 30
"""Largest answer that a client accepts."""

CALLS_PROTOCOL: Final = "kvtier-calls/3"
"""Name of `Purpose.CALLS` in a TLS handshake (ALPN)."""
STREAMS_PROTOCOL: Final = "kvtier-streams/3"

PUSH: Final = b"TransferService/Push"
PULL: Final = b"TransferService/Pull"

STATUS_OF_CODE = MappingProxyType({status.value[0]: status for status in grpc.StatusCode})

_NUMBERS: Final = 1 << 64
_MAX_STEP: Final = 1 << 31
"""Largest difference between the numbers of two calls that follow each other on a connection."""
_FIRST: Final = int.from_bytes(os.urandom(8), "little")
_count = itertools.count()


class CrossedFrameError(ConnectionError):
    """A frame belongs to another call than the one that the connection is for."""


def next_call_number() -> int:
    """Returns the number of the next call of this process, on any connection.

    Two processes differ in the upper half by their process ids, so that a forked child has other
    numbers than its parent. Any thread may call.
    """
    return (_FIRST + (os.getpid() << 32) + next(_count)) % _NUMBERS


def check_number(number: int, expected: int) -> None:
    """Raises `CrossedFrameError` if a frame does not belong to the call `expected`."""
    if number != expected:
        raise CrossedFrameError(f"a frame of call {number:x} arrived instead of one of call {expected:x}")


class Purpose(enum.IntEnum):
    """What the client uses a connection for."""

    REGION = 1
    """Only on a Unix socket. The answer to the hello carries the region's descriptor
    (SCM_RIGHTS). While the connection is open, the client may write to the region."""
    CALLS = 2
    """Unary calls, one at a time."""
    STREAMS = 3
    """Push and Pull, one at a time."""


class FrameKind(enum.IntEnum):
    CALL = 1
    ANSWER = 2
    DATA = 3
    END = 4
    """Follows the last data frame of a Push."""


_KINDS = {kind.value: kind for kind in FrameKind}
"""`FrameKind(value)` would call two Python functions per frame."""


class Hello(NamedTuple):
    """First message of a client. The token follows, `token_bytes` long."""

    purpose: Purpose
    session_id: bytes
    epoch: int
    number: int
    token_bytes: int


class DataHead(NamedTuple):
    """Head of a data frame: call; offset in the sequence; length and xxh3-64 of its bytes."""

    number: int
    offset: int
    nbytes: int
    xxh3_64: int


def pack_hello(purpose: Purpose, session_id: bytes, epoch: int, number: int, token: str = "") -> bytes:
    return _HELLO.pack(_MAGIC, purpose, session_id, epoch, number, len(token)) + token.encode("ascii")


def unpack_hello(data: bytes | bytearray | memoryview) -> Hello:
    """Returns the fields of a hello. Raises ValueError if it is not one of this version."""
    try:
        magic, purpose, session_id, epoch, number, token_bytes = _HELLO.unpack(data)
        if magic == _MAGIC and token_bytes <= MAX_TOKEN_BYTES:
            return Hello(Purpose(purpose), session_id, epoch, number, token_bytes)
    except (struct.error, ValueError):
        pass
    raise ValueError("the connection does not begin with a hello of this version")


def purpose_of(start: bytes) -> Purpose:
    """Returns the purpose from the first `PURPOSE_BYTES` of a hello. Raises ValueError."""
    try:
        if start.startswith(_MAGIC):
            return Purpose(start[len(_MAGIC)])
    except (IndexError, ValueError):
        pass
    raise ValueError("the connection does not begin with a hello of this version")


def unpack_head(head: bytes | bytearray | memoryview) -> tuple[int, FrameKind, int]:
    """Returns a frame's length after the head, kind, and number of its call. Raises ValueError."""
    length, value, number = _HEAD.unpack_from(head)
    kind = _KINDS.get(value)
    if kind is None:
        raise ValueError(f"{value} is no kind of a frame")
    return length, kind, number


def pack_call(number: int, name: bytes, message: bytes) -> bytes:
    """Returns the frame of a call. `name` is like b"CacheService/Lookup", at most 255 bytes."""
    head = _HEAD.pack(1 + len(name) + len(message), FrameKind.CALL, number)
    return b"".join((head, bytes((len(name),)), name, message))


def unpack_call_head(head: bytes | bytearray, last_call: int) -> tuple[int, int]:
    """Returns the length of what follows the head of a call, and the number of the call.

    `last_call`: number of the last call of the connection, or of its hello. Raises ValueError for
    another frame, and `CrossedFrameError` if the process that used `last_call` did not send it.
    """
    length, kind, number = _HEAD.unpack_from(head)
    if kind != FrameKind.CALL:
        raise ValueError("not a call")
    if not 0 < (number - last_call) % _NUMBERS < _MAX_STEP:
        raise CrossedFrameError(f"call {number:x} cannot follow call {last_call:x} of the same process")
    return length, number


def unpack_call(body: bytes) -> tuple[bytes, bytes]:
    """Splits what follows the head of a call into name and message. Raises ValueError."""
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise ValueError("not a call")
    return body[1:end], body[end:]


def pack_answer(number: int, code: int, message: bytes = b"") -> bytes:
    """Returns the frame of an answer. If `code` is not 0, `message` is a `google.rpc.Status`."""
    return b"".join((_HEAD.pack(1 + len(message), FrameKind.ANSWER, number), bytes((code,)), message))


def pack_error(number: int, status: status_pb2.Status) -> bytes:
    """Returns the answer of a call that was refused or has failed."""
    return pack_answer(number, status.code, status.SerializeToString())


def unpack_answer(body: bytes) -> tuple[int, bytes]:
    """Splits what follows the head of an answer into status code and message. Raises ValueError."""
    if not body or body[0] not in STATUS_OF_CODE:
        raise ValueError("not an answer")
    return body[0], body[1:]


def pack_region_answer(number: int, size_bytes: int, begin: int, end: int) -> bytes:
    """Returns the answer to a hello for the region. It is sent together with the descriptor.

    `begin` and `end`: the range of the region that the descriptor has.
    """
    return pack_answer(number, 0, _REGION.pack(size_bytes, begin, end))


def unpack_region_answer(message: bytes) -> tuple[int, int, int]:
    """Returns size, begin and end from the message of the answer. Raises ValueError."""
    if len(message) != _REGION.size:
        raise ValueError("not the answer to a hello for the region")
    size_bytes, begin, end = _REGION.unpack(message)
    return size_bytes, begin, end


def pack_data_head(number: int, offset: int, nbytes: int, xxh3_64: int) -> bytes:
    """Returns the head of a data frame, with a checksum of the head."""
    head = _DATA.pack(DATA_HEAD_BYTES - HEAD_BYTES + nbytes, FrameKind.DATA, number, offset, xxh3_64)
    return head + _CHECK.pack(xxhash.xxh32_intdigest(head))


def unpack_data_head(head: bytes | bytearray) -> DataHead:
    """Returns the fields of a whole head. Raises ValueError if its checksum does not match."""
    fields, (check,) = bytes(head[: _DATA.size]), _CHECK.unpack(head[_DATA.size :])
    length, kind, number, offset, xxh3_64 = _DATA.unpack(fields)
    nbytes = length - (DATA_HEAD_BYTES - HEAD_BYTES)
    if xxhash.xxh32_intdigest(fields) != check or nbytes < 0 or kind != FrameKind.DATA:
        raise ValueError("the head of a frame arrived damaged")
    return DataHead(number, offset, nbytes, xxh3_64)


def pack_end(number: int) -> bytes:
    """Returns the frame after the last data frame of a Push."""
    return _HEAD.pack(0, FrameKind.END, number)
