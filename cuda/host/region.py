"""Host region: shared memory of the server and all clients on its host.

The server creates the region and passes descriptors over a Unix socket; clients map the region.
Copies need no system calls. The first write to a page costs most: copies run at 1-3 GB/s into new
4 KiB pages, but at memcpy speed into huge pages that `back` has allocated in advance. Measurements:
`docs/decisions/0002-host-region.md`.

Behind the bytes of the region is a table with a digest per page (`HostRegion.digests`). The entry
of the first page of a slot is the digest of the part in the slot, or 0 if its writer computed none
(`docs/decisions/0069-digests-of-parts.md`).

A region consists of pools, one after the other. Each pool has a descriptor of its own, with the
bytes of the pool and their digests. The server and its child processes map all pools. A client maps
one, at its place in the region, so that all processes use the same offsets.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

from .memory import available_bytes
from .numa import place
from .shared_memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    RegionError,
    advise,
    backed_runs,
    close_all,
    map_ranges,
    sealed_memory,
)

__all__ = [
    "DIGEST_PAGE_BYTES",
    "HUGE_PAGE_BYTES",
    "PAGE_BYTES",
    "POOL_ALIGNMENT",
    "HostRegion",
    "Pool",
    "RegionError",
]

DIGEST_PAGE_BYTES = 4096
"""Bytes of the region per digest. Slots begin at multiples of this."""

_DIGEST_BYTES = 8

POOL_ALIGNMENT = PAGE_BYTES // _DIGEST_BYTES * DIGEST_PAGE_BYTES
"""Pools begin at multiples of this, so that they share no page of the digests."""

_KEEP_FREE_BYTES = 256 << 20
"""`back` refuses to allocate if the host's available memory would fall below this."""

_ADDRESS_SPACE = 1 << 57
"""A peer may announce larger sizes, with which the sums for mmap would overflow."""

_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25


class Pool(NamedTuple):
    """A range of a region, and the descriptor that has it."""

    begin: int
    end: int
    fd: int


