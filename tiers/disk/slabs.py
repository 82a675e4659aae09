"""Slab files of a store: growth, and direct I/O between pages and memory.

Page-aligned memory, such as a slot of the region, is read and written directly. Other memory and
partly used pages are copied through a small aligned buffer.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ...protos.buffers import address_of, copy_from
from ..lmdb.environment import sync_directory
from .format import PAGE_BYTES, PagePiece, PageRun
from .slab_file import SlabFile

__all__ = ["Slabs"]

_NAME = re.compile(r"slab-\d{5,}", re.ASCII)
GROW_BYTES = 64 << 20
CALL_BYTES = 4 << 20
"""Largest size of one read or write. Several calls run in parallel to use the disk fully."""
CALL_PIECES = 400
"""Limit of pieces per system call. The kernel accepts 1024 buffers, and a piece needs up to two."""
BOUNCE_BYTES = 1 << 20
IO_THREADS = 4
_PAGE_OF = attrgetter("page")


class Slabs:
    """The slab files of one store. `move` is thread-safe; other methods must not overlap."""

    def __init__(self, directory: Path, pages: int, slab_pages: int) -> None:
        """Opens existing files. `pages` limits the size of all files together. Raises `OSError`."""
        self._directory = directory
        self._pages = pages
        self._slab_pages = slab_pages
        self._files: dict[int, SlabFile] = {}
        self._unsynced: set[int] = set()
        self._bounces: list[memoryview] = []
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="kvtier-disk-io")
        try:
            for path in sorted(directory.iterdir()):
                if _NAME.fullmatch(path.name):
                    number = int(path.name.partition("-")[2])
                    self._files[number] = SlabFile(path)
        except OSError:
            self.close()
            raise

    def holds(self, run: PageRun) -> bool:
        number, page = divmod(run.start, self._slab_pages)
        return run.pages > 0 and number in self._files and page + run.pages <= self._files[number].pages

    @property
    def are_direct(self) -> bool:
        """Whether no open file had to use the page cache."""
        return all(file.direct for file in list(self._files.values()))

    def within(self, run: PageRun) -> bool:
        return run.end <= self._pages

    def extents(self) -> list[PageRun]:
        """Returns the existing pages of each file, in order."""
        runs = []
        for number, file in sorted(self._files.items()):
            start = number * self._slab_pages
            pages = min(file.pages, self._full_pages(number))
            if pages > 0:
                runs.append(PageRun(start, pages))
        return runs

    def trim(self) -> None:
        for number, file in list(self._files.items()):
            full = self._full_pages(number)
            if full <= 0:
                file.remove()
                del self._files[number]
            elif file.pages > full:
                file.cut(full)

    def grow(self, pages: int) -> PageRun | None:
        """Extends one file by `pages` or more, or up to its limit; None if all files are full."""
        for number in range(-(-self._pages // self._slab_pages)):
            file = self._files.get(number)
            have, full = file.pages if file else 0, self._full_pages(number)
            if have < full:
                if file is None:
                    file = self._files[number] = SlabFile(self._directory / f"slab-{number:05d}", create=True)
                    sync_directory(self._directory)
                grown = file.grow(pages, max(pages, GROW_BYTES // PAGE_BYTES), full)
                return PageRun(number * self._slab_pages + have, grown)
        return None

    def move(self, pieces: Iterable[PagePiece], *, write: bool, meanwhile: Callable[[], None] | None = None) -> None:
        """Writes pieces to their pages, or reads them. Raises `OSError` after all I/O has ended.

        `meanwhile` is called on this thread while other threads do the I/O.
        """
        calls = list(self._calls(pieces))
        # One future per thread: a future per call would cost more than the I/O of a small block.
        shares = [calls[number::IO_THREADS] for number in range(min(IO_THREADS, len(calls)))]
        own = shares.pop() if shares and meanwhile is None else []
        futures = [self._threads.submit(self._move_all, share, write=write) for share in shares]
        try:
            if meanwhile is not None:
                meanwhile()
            self._move_all(own, write=write)
        finally:
            wait(futures)
        for future in futures:
            future.result()
        if write:
            self._unsynced.update(call[0].page // self._slab_pages for call in calls)

    def sync(self) -> None:
        """Flushes written data to disk. Raises `OSError`."""
        for number in self._unsynced:
            self._files[number].sync()
        self._unsynced.clear()

    def close(self) -> None:
        self._threads.shutdown()
        for file in self._files.values():
            file.close()

    def _full_pages(self, number: int) -> int:
        return min(self._slab_pages, self._pages - number * self._slab_pages)

    def _calls(self, pieces: Iterable[PagePiece]) -> Iterator[list[_Move]]:
        call: list[_Move] = []
        nbytes = bounced = end = 0
        for move in sorted((move for piece in pieces for move in _cut(piece)), key=_PAGE_OF):
            bounces = move.bounced_bytes
            if call and (
                move.page != end
                or move.page % self._slab_pages == 0
                or len(call) == CALL_PIECES
                or nbytes + move.view.nbytes > CALL_BYTES
                or bounced + bounces > BOUNCE_BYTES
            ):
                yield call
                call, nbytes, bounced = [], 0, 0
            call.append(move)
            nbytes += move.view.nbytes
            bounced += bounces
            end = move.page + -(-move.view.nbytes // PAGE_BYTES)
        if call:
            yield call

    def _move_all(self, calls: list[list[_Move]], *, write: bool) -> None:
        for call in calls:
            self._move(call, write=write)

    def _move(self, call: list[_Move], *, write: bool) -> None:
        bounce = None
        buffers: list[memoryview] = []
        through: list[tuple[memoryview, memoryview]] = []
        used = 0
        for move in call:
            if move.straight_bytes:
                buffers.append(move.view[: move.straight_bytes])
            if bounces := move.bounced_bytes:
                if bounce is None:
                    bounce = self._take_bounce()
                buffer, used = bounce[used : used + bounces], used + bounces
                buffers.append(buffer)
                through.append((move.view[move.straight_bytes :], buffer))
        try:
            if write:
                for view, buffer in through:
                    _copy(buffer, view)
                    # The page may contain bytes of another block.
                    buffer[view.nbytes :] = bytes(buffer.nbytes - view.nbytes)
            number, page = divmod(call[0].page, self._slab_pages)
            self._files[number].move(buffers, page * PAGE_BYTES, write=write)
            if not write:
                for view, buffer in through:
                    _copy(view, buffer[: view.nbytes])
        finally:
            if bounce is not None:
                self._bounces.append(bounce)

    def _take_bounce(self) -> memoryview:
        """Returns a page-aligned buffer for exclusive use; after use, append it to `_bounces`."""
        with contextlib.suppress(IndexError):
            return self._bounces.pop()
        return memoryview(mmap.mmap(-1, BOUNCE_BYTES))


class _Move(NamedTuple):
    """A piece, and how many of its bytes can be transferred directly."""

    page: int
    view: memoryview
    straight_bytes: int

    @property
    def bounced_bytes(self) -> int:
        """Buffer space, in whole pages, for the bytes that cannot be transferred directly."""
        return -(-(self.view.nbytes - self.straight_bytes) // PAGE_BYTES) * PAGE_BYTES


def _cut(piece: PagePiece) -> Iterator[_Move]:
    """Splits a piece that is too large for one call or for the buffer."""
    page, view = piece
    aligned = address_of(view) % PAGE_BYTES == 0
    limit = CALL_BYTES if aligned else BOUNCE_BYTES // 4
    for start in range(0, view.nbytes, limit):
        part = view[start : start + limit]
        straight = part.nbytes // PAGE_BYTES * PAGE_BYTES if aligned else 0
        yield _Move(page + start // PAGE_BYTES, part, straight)


def _copy(target: memoryview, source: memoryview) -> None:
    """Copies to the start of `target`. Releases the GIL for a large copy."""
    if source.nbytes > PAGE_BYTES:
        copy_from(address_of(target, writable=True), source)
    else:
        target[: source.nbytes] = source
