"""Message format of child processes, and the child's end of the connection to the server.

A message is a JSON header followed by bytes. Of the server, this module imports only the limit of
log lines, so that a child starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import re
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from ..telemetry.line_limit import LimitedLines

__all__ = ["MAX_MESSAGE_BYTES", "SIZES_BYTES", "Channel", "connect", "pack", "read_sizes", "split_level", "unpack"]

MAX_MESSAGE_BYTES: Final = 64 << 20
_SIZES: Final = struct.Struct("<II")  # bytes of the header, bytes of the payload
SIZES_BYTES: Final = _SIZES.size
_PR_SET_PDEATHSIG: Final = 1
_LEVEL: Final = re.compile(r"<(\d{1,2})>")


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return _SIZES.pack(len(text), len(payload)) + text + payload


def read_sizes(data: bytes) -> tuple[int, int]:
    """Returns the sizes of header and payload. Raises `ValueError` if they are too large."""
    header, payload = _SIZES.unpack(data)
    if header + payload > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {header + payload} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return header, payload


def unpack(body: bytes, header_bytes: int) -> tuple[dict[str, Any], bytes]:
    """Returns header and payload from the bytes after the sizes. Raises `ValueError` if invalid."""
    header = json.loads(body[:header_bytes])
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")  # noqa: TRY004 - callers treat all invalid messages alike
    return header, body[header_bytes:]


class Channel:
    """Connection to the server. Any thread may send; only one thread may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._slower: dict[str, str] = {}

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Sends a message; may block. Raises `OSError` if the server has ended."""
        with self._sending:
            self._connection.sendall(pack(header, payload))

    def slower(self, subject: str, cause: str = "") -> None:
        """Logs and reports a downgrade when it begins or its cause changes, and reports its end."""
        if self._slower.get(subject, "") != cause:
            self._slower[subject] = cause
            if cause:
                logging.getLogger(__name__).warning(cause)
            with contextlib.suppress(OSError):  # the server has ended
                self.send({"slower": cause, "subject": subject})

    def __iter__(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields messages until the server closes the socket."""
        while sizes := self._receive(SIZES_BYTES):
            header_bytes, payload_bytes = read_sizes(sizes)
            yield unpack(self._receive(header_bytes + payload_bytes), header_bytes)

    def _receive(self, nbytes: int) -> bytes:
        """Returns `nbytes` bytes, or b"" if the server has closed the socket."""
        data = bytearray(nbytes)
        view, filled = memoryview(data), 0
        while filled < nbytes:
            try:
                got = self._connection.recv_into(view[filled:])
            except ConnectionError:
                got = 0
            if not got:
                return b""
            filled += got
        return bytes(data)


def connect(fd: int) -> Channel:
    """Opens the socket inherited from `Child`. Makes this process end when the server ends."""
    # If the server ended before this line, the socket is closed, so the message loop ends at once.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(LimitedLines())
    handler.setFormatter(_LeveledLines("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    return Channel(socket.socket(fileno=fd))


def split_level(line: str) -> tuple[int, str]:
    """Returns the level and the text of a line of a child's standard error.

    A line without a level is not of this module's log, for example a crash of the interpreter. It
    counts as a warning.
    """
    level = _LEVEL.match(line)
    return (int(level[1]), line[level.end() :]) if level else (logging.WARNING, line)


class _LeveledLines(logging.Formatter):
    """Writes the level before each line of a record, so that no text can be a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(f"<{record.levelno}>{line}" for line in super().format(record).splitlines())


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    logging.getLogger(__name__).critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> Any:
    if args.exc_value is not None:
        exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger(__name__).critical("uncaught exception in a thread", exc_info=exc_info)
