"""Space on a tier's disk: reserved blocks of a file, errors of a full disk, and the way back."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import shutil
import time
from pathlib import Path

__all__ = ["FULL", "ROOM_BYTES", "DiskRefusal", "reserve_blocks"]

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that mean that the disk is full."""

RETRY_SECONDS = 1.0
ROOM_BYTES = 1 << 20
"""The disk counts as full until a file can grow by this many bytes."""

_KEEP_SIZE = 1
_fallocate = ctypes.CDLL(None, use_errno=True)["fallocate"]
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve_blocks(fd: int, nbytes: int) -> None:
    """Allocates disk blocks for the first `nbytes` of a file; the length of the file stays.

    Later writes to this range need no free space. Does nothing if the file system cannot do this.
    Raises `OSError`.
    """
    while _fallocate(fd, _KEEP_SIZE, 0, nbytes):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


class DiskRefusal:
    """Whether the disk refused to extend a file of a tier, and when to try again."""

    def __init__(self, directory: Path) -> None:
        self.error: OSError | None = None
        """Error of the last attempt; None if it succeeded."""
        self.text: str | None = None
        """The error, for operators."""
        self._directory = directory
        self._at = -math.inf

    def record(self, error: OSError | None) -> None:
        """Records the result of an attempt to extend a file."""
        self.error, self._at = error, time.monotonic()
        self.text = None if error is None else self.describe(error)

    def describe(self, error: OSError) -> str:
        """Returns the text of an error. If the disk is full, the text has the free bytes."""
        if error.errno not in FULL:
            return str(error)
        usage = shutil.disk_usage(self._directory)
        return f"{os.strerror(error.errno).lower()}, {usage.free} of {usage.total} bytes free"

    def retry_due(self) -> bool:
        """Returns whether to try again: the disk has room, or a second has passed."""
        if self.error is None or time.monotonic() - self._at >= RETRY_SECONDS:
            return True
        return shutil.disk_usage(self._directory).free >= ROOM_BYTES
