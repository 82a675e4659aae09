"""One slab file: preallocation, direct I/O and truncation."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ..storage.disk_space import FULL
from .format import PAGE_BYTES

__all__ = ["SlabFile"]

_log = logging.getLogger(__name__)


class SlabFile:
    """A file of whole pages, read and written with O_DIRECT if the file system supports it."""

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

    def grow(self, least: int, wanted: int, full: int) -> int:
        """Adds `wanted` pages, or on a full disk fewer, but at least `least`.

        The file never exceeds `full` pages in all. Returns the number of new pages. Raises
        `OSError`; then the file is unchanged.
        """
        pages = min(wanted, full - self.pages)
        while True:
            try:
                os.posix_fallocate(self._fd, self.pages * PAGE_BYTES, pages * PAGE_BYTES)
            except OSError as error:
                os.ftruncate(self._fd, self.pages * PAGE_BYTES)
                if error.errno not in FULL or pages <= least:
                    raise
                pages = max(least, pages // 2)
            else:
                self.pages += pages
                return pages

    def cut(self, pages: int) -> None:
        """Truncates the file. Raises `OSError`."""
        os.ftruncate(self._fd, pages * PAGE_BYTES)
        self.pages = pages

    def remove(self) -> None:
        self.close()
        self._path.unlink()

    def move(self, buffers: Sequence[memoryview], nbytes: int, offset: int, *, write: bool) -> None:
        """Writes buffers of `nbytes` in all to the file, or reads into them. Raises `OSError`."""
        call = os.pwritev if write else os.preadv
        while True:
            try:
                done = call(self._fd, buffers, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._use_page_cache()
                done = call(self._fd, buffers, offset)
            if done == nbytes:
                return
            if not done:
                raise OSError(errno.EIO, "the file is shorter than expected", str(self._path))
            buffers, nbytes, offset = _after(buffers, done), nbytes - done, offset + done

    def sync(self) -> None:
        """Flushes to disk. Raises `OSError`."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _use_page_cache(self) -> None:
        """Ends direct I/O. Some file systems accept O_DIRECT at the open, but then refuse the I/O.

        Several threads may come here at once.
        """
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        if self.direct:
            self.direct = False
            self._tell()

    def _tell(self) -> None:
        _log.warning("%s uses the page cache, because its file system does not support direct I/O", self._path)


def _after(buffers: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Returns the buffers without their first `done` bytes."""
    for number, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[number + 1 :]]
        done -= buffer.nbytes
    return []