class HostRegion:
    """A shared mapping of sealed memfds, one per pool.

    Their sizes never change, so access to the mapped pools cannot cause SIGBUS. Other offsets of
    `memory` are not accessible.

    `close` releases only the region's own view. The memory is unmapped and the descriptors closed
    when the last view made from `memory` is released. Code that uses `address` must hold a view or
    ensure that the region is open.

    Any thread may call. `back` and `populate` take long and release the GIL; all other methods may
    be called on an event loop.
    """

    def __init__(self, pools: Sequence[Pool], size_bytes: int) -> None:
        """Takes ownership of the descriptors, even if the call raises.

        `pools`: those to map, which follow each other. Use `create` or `attach` instead.
        """
        self.size_bytes = size_bytes
        self.begin, self.end = pools[0].begin, pools[-1].end
        """The mapped range of the region."""
        self.backed_bytes = 0
        """Bytes that `back` has backed so far."""
        self.huge_bytes = 0
        """How many of the `backed_bytes` are on huge pages."""
        self.nodes: Sequence[int] = ()
        """NUMA nodes over which `back` spreads huge pages round-robin; empty: the kernel
        decides."""
        self.inherited: list[int] = []
        """Further descriptors that a child process must inherit if it maps the region."""
        self.misplaced: OSError | None = None
        """Why `back` could not place pages on `nodes`, so the kernel placed them; else None."""
        ranges = []
        for begin, end, fd in pools:
            first, last = self._table_range(begin, end)
            ranges += [(begin, end, fd, 0), (first, last, fd, end - begin)]
        self.address, memory = map_ranges(size_bytes + _table_bytes(size_bytes), ranges, [pool.fd for pool in pools])
        self._pools: tuple[Pool, ...] | None = tuple(pools)
        self._memory: memoryview | None = memory[:size_bytes]
        self._digests: memoryview | None = memory[size_bytes:].cast("Q")

    @classmethod
    def create(cls, size_bytes: int, name: str = "kvtier", pool_starts: Sequence[int] = (0,)) -> HostRegion:
        """Creates a region without pages; `name` is shown in /proc/PID/maps.

        `pool_starts`: where each pool begins, in ascending multiples of `POOL_ALIGNMENT` from 0 on.
        Raises `RegionError` if the kernel refuses or the size is not a positive multiple of
        `PAGE_BYTES`.
        """
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise RegionError(
                f"the size of a region must be a positive multiple of {PAGE_BYTES} bytes, not {size_bytes}"
            )
        pools: list[Pool] = []
        try:
            pools.extend(
                Pool(begin, end, sealed_memory(end - begin + _table_bytes(end - begin), name))
                for begin, end in pairwise((*pool_starts, size_bytes))
            )
        except RegionError:
            close_all([pool.fd for pool in pools])
            raise
        return cls(pools, size_bytes)

    @classmethod
    def attach(cls, pools: Sequence[Pool], size_bytes: int) -> HostRegion:
        """Maps one or all pools of a region of the server.

        The caller still owns the descriptors and may close them. Raises `RegionError` if they are
        not writable shared memory of exactly these sizes that is sealed against shrinking. Without
        the seal a peer could shrink the memory, and every access to the missing pages would cause
        SIGBUS.
        """
        own: list[Pool] = []
        try:
            own.extend(_duplicate(pool, size_bytes) for pool in pools)
        except RegionError:
            close_all([pool.fd for pool in own])
            raise
        return cls(own, size_bytes)

    @classmethod
    def inherit(cls, text: str, size_bytes: int) -> HostRegion:
        """Maps a region that the parent process has described, and closes its descriptors.

        `text` is that of `for_child`. Raises `RegionError`.
        """
        pools = [Pool(*map(int, pool.split("-"))) for pool in text.split(",")]
        try:
            return cls.attach(pools, size_bytes)
        finally:
            close_all([pool.fd for pool in pools])

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The mapped pools. Raises `RegionError` after `close`."""
        if self._pools is None:
            raise RegionError("the region is closed")
        return self._pools

    @property
    def for_child(self) -> tuple[str, list[int]]:
        """Returns the text for `inherit` in a child process, and what the process must inherit."""
        text = ",".join("-".join(map(str, pool)) for pool in self.pools)
        return text, [*(pool.fd for pool in self.pools), *self.inherited]

    @property
    def memory(self) -> memoryview:
        """The whole region: flat, writable, format 'B'.

        Only the bytes from `begin` to `end` may be accessed. Raises `RegionError` after `close`.
        """
        if self._memory is None:
            raise RegionError("the region is closed")
        return self._memory

    @property
    def digests(self) -> memoryview:
        """The digests of parts: writable, format 'Q', one per `DIGEST_PAGE_BYTES` of the region.

        Raises `RegionError` after `close`.
        """
        if self._digests is None:
            raise RegionError("the region is closed")
        return self._digests

    @property
    def closed(self) -> bool:
        return self._memory is None

    def rounds(self, first_bytes: int, chunk_bytes: int) -> Iterator[list[tuple[int, int]]]:
        """Yields the chunks to `back`, of each pool one in a round: offset and length.

        The chunks of the first round have `first_bytes`, those of later ones `chunk_bytes`.
        """
        left = [(begin, end) for begin, end, _ in self.pools]
        while left := [(begin, end) for begin, end in left if begin < end]:
            yield [(begin, min(first_bytes, end - begin)) for begin, end in left]
            left = [(begin + first_bytes, end) for begin, end in left]
            first_bytes = chunk_bytes

    def back(self, offset: int, length: int) -> None:
        """Allocates the pages of a chunk, huge ones if available; existing bytes are kept.

        The server calls it chunk by chunk (tens to hundreds of MiB) on a background thread. Huge
        pages are allocated at the speed of clearing memory (6-15 GB/s measured), small ones at
        1-2 GB/s.

        Raises `RegionError` if memory is short. Then some pages of the chunk may be backed, and
        chunks backed earlier remain usable.
        """
        with self._held():
            self._check(offset, length)
            for pool, first, nbytes in self._pieces(offset, length):
                self._back(pool, first, nbytes)

    def _back(self, pool: Pool, offset: int, length: int) -> None:
        missing = length - sum(size for _, size in backed_runs(pool.fd, offset - pool.begin, length))
        if not missing:  # an earlier server has backed it
            self._advise(offset, length, _MADV_POPULATE_WRITE)
            self.backed_bytes += length
            return
        _require_memory(missing)
        self._place(offset, length)
        first, last = self._table_range(offset, offset + length)
        table_at = pool.end - pool.begin + first - self._table_range(pool.begin, pool.end)[0]
        try:
            # Without its pages, a digest in a full cgroup would end a process with SIGBUS.
            os.posix_fallocate(pool.fd, table_at, last - first)
            huge = self._collapse(pool, offset, length)
            os.posix_fallocate(pool.fd, offset - pool.begin, length)  # small pages for the rest
        except OSError as error:
            raise RegionError(f"cannot back {length} bytes at {offset}: {error.strerror}") from error
        if huge < length:
            # Clears the pages now, at 2 GB/s, instead of at the first access during a request.
            self._advise(offset, length, _MADV_POPULATE_WRITE)
        self.backed_bytes += length
        self.huge_bytes += huge

    def count_huge_pages(self) -> None:
        """Sets `huge_bytes` of a region that an earlier server has backed, as the kernel counts."""
        self.huge_bytes, is_ours = 0, False
        with suppress(OSError, ValueError), Path("/proc/self/smaps").open() as lines:
            for line in lines:
                name, *values = line.split()
                if not name.endswith(":"):  # the first line of a mapping
                    is_ours = 0 <= int(name.split("-")[0], 16) - self.address < self.size_bytes
                elif is_ours and name == "ShmemPmdMapped:":
                    self.huge_bytes += int(values[0]) << 10

    def populate(self, offset: int, length: int) -> int:
        """Enters backed pages into this process's page table; returns how many bytes are backed.

        Attached processes call it in the background. Skips pages that are not backed yet: the first
        access would allocate them, and the kernel would count them against this process's cgroup.
        Enters no pages on kernels before 5.14.
        """
        backed = 0
        with self._held():
            self._check(offset, length)
            for pool, first, nbytes in self._pieces(offset, length):
                for start, size in backed_runs(pool.fd, first - pool.begin, nbytes):
                    self._advise(pool.begin + start, size, _MADV_POPULATE_WRITE)
                    backed += size
        return backed

    def close(self) -> None:
        """Releases the region's own view; the memory is unmapped with the last view. Idempotent."""
        self._pools = None
        views = self._memory, self._digests
        self._memory = self._digests = None
        for view in filter(None, views):
            # Fails if a buffer made from this view is in use; then the buffer keeps the mapping.
            with suppress(BufferError):
                view.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _held(self) -> memoryview:
        """A view that keeps `address` and `pools` valid during system calls."""
        return self.memory[:]

    def _check(self, offset: int, length: int) -> None:
        is_inside = self.begin <= offset < offset + length <= self.end
        if not is_inside or offset % PAGE_BYTES or length % PAGE_BYTES:
            raise RegionError(
                f"offset {offset} and length {length} must be whole pages between {self.begin} and {self.end}"
            )

    def _pieces(self, offset: int, length: int) -> Iterator[tuple[Pool, int, int]]:
        """Yields the parts of a chunk that are in each pool, with their offset and length."""
        for pool in self.pools:
            first, last = max(offset, pool.begin), min(offset + length, pool.end)
            if first < last:
                yield pool, first, last - first

    def _table_range(self, begin: int, end: int) -> tuple[int, int]:
        """Returns begin and end, in the mapping, of the pages with the digests of a range."""
        first = begin // DIGEST_PAGE_BYTES * _DIGEST_BYTES // PAGE_BYTES * PAGE_BYTES
        last = -(-end // DIGEST_PAGE_BYTES) * _DIGEST_BYTES
        return self.size_bytes + first, self.size_bytes + -(-last // PAGE_BYTES) * PAGE_BYTES

    def _advise(self, offset: int, length: int, advice: int) -> bool:
        return advise(self.address + offset, length, advice)

    def _place(self, offset: int, length: int) -> None:
        end = offset + length
        for start in range(offset // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, end if self.nodes else 0, HUGE_PAGE_BYTES):
            node = self.nodes[start // HUGE_PAGE_BYTES % len(self.nodes)]
            first, last = max(start, offset), min(start + HUGE_PAGE_BYTES, end)
            try:
                place(self.address + first, last - first, node)
            except OSError as error:
                self.misplaced = error
                return

    def _collapse(self, pool: Pool, offset: int, length: int) -> int:
        """Makes as many huge pages of a chunk as possible; returns their bytes.

        MADV_COLLAPSE ignores the setting `shmem_enabled`. If a range has only one small page,
        MADV_COLLAPSE clears a huge page (6-15 GB/s). If all small pages are allocated, it copies
        them (2.1 GB/s). Therefore one small page is allocated first.
        """
        first = -(-offset // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = (offset + length) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        starts = range(first, last, HUGE_PAGE_BYTES)
        if not starts or not self._supports_collapse(pool, first):
            return 0
        for start in starts:
            os.posix_fallocate(pool.fd, start - pool.begin, PAGE_BYTES)
        if self._advise(first, last - first, _MADV_COLLAPSE):
            return last - first
        # The call stopped at the first range that got no huge page, so try the ranges one by one.
        return sum(self._advise(start, HUGE_PAGE_BYTES, _MADV_COLLAPSE) for start in starts) * HUGE_PAGE_BYTES

    def _supports_collapse(self, pool: Pool, start: int) -> bool:
        """Whether MADV_COLLAPSE works. Kernels before 6.1 or without huge pages return EINVAL."""
        os.posix_fallocate(pool.fd, start - pool.begin, PAGE_BYTES)
        return self._advise(start, HUGE_PAGE_BYTES, _MADV_COLLAPSE) or ctypes.get_errno() != errno.EINVAL


def _duplicate(pool: Pool, size_bytes: int) -> Pool:
    """Returns a pool with a descriptor of its own.

    Raises `RegionError` if it is not a pool of a region of this size.
    """
    begin, end, fd = pool
    try:
        size = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RegionError(f"descriptor {fd} is not shared memory: {error}") from error
    is_range = 0 <= begin < end <= size_bytes < _ADDRESS_SPACE
    if not is_range or begin % POOL_ALIGNMENT or end % PAGE_BYTES or size_bytes % PAGE_BYTES:
        raise RegionError(f"the announced range from {begin} to {end} is not one of a region of {size_bytes} bytes")
    if size != end - begin + _table_bytes(end - begin):
        raise RegionError(f"the shared memory has {size} bytes, not the size for {end - begin} bytes of a region")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise RegionError("the region is not sealed against shrinking")
    try:
        return pool._replace(fd=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0))
    except OSError as error:
        raise RegionError(f"cannot keep the region's descriptor: {error}") from error


def _table_bytes(size_bytes: int) -> int:
    """Returns the size of the digests of a region, in whole pages."""
    return -(-size_bytes // DIGEST_PAGE_BYTES * _DIGEST_BYTES // PAGE_BYTES) * PAGE_BYTES


def _require_memory(length: int) -> None:
    available = available_bytes()
    if available is not None and length + _KEEP_FREE_BYTES > available:
        raise RegionError(
            f"not enough memory: {length} bytes needed, {available} available, {_KEEP_FREE_BYTES} must stay free"
        )
