"""Ring of the latest messages, which readers share: a slow reader costs a cursor, not a queue."""

from __future__ import annotations

from typing import Final, NamedTuple

from .zmtp import Frame

__all__ = ["END_FRAMES", "SEQUENCE_BYTES", "Message", "RecentMessages"]

SEQUENCE_BYTES: Final = 8
_OVERHEAD_BYTES = 256
"""Memory of a message beside its topic and payload: 230 bytes, measured."""
_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

END_FRAMES = (Frame(b"", True), Frame(b"", True), Frame(_END, True), Frame(b""))
"""The last message of a replay."""


class Message(NamedTuple):
    topic: bytes
    payload: bytes

    def frames(self, number: int) -> tuple[Frame, Frame, Frame]:
        return Frame(self.topic, True), Frame(number.to_bytes(SEQUENCE_BYTES, "big"), True), Frame(self.payload)

    @property
    def nbytes(self) -> int:
        return _OVERHEAD_BYTES + len(self.topic) + len(self.payload)


class RecentMessages:
    """Messages numbered from 0, of which the latest are kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: dict[int, Message] = {}
        self._bytes = 0
        self.first = self.end = 0
        """Number of the oldest kept message, and of the next one."""

    def __getitem__(self, number: int) -> Message:
        return self._messages[number]

    def add(self, message: Message) -> None:
        self._messages[self.end] = message
        self.end += 1
        self._bytes += message.nbytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._messages.pop(self.first).nbytes
            self.first += 1
