"""The few bytes with which a connection to the server's second socket begins.

That is the Unix socket that `CapabilitiesResponse.region` names. The client sends a request, which says what the connection is
for; the server grants it, or refuses. A granted reply to a client that asks for the region carries its descriptor as ancillary data
(SCM_RIGHTS); both then keep the connection: as long as it stands, the server takes it that the client may write to the
region. What follows on a connection for calls is told by `local_calls`. A client of another host connects for calls to the port for
plain sockets (`plain`), with the same first bytes.
"""

from __future__ import annotations

import enum
import struct

__all__ = ["REPLY_BYTES", "REQUEST_BYTES", "Purpose", "pack_reply", "pack_request", "unpack_reply", "unpack_request"]


class Purpose(enum.Enum):
    """What a connection is for. Values are its first bytes."""

    REGION = b"KVT1"
    CALLS = b"KVC1"


_MAGIC = b"KVT1"
_REQUEST = struct.Struct("<4s16sQ")
_REPLY = struct.Struct("<4s?Q")

REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size


def pack_request(session_id: bytes, epoch: int, purpose: Purpose = Purpose.REGION) -> bytes:
    """Returns what a client sends."""
    return _REQUEST.pack(purpose.value, session_id, epoch)


def unpack_request(data: bytes) -> tuple[Purpose, bytes, int]:
    """Returns what the connection is for, session id and epoch.

    Raises:
        ValueError: it is not a request of this version.
    """
    try:
        magic, session_id, epoch = _REQUEST.unpack(data)
        return Purpose(magic), session_id, epoch
    except (struct.error, ValueError):
        raise ValueError("not an attach request of this version") from None


def pack_reply(size_bytes: int, *, granted: bool) -> bytes:
    """Returns what the server answers; a granted reply travels with the descriptor."""
    return _REPLY.pack(_MAGIC, granted, size_bytes)


def unpack_reply(data: bytes) -> int | None:
    """Returns the region's size in bytes, or None if the server refused.

    Raises:
        ValueError: it is not a reply of this version.
    """
    if len(data) != REPLY_BYTES or data[:4] != _MAGIC:
        raise ValueError("not an attach reply of this version")
    _, granted, size_bytes = _REPLY.unpack(data)
    return size_bytes if granted else None
