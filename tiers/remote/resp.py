"""Connection to a Valkey or Redis server: the protocol RESP2 over TCP or TLS.

Values are sent from and received into the caller's memory. The parser accepts only what the servers
send: everything else raises `StoreUnavailableError`, and the caller closes the connection.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .object_store import StoreUnavailableError

__all__ = ["Answer", "ErrorAnswer", "Piece", "RespConnection", "command"]

Piece: TypeAlias = bytes | memoryview
"""Part of a command or value."""

_BUFFER_BYTES = 4096
"""Answers without values are received into this buffer; at most this much of a value is copied."""
_MAX_TEXT_BYTES = 1 << 20
"""Limit of an answer that is not a value of a block."""
_MAX_VALUE_BYTES = 1 << 32
_MAX_ITEMS = 1 << 16
_MAX_DEPTH = 4
_MAX_ANSWER_BYTES = 16 << 20
"""Limit of the memory of one answer with all its parts. Slots of a cluster in 16,384 pieces need
less."""
_ITEM_BYTES = 64
"""Memory of a part of an answer, besides its text."""
_SHORTEST_SECONDS = 1e-3
"""To the kernel, a timeout of 0 means none."""
_PIECES = 64
"""Limit of the pieces of one system call."""
_LENGTH = re.compile(rb"-1|[0-9]{1,10}")
_INTEGER = re.compile(rb"-?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Error that the server has sent, like `OOM command not allowed`."""

    text: str

    @property
    def code(self) -> str:
        """First word of the text."""
        return self.text.partition(" ")[0]


Answer: TypeAlias = "bytes | int | ErrorAnswer | list[Answer] | None"


def command(*arguments: bytes) -> bytes:
    """Returns the bytes of a command."""
    return b"".join([b"*%d\r\n" % len(arguments), *(b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments)])


