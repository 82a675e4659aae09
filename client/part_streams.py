"""Sender and receiver of block parts in frames of a Push or Pull stream.

Bytes are copied once between frames and the caller's buffers, without the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import xxhash

from ..cuda.host.message import assemble, scatter
from ..cuda.host.socket_io import checksum, views_of
from ..protos.v1 import common_pb2, transfer_pb2
from ..protos.wire.grpc_frames import decode_pull_frame, frame_head
from ..protos.wire.part_sequence import PartSequence
from ..protos.wire.tcp_frames import FrameHead
from .errors import ChecksumMismatch, KVTierError, LimitExceeded, NotConnected, ServerError, SessionLost
from .session.session import ClientSession

__all__ = ["ATTEMPTS", "PartReceiver", "PartSender", "is_retryable"]

ATTEMPTS = 3
"""Maximum number of streams per transfer; a retry transfers only the missing bytes."""


def is_retryable(error: KVTierError, session: ClientSession) -> bool:
    """Whether to retry a stream that broke with `error` while its session is open.

    A rate-limited stream is not retried, because each attempt counts against the limit.
    """
    broke = isinstance(error, NotConnected | ChecksumMismatch | LimitExceeded) or (
        isinstance(error, SessionLost) and not error.reason
    )
    return broke and not session.ended and error.reason != "RATE_LIMITED"


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

    def frames(self, start: int, step: int, *, complete: bool) -> Iterator[bytes]:
        """Yields the frames from byte `start` on, at most `step` bytes each."""
        fields = self.request(complete=complete)
        for offset in range(start, self.total_bytes, step):
            fields.offset_bytes = offset
            nbytes = min(step, self.total_bytes - offset)
            pieces = list(self._parts.locate(offset, nbytes))
            head = frame_head(fields, nbytes)
            with self._touching:
                if self._closed:
                    return
                frame = assemble(
                    head.data, head.checksum_at, [place for place, _ in pieces], [size for _, size in pieces]
                )
            yield frame
            del frame
            fields = transfer_pb2.PushRequest()

    def request(self, *, complete: bool) -> transfer_pb2.PushRequest:
        """Returns the fields of the stream's first message."""
        return transfer_pb2.PushRequest(session=self._ref, store_id=self._store_id, complete=complete)

    def pieces(self, start: int, step: int) -> Iterator[tuple[int, int, list[memoryview]]]:
        """Yields offset, xxh3-64 and memory of each frame. Unlike `frames`, ignores `close`."""
        for offset in range(start, self.total_bytes, step):
            pieces = list(self._parts.locate(offset, min(step, self.total_bytes - offset)))
            views = views_of([place for place, _ in pieces], [size for _, size in pieces])
            yield offset, checksum(views), views

    def close(self) -> None:
        """Ends all access of `frames` to the memory."""
        with self._touching:
            self._closed = True


class PartReceiver:
    """Destination of the frames of a Pull; tracks which parts are missing."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self.completed = False
        """Whether the server has confirmed the load and released the lease."""
        self._addresses = addresses
        self._sizes = sizes
        self.missing = list(range(len(sizes)))
        """Indices of the parts that have not arrived."""
        self._begin()

    def take(self, message: bytes) -> None:
        """Copies a frame to its destination.

        Raises:
            ChecksumMismatch: the frame arrived damaged.
            ServerError: the message is not a valid frame, or is outside the requested range.
        """
        try:
            fields, payload = decode_pull_frame(message)
        except ValueError as error:
            raise ServerError(str(error)) from error
        self.completed = self.completed or fields.completed
        if not payload.nbytes:
            return
        if xxhash.xxh3_64_intdigest(payload) != fields.xxh3_64:
            raise ChecksumMismatch(f"the frame at byte {fields.offset_bytes} arrived damaged")
        scatter(payload, *self._locate(fields.offset_bytes, payload.nbytes))
        self._arrived.append((fields.offset_bytes, fields.offset_bytes + payload.nbytes))

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Returns the destination of a frame. Call `verify` after writing to it.

        Raises:
            ServerError: the frame is outside the requested range.
        """
        return views_of(*self._locate(offset, nbytes))

    def verify(self, head: FrameHead, views: Sequence[memoryview]) -> None:
        """Verifies and records a frame received into `views`. Raises `ChecksumMismatch`."""
        if checksum(views) != head.xxh3_64:
            raise ChecksumMismatch(f"the frame at byte {head.offset} arrived damaged")
        self._arrived.append((head.offset, head.offset + head.nbytes))

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

    def _locate(self, offset: int, nbytes: int) -> tuple[list[int], list[int]]:
        """Returns addresses and sizes of the memory for a frame."""
        try:
            pieces = list(self._parts.locate(offset, nbytes))
        except ValueError as error:
            raise ServerError(f"the server sent bytes outside the requested range: {error}") from error
        return [place for place, _ in pieces], [size for _, size in pieces]

    def _begin(self) -> None:
        sizes = [self._sizes[number] for number in self.missing]
        self._parts = PartSequence([self._addresses[number] for number in self.missing], sizes)
        self._spans = []
        end = 0
        for size in sizes:
            self._spans.append((end, end + size))
            end += size
        self._arrived: list[tuple[int, int]] = []
