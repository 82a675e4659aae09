"""One slab file."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from .format import PAGE_BYTES

__all__ = ["SlabFile"]

_log = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SlabFile:
    """A file of whole pages, read and written past the page cache where the file system lets us."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Opens a file, or creates an empty one. Raises `OSError`."""
        self._path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags, 0o600)
            self.direct = False
            self._tell()
        self.pages = os.fstat(self._fd).st_size // PAGE_BYTES
        """How many whole pages there are."""

    def grow(self, least: int, wanted: int, full: int) -> int:
        """Adds `wanted` pages that the disk has set aside for us, or fewer, `least` if need be, and never beyond `full`.

        Returns how many. Raises `OSError`, and then the file is as it was.
        """
        pages = min(wanted, full - self.pages)
        while True:
            try:
                os.posix_fallocate(self._fd, self.pages * PAGE_BYTES, pages * PAGE_BYTES)
            except OSError as error:
                os.ftruncate(self._fd, self.pages * PAGE_BYTES)
                if error.errno not in _FULL or pages <= least:
                    raise
                pages = max(least, pages // 2)
            else:
                self.pages += pages
                return pages

    def cut(self, pages: int) -> None:
        """Cuts off what is behind so many pages. Raises `OSError`."""
        os.ftruncate(self._fd, pages * PAGE_BYTES)
        self.pages = pages

    def remove(self) -> None:
        """Closes and deletes the file. Raises `OSError`."""
        self.close()
        self._path.unlink()

    def move(self, buffers: Sequence[memoryview], offset: int, *, write: bool) -> None:
        """Writes all of some buffers, or fills all of them. Raises `OSError`."""
        while buffers:
            done = self._call(buffers, offset, write=write)
            if not done:
                raise OSError(errno.EIO, "the file is shorter than it was", str(self._path))
            offset += done
            buffers = _after(buffers, done)

    def sync(self) -> None:
        """Waits until all that was written is on the disk. Raises `OSError`."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _call(self, buffers: Sequence[memoryview], offset: int, *, write: bool) -> int:
        call = os.pwritev if write else os.preadv
        try:
            return call(self._fd, buffers, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # Some file systems take the flag and refuse the work. (Several threads may find that out at once.)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        if self.direct:
            self.direct = False
            self._tell()
        return call(self._fd, buffers, offset)

    def _tell(self) -> None:
        _log.info("%s goes through the page cache: its file system has no direct I/O", self._path)


def _after(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Returns what is left of buffers after so many bytes."""
    for number, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[number + 1 :]]
        done -= buffer.nbytes
    return []
