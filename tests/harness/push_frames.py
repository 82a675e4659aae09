"""Frames of a Push, as a client in another language makes them: with the generated message."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.protos.v1.common_pb2 import SessionRef
from kvtier.protos.v1.transfer_pb2 import PushRequest

__all__ = ["encode_push_frame"]


def encode_push_frame(
    offset_bytes: int,
    xxh3_64: int,
    payload: Sequence[bytes | bytearray | memoryview],
    *,
    session: SessionRef | None = None,
    store_id: int = 0,
) -> bytes:
    """Returns a serialized `PushRequest` with the given buffers as its payload.

    `session` and `store_id` belong in the first frame of a stream only.
    """
    return PushRequest(
        session=session,
        store_id=store_id,
        offset_bytes=offset_bytes,
        xxh3_64=xxh3_64,
        payload=b"".join(payload),
    ).SerializeToString()
