"""Fuzz inputs as a sequence of values, read by targets and written by seeds."""

from __future__ import annotations

__all__ = ["Tape", "byte", "number", "piece"]


class Tape:
    """Reads bytes from the front; after the end it returns zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        """The next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self) -> int:
        """The next two bytes, little-endian."""
        return self.byte() | self.byte() << 8

    def piece(self) -> bytes:
        """A run of bytes with a length prefix."""
        length = self.number()
        piece = self._data[self._at : self._at + length]
        self._at += length
        return piece


def byte(value: int) -> bytes:
    """Writes the value of `Tape.byte`."""
    return bytes([value])


def number(value: int) -> bytes:
    """Writes the value of `Tape.number`."""
    return value.to_bytes(2, "little")


def piece(data: bytes) -> bytes:
    """Writes the value of `Tape.piece`."""
    return number(len(data)) + data