class RespConnection:
    """Connection whose calls end at a deadline. After an error the caller must close it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        if not self._is_tls:
            sock.settimeout(None)  # the kernel limits the calls: see _limit_call
        self._ends_at = 0.0
        self._call_seconds = 0.0
        """Limit of one system call that the socket has now."""
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        """Received bytes in the buffer that are not used yet."""
        self._left_bytes = 0
        """Memory that the rest of an answer may need."""

    def set_deadline(self, ends_at: float) -> None:
        """Sets the time, on the monotonic clock, at which the calls fail."""
        self._ends_at = ends_at

    def check_unused(self) -> None:
        """Raises StoreUnavailableError if the server has sent more answers than were read."""
        if self._start < self._end:
            raise StoreUnavailableError("the store has sent an answer too many")

    def close(self) -> None:
        self._socket.close()

    def send(self, pieces: Sequence[Piece]) -> None:
        rest, at = list(pieces), 0
        while at < len(rest):
            sent = self._send_some(rest[at : at + _PIECES])
            while at < len(rest) and sent >= len(rest[at]):
                sent -= len(rest[at])
                at += 1
            if sent:
                rest[at] = memoryview(rest[at])[sent:]

    def read(self) -> Answer:
        """Receives the answer to one command, except values of blocks."""
        self._left_bytes = _MAX_ANSWER_BYTES
        return self._read(_MAX_DEPTH)

    def read_value(self, pieces: Sequence[memoryview]) -> int | ErrorAnswer | None:
        """Receives a value into the pieces, in order. Returns its size, None without a value.

        If the value is larger than the pieces together, their content is undefined.
        """
        line = self._line()
        if line[:1] == b"-":
            return _error(line)
        size = _length(line, b"$", _MAX_VALUE_BYTES)
        if size is None:
            return None
        if size > sum(map(len, pieces)):
            self._discard(size)
        else:
            self._fill(_first(pieces, size))
        self._end_of_text()
        return size

    def _read(self, depth: int) -> Answer:
        line = self._line()
        self._count(_ITEM_BYTES + len(line))
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return _error(line)
        if kind == b":" and _INTEGER.fullmatch(line, 1):
            return int(line[1:])
        if kind == b"*" and depth:
            count = _length(line, b"*", _MAX_ITEMS)
            return None if count is None else [self._read(depth - 1) for _ in range(count)]
        size = _length(line, b"$", _MAX_TEXT_BYTES)
        if size is None:
            return None
        self._count(size)
        text = bytearray(size)
        self._fill(_first([memoryview(text)], size))
        self._end_of_text()
        return bytes(text)

    def _count(self, nbytes: int) -> None:
        self._left_bytes -= nbytes
        if self._left_bytes < 0:
            raise StoreUnavailableError("the store sends an answer that is too large")

    def _line(self) -> bytes:
        """Returns the next line without its end."""
        searched = self._start
        while True:
            at = self._bytes.find(b"\n", searched, self._end)
            if at >= 0:
                line = bytes(self._buffer[self._start : at])
                self._start = at + 1
                if line[-1:] != b"\r":
                    raise StoreUnavailableError("the store sends lines with a wrong end")
                return line[:-1]
            if self._start:
                rest = bytes(self._buffer[self._start : self._end])
                self._buffer[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            if self._end == _BUFFER_BYTES:
                raise StoreUnavailableError("the store sends a line that is too long")
            searched = self._end
            self._end += self._receive([self._buffer[self._end :]])

    def _end_of_text(self) -> None:
        if self._line():
            raise StoreUnavailableError("the store sends a value of a wrong length")

    def _fill(self, views: list[memoryview]) -> None:
        """Receives into all views, and what follows into the buffer."""
        at = 0
        while at < len(views):
            if self._start < self._end:
                taken = min(len(views[at]), self._end - self._start)
                views[at][:taken] = self._buffer[self._start : self._start + taken]
                self._start += taken
            else:
                self._start = self._end = 0
                taken = self._receive([*views[at : at + _PIECES], self._buffer])
            while at < len(views) and taken >= len(views[at]):
                taken -= len(views[at])
                at += 1
            if at < len(views):
                views[at] = views[at][taken:]
            elif taken:
                self._end = taken

    def _discard(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, 1 << 16)))
        while nbytes:
            some = scratch[:nbytes]
            self._fill([some])
            nbytes -= len(some)

    def _send_some(self, pieces: list[Piece]) -> int:
        try:
            self._limit_call()
            return self._socket.send(pieces[0]) if self._is_tls else self._socket.sendmsg(pieces)
        except OSError as error:
            raise _lost(error) from error

    def _receive(self, views: list[memoryview]) -> int:
        """Receives some bytes into the views, in order; with TLS only into the first one."""
        try:
            self._limit_call()
            received = self._socket.recv_into(views[0]) if self._is_tls else self._socket.recvmsg_into(views)[0]
        except OSError as error:
            raise _lost(error) from error
        if not received:
            raise StoreUnavailableError("the store has closed the connection")
        return received

    def _limit_call(self) -> None:
        """Lets the next system call fail at the deadline, or a ninth of the time left later.

        With a timeout of Python, each call would be three system calls. So the kernel's timeout is
        used, and set again when a tenth of it has passed.
        """
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._is_tls:
            self._socket.settimeout(left)
        elif not 0.9 * self._call_seconds <= left <= self._call_seconds:
            self._call_seconds = left
            seconds, rest = divmod(max(left, _SHORTEST_SECONDS), 1.0)
            limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _lost(error: OSError) -> StoreUnavailableError:
    if isinstance(error, TimeoutError | BlockingIOError):
        return StoreUnavailableError("no answer before the deadline")
    return StoreUnavailableError(f"the connection failed: {error.strerror or error}")


def _error(line: bytes) -> ErrorAnswer:
    return ErrorAnswer(line[1:].decode("utf-8", "replace"))


def _length(line: bytes, kind: bytes, most: int) -> int | None:
    """Returns the length in a line of this kind, None for the length -1."""
    if line[:1] != kind or not _LENGTH.fullmatch(line, 1):
        raise StoreUnavailableError("the store does not speak the protocol of Valkey and Redis")
    length = int(line[1:])
    if length > most:
        raise StoreUnavailableError("the store sends an answer that is too large")
    return None if length < 0 else length


def _first(pieces: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Returns the first bytes of the pieces; empty pieces are left out."""
    views = []
    for piece in pieces:
        view = piece[:nbytes]
        if view:
            views.append(view)
        nbytes -= len(view)
    return views
