"""Sender and receiver of block parts in frames of a Push or Pull stream.

Sockets send and receive the caller's buffers directly. A gRPC frame costs two copies at each end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import xxhash

from ..cuda.host.socket_io import views_of
from ..protos.v1 import common_pb2, transfer_pb2
from ..protos.wire.packed_keys import unpack_offsets
from ..protos.wire.part_sequence import PartSequence
from ..protos.wire.socket_frames import DataHead
from .errors import ChecksumMismatch, KVTierError, LimitExceeded, NotConnected, ServerError, SessionLost
from .session.session import ClientSession

__all__ = ["ATTEMPTS", "PartReceiver", "PartSender", "is_retryable"]

_DIGEST_BYTES = 8
ATTEMPTS = 3
"""Maximum number of streams per transfer; a retry transfers only the missing bytes."""


def is_retryable(error: KVTierError, session: ClientSession) -> bool:
    """Whether to retry a stream that broke with `error` while its session is open.

    A rate-limited stream is not retried, because each attempt counts against the limit. Without a
    reason, `LimitExceeded` means that a message is too large, and `SessionLost` that the stream
    broke.
    """
    broke = (
        isinstance(error, NotConnected | ChecksumMismatch)
        or (isinstance(error, LimitExceeded) and error.reason == "LIMIT_EXCEEDED")
        or (isinstance(error, SessionLost) and not error.reason)
    )
    return broke and not session.ended


class PartSender:
    """Source of the frames of a Push.

    gRPC takes frames on a thread of its own, sometimes even after the call has ended. After `close`
    has returned, `frames` no longer accesses the memory.
    """

    def __init__(
        self, ref: common_pb2.SessionRef, store_id: int, addresses: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self._ref = ref
        self._store_id = store_id
        self._parts = PartSequence(addresses, sizes)
        self._touching = threading.Lock()
        self._closed = False
        self.total_bytes = self._parts.total_bytes

    def frames(self, start: int, step: int, *, complete: bool) -> Iterator[transfer_pb2.PushRequest]:
        """Yields the frames of a gRPC stream from byte `start` on, at most `step` bytes each."""
        frame = self.request(complete=complete)
        for offset in range(start, self.total_bytes, step):
            pieces = list(self._parts.locate(offset, min(step, self.total_bytes - offset)))
            with self._touching:
                if self._closed:
                    return
                views = views_of([place for place, _ in pieces], [size for _, size in pieces])
                frame.payload = b"".join(views)
            frame.offset_bytes = offset
            frame.xxh3_64 = xxhash.xxh3_64_intdigest(frame.payload)
            yield frame
            frame = transfer_pb2.PushRequest()

    def request(self, *, complete: bool) -> transfer_pb2.PushRequest:
        return transfer_pb2.PushRequest(session=self._ref, store_id=self._store_id, complete=complete)

    def pieces(self, start: int, step: int) -> Iterator[tuple[int, list[memoryview]]]:
        """Yields offset and memory of each frame, for the thread that owns the memory."""
        for offset in range(start, self.total_bytes, step):
            pieces = list(self._parts.locate(offset, min(step, self.total_bytes - offset)))
            yield offset, views_of([place for place, _ in pieces], [size for _, size in pieces])

    def close(self) -> None:
        with self._touching:
            self._closed = True


class PartReceiver:
    """Destination of the frames of a Pull; tracks which parts are missing."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self.completed = False
        """Whether the server has confirmed the load and released the lease."""
        self.broke = False
        """Whether a stream broke. Then the server may have released the lease, too."""
        self._addresses = addresses
        self._sizes = sizes
        self.missing = list(range(len(sizes)))
        """Indices of the parts that have not arrived."""
        self.digests = [0] * len(sizes)
        """Digests of the parts; 0 for a part without one, or whose stream broke."""
        self._begin()

    def take_answer(self, answer: transfer_pb2.PullResponse) -> None:
        """Takes the last frame of a stream, which has no payload."""
        self.completed = self.completed or answer.completed
        if len(answer.digests) == _DIGEST_BYTES * len(self.missing):
            for number, digest in zip(self.missing, unpack_offsets(answer.digests), strict=True):
                self.digests[number] = digest

    def take(self, frame: transfer_pb2.PullResponse) -> None:
        """Copies a frame of a gRPC stream to its destination.

        Raises `ChecksumMismatch` if the frame arrived damaged, and what `views` raises.
        """
        payload = memoryview(frame.payload)
        if not payload.nbytes:
            self.take_answer(frame)
            return
        views = self.views(frame.offset_bytes, payload.nbytes)
        if xxhash.xxh3_64_intdigest(payload) != frame.xxh3_64:
            raise ChecksumMismatch(f"the frame at byte {frame.offset_bytes} arrived damaged")
        for view in views:
            view[:] = payload[: view.nbytes]
            payload = payload[view.nbytes :]
        self._record(frame.offset_bytes, len(frame.payload))

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Returns the destination of a frame. Call `verify` after writing to it.

        Raises `ServerError` if the frame is outside the requested range.
        """
        try:
            pieces = list(self._parts.locate(offset, nbytes))
        except ValueError as error:
            raise ServerError(f"the server sent bytes outside the requested range: {error}") from error
        return views_of([place for place, _ in pieces], [size for _, size in pieces])

    def verify(self, head: DataHead, checksum: int) -> None:
        """Verifies and records a frame with this checksum. Raises `ChecksumMismatch`."""
        if checksum != head.xxh3_64:
            raise ChecksumMismatch(f"the frame at byte {head.offset} arrived damaged")
        self._record(head.offset, head.nbytes)

    def _record(self, offset: int, nbytes: int) -> None:
        self._arrived.append((offset, offset + nbytes))

    def end_stream(self) -> None:
        """Updates `missing` after the end of a stream. The next stream requests these."""
        gaps, end = [], 0
        for start, stop in [*sorted(self._arrived), (self._parts.total_bytes, self._parts.total_bytes)]:
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        self.missing = [
            number
            for number, (first, last) in zip(self.missing, self._spans, strict=True)
            if any(start < last and first < stop for start, stop in gaps)
        ]
        self._begin()

    def _begin(self) -> None:
        sizes = [self._sizes[number] for number in self.missing]
        self._parts = PartSequence([self._addresses[number] for number in self.missing], sizes)
        self._spans = []
        end = 0
        for size in sizes:
            self._spans.append((end, end + size))
            end += size
        self._arrived: list[tuple[int, int]] = []
