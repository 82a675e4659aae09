"""Frames of unary calls over a socket, without gRPC.

A gRPC call takes 0.33 ms, but a round trip over a Unix socket takes 0.05 ms. So clients send unary
calls of all services over connections with `attach.Purpose.CALLS`. Each connection carries one call
at a time:

- Request: uint32 length of the rest, uint8 length of the name, the name ("CacheService/Lookup"),
  the message.
- Answer: uint32 length of the rest, uint8 gRPC status code, the message. If the code is not 0, the
  message is a `google.rpc.Status`.

Numbers are little-endian. A client cancels a call by closing the connection.
"""

from __future__ import annotations

import struct
from types import MappingProxyType

import grpc

__all__ = [
    "LENGTH_BYTES",
    "STATUS_OF_CODE",
    "pack_answer",
    "pack_call",
    "unpack_answer",
    "unpack_call",
    "unpack_length",
]

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<IB")

LENGTH_BYTES = _LENGTH.size

STATUS_OF_CODE = MappingProxyType({status.value[0]: status for status in grpc.StatusCode})


def unpack_length(data: bytes | bytearray | memoryview) -> int:
    """Returns the length of the rest of a request or answer, from its first four bytes."""
    (length,) = _LENGTH.unpack_from(data)
    return int(length)


def pack_call(name: bytes, message: bytes) -> bytes:
    """Returns a request with its length. `name` has at most 255 bytes."""
    return b"".join((_HEAD.pack(1 + len(name) + len(message), len(name)), name, message))


def unpack_call(body: bytes) -> tuple[bytes, bytes]:
    """Splits a request without its length into name and message. Raises ValueError."""
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise ValueError("not a call")
    return body[1:end], body[end:]


def pack_answer(code: int, message: bytes) -> bytes:
    """Returns an answer with its length."""
    return _HEAD.pack(1 + len(message), code) + message


def unpack_answer(body: bytes) -> tuple[int, bytes]:
    """Splits an answer without its length into status code and message. Raises ValueError."""
    if not body or body[0] not in STATUS_OF_CODE:
        raise ValueError("not an answer")
    return body[0], body[1:]
