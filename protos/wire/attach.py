"""Handshake of a connection to the attach socket: request of the client, reply of the server.

The attach socket is the Unix socket in `CapabilitiesResponse.region`. The request names the purpose
of the connection. The server grants or refuses the request.

- `Purpose.REGION`: the reply carries the region's file descriptor (SCM_RIGHTS). While the
  connection is open, the server assumes that the client may write to the region.
- `Purpose.CALLS`: the connection continues as described in `call_frames`. Clients on other hosts
  use this handshake at the TCP port of `tcp_frames`, where the server grants only this purpose.
"""

from __future__ import annotations

import enum
import struct

__all__ = ["REPLY_BYTES", "REQUEST_BYTES", "Purpose", "pack_reply", "pack_request", "unpack_reply", "unpack_request"]


class Purpose(enum.Enum):
    """Purpose of a connection. The value is the start of the request."""

    REGION = b"KVT1"
    CALLS = b"KVC1"


_MAGIC = b"KVT1"
_REQUEST = struct.Struct("<4s16sQ")
_REPLY = struct.Struct("<4s?Q")

REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size


def pack_request(session_id: bytes, epoch: int, purpose: Purpose = Purpose.REGION) -> bytes:
    """Returns the client's request."""
    return _REQUEST.pack(purpose.value, session_id, epoch)


def unpack_request(data: bytes) -> tuple[Purpose, bytes, int]:
    """Returns purpose, session id and epoch. Raises ValueError if this is not an attach request."""
    try:
        magic, session_id, epoch = _REQUEST.unpack(data)
        return Purpose(magic), session_id, epoch
    except (struct.error, ValueError):
        raise ValueError("not an attach request of this version") from None


def pack_reply(size_bytes: int, *, granted: bool) -> bytes:
    """Returns the server's reply. The server sends a granted region's descriptor with the reply."""
    return _REPLY.pack(_MAGIC, granted, size_bytes)


def unpack_reply(data: bytes) -> int | None:
    """Returns the region's size in bytes; None if the server refused. Raises ValueError."""
    if len(data) != REPLY_BYTES or data[:4] != _MAGIC:
        raise ValueError("not an attach reply of this version")
    _, granted, size_bytes = _REPLY.unpack(data)
    return size_bytes if granted else None
