"""The few bytes with which a client asks for the region's descriptor.

Over the Unix socket that `CapabilitiesResponse.region` names: the client sends a request, the server answers with a reply
that carries the descriptor as ancillary data (SCM_RIGHTS), or with a refusal without one. Both then keep the
connection: as long as it stands, the server takes it that the client may write to the region.
"""

from __future__ import annotations

import struct

__all__ = ["REPLY_BYTES", "REQUEST_BYTES", "pack_reply", "pack_request", "unpack_reply", "unpack_request"]

_MAGIC = b"KVT1"
_REQUEST = struct.Struct("<4s16sQ")
_REPLY = struct.Struct("<4s?Q")

REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size


def pack_request(session_id: bytes, epoch: int) -> bytes:
    """Returns what a client sends."""
    return _REQUEST.pack(_MAGIC, session_id, epoch)


def unpack_request(data: bytes) -> tuple[bytes, int]:
    """Returns session id and epoch.

    Raises:
        ValueError: it is not a request of this version.
    """
    if len(data) != REQUEST_BYTES or data[:4] != _MAGIC:
        raise ValueError("not an attach request of this version")
    _, session_id, epoch = _REQUEST.unpack(data)
    return session_id, epoch


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
