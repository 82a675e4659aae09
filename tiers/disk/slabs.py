"""Slab files of a store: growth, and direct I/O between pages and memory.

Page-aligned memory, such as a slot of the region, is read and written directly. Other memory and
partly used pages are copied through a small aligned buffer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ...protos.buffers import address_of, copy_from
from ..lmdb.environment import sync_directory
from .format import PAGE_BYTES, PageRun
from .slab_file import SlabFile

__all__ = ["IO_THREADS", "Place", "Slabs"]

_NAME = re.compile(r"slab-\d{5,}", re.ASCII)
GROW_BYTES = 64 << 20
CALL_BYTES = 4 << 20
"""Largest size of one read or write. Several calls run in parallel to use the disk fully."""
CALL_PIECES = 400
"""Limit of pieces per system call. The kernel accepts 1024 buffers, and a piece needs up to two."""
BOUNCE_BYTES = 1 << 20
PIECE_BYTES = BOUNCE_BYTES // 4
"""Largest piece of memory that is not aligned."""
IO_THREADS = 4
_PAGE_OF = itemgetter(0)

Place = tuple[Sequence[tuple[int, int]], Sequence[memoryview]]
"""Runs of a block (first page, pages), and the memory of its parts, which fills these pages."""


class Slabs:
    """The slab files of one store. `read` is thread-safe; other methods must not overlap."""

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

    def read(self, blocks: Sequence[Place]) -> dict[int, OSError]:
        """Fills the parts of blocks from their pages; returns the errors of unreadable blocks.

        The keys of the result are positions in `blocks`. If a system call fails that reads several
        blocks, each of them is read again on its own.
        """
        errors: dict[int, OSError] = {}
        again: set[int] = set()
        for call, error in self._run(self._calls(blocks), write=False):
            errors.update(dict.fromkeys(call.blocks, error))
            if len(numbers := set(call.blocks)) > 1:
                again |= numbers
        for number in again:
            del errors[number]
            for error in self.read([blocks[number]]).values():
                errors[number] = error
        return errors

    def write(self, blocks: Sequence[Place], meanwhile: Callable[[], None]) -> None:
        """Writes the parts of blocks to their pages. Raises `OSError` after all I/O has ended.

        `meanwhile` is called on this thread while other threads do the I/O.
        """
        calls = self._calls(blocks)
        if failed := self._run(calls, write=True, meanwhile=meanwhile):
            raise failed[0][1]
        self._unsynced.update([call.page // self._slab_pages for call in calls])

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

    def _calls(self, blocks: Sequence[Place]) -> list[_Call]:
        """Divides a transfer into system calls, in page order. Joins adjacent pieces."""
        calls: list[_Call] = []
        views: list[memoryview] = []
        numbers: list[int] = []
        first = end = nbytes = bounced = 0
        for page, view, number in _pieces_of(blocks):
            size = view.nbytes
            padded = -(-size // PAGE_BYTES) * PAGE_BYTES
            bounces = padded if address_of(view) % PAGE_BYTES else size % PAGE_BYTES and PAGE_BYTES
            if views and (
                page != end
                or page % self._slab_pages == 0
                or len(views) == CALL_PIECES
                or nbytes + padded > CALL_BYTES
                or bounced + bounces > BOUNCE_BYTES
            ):
                calls.append(_Call(first, views, numbers, nbytes, bounced))
                views, numbers, nbytes, bounced = [], [], 0, 0
            if not views:
                first = page
            views.append(view)
            numbers.append(number)
            nbytes += padded
            bounced += bounces
            end = page + padded // PAGE_BYTES
        if views:
            calls.append(_Call(first, views, numbers, nbytes, bounced))
        return calls

    def _run(
        self, calls: Sequence[_Call], *, write: bool, meanwhile: Callable[[], None] | None = None
    ) -> list[tuple[_Call, OSError]]:
        """Makes the calls on several threads; returns those that failed, after all have ended."""
        # One future per thread: a future per call would cost more than the I/O of a small block.
        shares = [calls[number::IO_THREADS] for number in range(min(IO_THREADS, len(calls)))]
        own = shares.pop() if shares and meanwhile is None else []
        futures = [self._threads.submit(self._move_all, share, write=write) for share in shares]
        try:
            if meanwhile is not None:
                meanwhile()
            failed = self._move_all(own, write=write)
        finally:
            for future in futures:
                future.exception()  # waits for the end of its calls
        for future in futures:
            failed += future.result()
        return failed

    def _move_all(self, calls: Sequence[_Call], *, write: bool) -> list[tuple[_Call, OSError]]:
        failed = []
        for call in calls:
            try:
                self._move(call, write=write)
            except OSError as error:
                failed.append((call, error))
                if write:  # the whole store has failed
                    break
        return failed

    def _move(self, call: _Call, *, write: bool) -> None:
        number, page = divmod(call.page, self._slab_pages)
        file = self._files.get(number)
        if file is None:
            raise OSError(errno.EIO, f"the file of slab {number} is missing")
        if not call.bounced_bytes:
            file.move(call.views, call.nbytes, page * PAGE_BYTES, write=write)
            return
        bounce = self._take_bounce()
        try:
            buffers, through = _with_bounces(call.views, bounce)
            if write:
                for view, buffer in through:
                    _copy(buffer, view)
                    # The page may contain bytes of another block.
                    buffer[view.nbytes :] = bytes(buffer.nbytes - view.nbytes)
            file.move(buffers, call.nbytes, page * PAGE_BYTES, write=write)
            if not write:
                for view, buffer in through:
                    _copy(view, buffer[: view.nbytes])
        finally:
            self._bounces.append(bounce)

    def _take_bounce(self) -> memoryview:
        """Returns a page-aligned buffer for exclusive use; after use, append it to `_bounces`."""
        with contextlib.suppress(IndexError):
            return self._bounces.pop()
        return memoryview(mmap.mmap(-1, BOUNCE_BYTES))


class _Call(NamedTuple):
    """One system call: pieces of memory whose pages are adjacent in one slab."""

    page: int
    views: list[memoryview]
    blocks: list[int]
    """The block of each view, as its position in the transfer."""
    nbytes: int
    """Size of all pages."""
    bounced_bytes: int
    """Buffer space, in whole pages, for the bytes that cannot be transferred directly."""


def _pieces_of(blocks: Sequence[Place]) -> list[tuple[int, memoryview, int]]:
    """Returns (first page, memory, position of the block), in the order of the pages."""
    pieces: list[tuple[int, memoryview, int]] = []
    for number, (runs, parts) in enumerate(blocks):
        if len(runs) == len(parts) == 1 and parts[0].nbytes <= PIECE_BYTES:
            pieces.append((runs[0][0], parts[0], number))
        else:
            pieces += [(page, view, number) for page, view in _cut(runs, parts)]
    pieces.sort(key=_PAGE_OF)
    return pieces


def _cut(runs: Sequence[tuple[int, int]], parts: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Divides the parts of a block between its runs, and where they exceed one call or buffer."""
    left = iter(runs)
    page = room = 0
    for part in parts:
        limit = CALL_BYTES if _straight_bytes(part) else PIECE_BYTES
        start = 0
        while start < part.nbytes:
            if not room:
                page, room = next(left)
            stop = min(part.nbytes, start + min(room * PAGE_BYTES, limit))
            yield page, part[start:stop]
            pages = -(-(stop - start) // PAGE_BYTES)
            page, room, start = page + pages, room - pages, stop


def _straight_bytes(view: memoryview) -> int:
    """Returns how many bytes can be transferred directly: the whole pages of aligned memory."""
    nbytes = view.nbytes
    return 0 if nbytes < PAGE_BYTES or address_of(view) % PAGE_BYTES else nbytes // PAGE_BYTES * PAGE_BYTES


def _with_bounces(
    views: Sequence[memoryview], bounce: memoryview
) -> tuple[list[memoryview], list[tuple[memoryview, memoryview]]]:
    """Returns the buffers of a call, and each piece of memory with the buffer that replaces it."""
    buffers: list[memoryview] = []
    through: list[tuple[memoryview, memoryview]] = []
    used = 0
    for view in views:
        straight = _straight_bytes(view)
        if straight:
            buffers.append(view[:straight])
        if rest := -(-(view.nbytes - straight) // PAGE_BYTES) * PAGE_BYTES:
            buffer, used = bounce[used : used + rest], used + rest
            buffers.append(buffer)
            through.append((view[straight:], buffer))
    return buffers, through


def _copy(target: memoryview, source: memoryview) -> None:
    """Copies to the start of `target`. Releases the GIL for a large copy."""
    if source.nbytes > PAGE_BYTES:
        copy_from(address_of(target, writable=True), source)
    else:
        target[: source.nbytes] = source
