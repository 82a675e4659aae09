"""Inputs as a sequence of values: what a fuzzer mutates, read by a target and written by the seeds."""

from __future__ import annotations

__all__ = ["Tape", "byte", "piece"]


class Tape:
    """Bytes from the front to the end; behind the end there are zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """Returns the next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self) -> int:
        """Returns the next two bytes, the lower one first."""
        return self.byte() | self.byte() << 8

    def piece(self) -> bytes:
        """Returns a run of bytes with its length before it."""
        length = self.number()
        piece = self._data[self._at : self._at + length]
        self._at += length
        return piece


def byte(value: int) -> bytes:
    """Returns what `Tape.byte` reads."""
    return bytes([value])


def piece(data: bytes) -> bytes:
    """Returns what `Tape.piece` reads."""
    return len(data).to_bytes(2, "little") + data
