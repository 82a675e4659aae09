"""The two ends of a stream of bytes: where its frames come from, and where they go.

Frames are made of, and taken apart into, the buffers themselves: one copy, without the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import xxhash

from ..cuda.host.message import assemble, scatter
from ..cuda.host.socket_io import checksum, views_of
from ..protos.v1 import common_pb2, transfer_pb2
from ..protos.wire.grpc_frames import decode_pull_frame, push_head
from ..protos.wire.part_sequence import PartSequence
from ..protos.wire.tcp_frames import FrameHead
from .errors import ChecksumMismatch, KVTierError, LimitExceeded, NotConnected, ServerError, SessionLost
from .session.session import Session

__all__ = ["ATTEMPTS", "PartReceiver", "PartSender", "is_retryable"]

ATTEMPTS = 3
"""How often a stream is begun in all, each time for what has not arrived."""


def is_retryable(error: KVTierError, link: Session) -> bool:
    """Returns whether a stream that ended like this may be continued: it broke, and its session stands.

    Not where its tenant has had its share: trying again at once would only take more of the calls that it has left.
    """
    broke = isinstance(error, NotConnected | ChecksumMismatch | LimitExceeded) or (
        isinstance(error, SessionLost) and not error.reason
    )
    return broke and not link.fallen and error.reason != "RATE_LIMITED"


class PartSender:
    """Parts in memory, as frames of a Push.

    gRPC asks for frames on a thread of its own, at times after the call has ended. Once `close` has returned, the memory is
    not touched any more.
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
        """Yields the frames from byte `start` on, of at most `step` bytes each."""
        fields = transfer_pb2.PushRequest(session=self._ref, store_id=self._store_id, complete=complete)
        for offset in range(start, self.total_bytes, step):
            fields.offset_bytes = offset
            nbytes = min(step, self.total_bytes - offset)
            pieces = list(self._parts.locate(offset, nbytes))
            head = push_head(fields, nbytes)
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
        """Returns what a stream says first, where that is not part of a frame."""
        return transfer_pb2.PushRequest(session=self._ref, store_id=self._store_id, complete=complete)

    def pieces(self, start: int, step: int) -> Iterator[tuple[int, int, list[memoryview]]]:
        """Yields offset, xxh3-64 and memory of each frame: for the thread that made this, as it keeps the memory."""
        for offset in range(start, self.total_bytes, step):
            pieces = list(self._parts.locate(offset, min(step, self.total_bytes - offset)))
            views = views_of([place for place, _ in pieces], [size for _, size in pieces])
            yield offset, checksum(views), views

    def close(self) -> None:
        """Lets go of the memory."""
        with self._touching:
            self._closed = True


class PartReceiver:
    """Parts in memory, to be filled by frames of a Pull; knows which are not there yet."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self.completed = False
        """Whether the server has confirmed the load and released the lease."""
        self._addresses = addresses
        self._sizes = sizes
        self._missing = list(range(len(sizes)))
        self._begin()

    @property
    def missing(self) -> list[int]:
        """The parts that are still to come, and are to be asked for next."""
        return self._missing

    def take(self, message: bytes) -> None:
        """Puts a frame where it belongs.

        Raises:
            ChecksumMismatch: it arrived damaged.
            ServerError: it is none, or has no place here.
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
        try:
            pieces = list(self._parts.locate(fields.offset_bytes, payload.nbytes))
        except ValueError as error:
            raise ServerError(f"the server sends what was not asked for: {error}") from error
        scatter(payload, [place for place, _ in pieces], [size for _, size in pieces])
        self._arrived.append((fields.offset_bytes, fields.offset_bytes + payload.nbytes))

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Returns the memory that a frame is for; `took` must follow. Raises ServerError."""
        try:
            pieces = list(self._parts.locate(offset, nbytes))
        except ValueError as error:
            raise ServerError(f"the server sends what was not asked for: {error}") from error
        return views_of([place for place, _ in pieces], [size for _, size in pieces])

    def took(self, head: FrameHead, views: Sequence[memoryview]) -> None:
        """Takes note that a frame is where it belongs. Raises ChecksumMismatch."""
        if checksum(views) != head.xxh3_64:
            raise ChecksumMismatch(f"the frame at byte {head.offset} arrived damaged")
        self._arrived.append((head.offset, head.offset + head.nbytes))

    def settle(self) -> None:
        """Takes note that a stream has ended: from now on a frame is one of a stream that asks for what is missing."""
        gaps, end = [], 0
        for start, stop in [*sorted(self._arrived), (self._parts.total_bytes, self._parts.total_bytes)]:
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        self._missing = [
            number for number, span in zip(self._missing, self._spans, strict=True) if _overlaps(span, gaps)
        ]
        self._begin()

    def _begin(self) -> None:
        sizes = [self._sizes[number] for number in self._missing]
        self._parts = PartSequence([self._addresses[number] for number in self._missing], sizes)
        self._spans = []
        end = 0
        for size in sizes:
            self._spans.append((end, end + size))
            end += size
        self._arrived: list[tuple[int, int]] = []


def _overlaps(span: tuple[int, int], gaps: Sequence[tuple[int, int]]) -> bool:
    return any(start < span[1] and span[0] < stop for start, stop in gaps)
