"""Host region: shared memory of the server and all clients on its host.

The server creates the region and passes its descriptor over a Unix socket; clients map the region.
Copies need no system calls. The first write to a page costs most: copies run at 1-3 GB/s into new
4 KiB pages, but at memcpy speed into huge pages that `back` has allocated in advance. Measurements:
`docs/decisions/0002-host-region.md`.

Behind the bytes of the region is a table with a digest per page (`HostRegion.digests`). The entry
of the first page of a slot is the digest of the part in the slot, or 0 if its writer computed none
(`docs/decisions/0069-digests-of-parts.md`).

The region is mapped with `mmap(2)` and not with Python's module `mmap`, which cannot choose the
address. Huge pages need an aligned mapping; otherwise MADV_COLLAPSE fails with EINVAL.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from .memory import available_bytes
from .numa import place

__all__ = ["DIGEST_PAGE_BYTES", "HUGE_PAGE_BYTES", "PAGE_BYTES", "HostRegion", "RegionError", "sealed_memory"]


def _huge_page_bytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20


PAGE_BYTES = mmap.PAGESIZE
"""Sizes and offsets of regions must be multiples of this."""

HUGE_PAGE_BYTES = _huge_page_bytes()
"""If offset and length of a chunk are multiples of this, the whole chunk can have huge pages."""

DIGEST_PAGE_BYTES = 4096
"""Bytes of the region per digest. Slots begin at multiples of this."""

_DIGEST_BYTES = 8

_KEEP_FREE_BYTES = 256 << 20
"""`back` refuses to allocate if the host's available memory would fall below this."""

_MFD_NOEXEC_SEAL = 0x8
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL, unlike PyDLL, releases the GIL during calls
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class RegionError(Exception):
    """A host region cannot be created, mapped or backed; the message is for operators."""


class HostRegion:
    """A shared mapping of a sealed memfd.

    Its size never changes, so access to `memory` cannot cause SIGBUS.

    `close` releases only the region's own view. The memory is unmapped and the descriptor closed
    when the last view made from `memory` is released. Code that uses `address` must hold a view or
    ensure that the region is open.

    Any thread may call. `back` and `populate` take long and release the GIL; all other methods may
    be called on an event loop.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes ownership of `fd`, even if the call raises. Use `create` or `attach` instead."""
        self.size_bytes = size_bytes
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
        self.address, memory = _map(fd, size_bytes + _table_bytes(size_bytes))
        self._fd: int | None = fd
        self._memory: memoryview | None = memory[:size_bytes]
        self._digests: memoryview | None = memory[size_bytes:].cast("Q")

    @classmethod
    def create(cls, size_bytes: int, name: str = "kvtier") -> HostRegion:
        """Creates a region without pages; `name` is shown in /proc/PID/maps.

        Raises `RegionError` if the kernel refuses or the size is not a positive multiple of
        `PAGE_BYTES`.
        """
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise RegionError(
                f"the size of a region must be a positive multiple of {PAGE_BYTES} bytes, not {size_bytes}"
            )
        return cls(sealed_memory(size_bytes + _table_bytes(size_bytes), name), size_bytes)

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> HostRegion:
        """Maps a descriptor received from the server. The caller still owns `fd` and may close it.

        Raises `RegionError` if `fd` is not writable shared memory of exactly this size that is
        sealed against shrinking. Without the seal a peer could shrink the memory, and every access
        to the missing pages would cause SIGBUS.
        """
        try:
            size = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise RegionError(f"descriptor {fd} is not shared memory: {error}") from error
        if size_bytes <= 0 or size_bytes % PAGE_BYTES or size != size_bytes + _table_bytes(size_bytes):
            raise RegionError(f"the shared memory has {size} bytes, not those of the announced region of {size_bytes}")
        if not seals & fcntl.F_SEAL_SHRINK:
            raise RegionError("the region is not sealed against shrinking")
        try:
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise RegionError(f"cannot keep the region's descriptor: {error}") from error
        return cls(own, size_bytes)

    @property
    def fd(self) -> int:
        """The descriptor. Raises `RegionError` after `close`."""
        if self._fd is None:
            raise RegionError("the region is closed")
        return self._fd

    @property
    def memory(self) -> memoryview:
        """The whole region: flat, writable, format 'B'. Raises `RegionError` after `close`."""
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
            missing = length - sum(size for _, size in self._backed_runs(offset, length))
            if not missing:  # an earlier server has backed it
                self._advise(offset, length, _MADV_POPULATE_WRITE)
                self.backed_bytes += length
                return
            _require_memory(missing)
            self._place(offset, length)
            first, last = self._table_range(offset, length)
            try:
                # Without its pages, a digest in a full cgroup would end a process with SIGBUS.
                os.posix_fallocate(self.fd, first, last - first)
                huge = self._collapse(offset, length)
                os.posix_fallocate(self.fd, offset, length)  # small pages for the rest
            except OSError as error:
                raise RegionError(f"cannot back {length} bytes at {offset}: {error.strerror}") from error
            if huge < length:
                # Clears the pages now, at 2 GB/s, instead of at the first access during a request.
                self._advise(offset, length, _MADV_POPULATE_WRITE)
        self.backed_bytes += length
        self.huge_bytes += huge

    def count_huge_pages(self) -> None:
        """Sets `huge_bytes` of a region that an earlier server has backed, as the kernel counts."""
        with suppress(OSError, ValueError), Path("/proc/self/smaps").open() as lines:
            for line in lines:
                if line.startswith(f"{self.address:x}-"):
                    break
            found = next((line for line in lines if line.startswith("ShmemPmdMapped:")), None)
            self.huge_bytes = int(found.split()[1]) << 10 if found is not None else 0

    def populate(self, offset: int, length: int) -> int:
        """Enters backed pages into this process's page table; returns how many bytes are backed.

        Attached processes call it in the background. Skips pages that are not backed yet: the first
        access would allocate them, and the kernel would count them against this process's cgroup.
        Enters no pages on kernels before 5.14.
        """
        backed = 0
        with self._held():
            self._check(offset, length)
            for start, size in self._backed_runs(offset, length):
                self._advise(start, size, _MADV_POPULATE_WRITE)
                backed += size
        return backed

    def close(self) -> None:
        """Releases the region's own view; the memory is unmapped with the last view. Idempotent."""
        self._fd = None
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
        """A view that keeps `address` and `fd` valid during system calls."""
        return self.memory[:]

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length <= 0 or offset + length > self.size_bytes or offset % PAGE_BYTES or length % PAGE_BYTES:
            raise RegionError(
                f"offset {offset} and length {length} must be whole pages inside the region of {self.size_bytes} bytes"
            )

    def _table_range(self, offset: int, length: int) -> tuple[int, int]:
        """Returns begin and end, in the descriptor, of the pages with the digests of a chunk."""
        first = offset // DIGEST_PAGE_BYTES * _DIGEST_BYTES // PAGE_BYTES * PAGE_BYTES
        last = -(-(offset + length) // DIGEST_PAGE_BYTES) * _DIGEST_BYTES
        return self.size_bytes + first, self.size_bytes + -(-last // PAGE_BYTES) * PAGE_BYTES

    def _advise(self, offset: int, length: int, advice: int) -> bool:
        return bool(_madvise(self.address + offset, length, advice) == 0)

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

    def _collapse(self, offset: int, length: int) -> int:
        """Makes as many huge pages of a chunk as possible; returns their bytes.

        MADV_COLLAPSE ignores the setting `shmem_enabled`. If a range has only one small page,
        MADV_COLLAPSE clears a huge page (6-15 GB/s). If all small pages are allocated, it copies
        them (2.1 GB/s). Therefore one small page is allocated first.
        """
        first = -(-offset // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        last = (offset + length) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        starts = range(first, last, HUGE_PAGE_BYTES)
        if not starts or not self._supports_collapse(first):
            return 0
        for start in starts:
            os.posix_fallocate(self.fd, start, PAGE_BYTES)
        if self._advise(first, last - first, _MADV_COLLAPSE):
            return last - first
        # The call stopped at the first range that got no huge page, so try the ranges one by one.
        return sum(self._advise(start, HUGE_PAGE_BYTES, _MADV_COLLAPSE) for start in starts) * HUGE_PAGE_BYTES

    def _supports_collapse(self, start: int) -> bool:
        """Whether MADV_COLLAPSE works. Kernels before 6.1 or without huge pages return EINVAL."""
        os.posix_fallocate(self.fd, start, PAGE_BYTES)
        return self._advise(start, HUGE_PAGE_BYTES, _MADV_COLLAPSE) or ctypes.get_errno() != errno.EINVAL

    def _backed_runs(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        end = offset + length
        while offset < end:
            try:
                start = os.lseek(self.fd, offset, os.SEEK_DATA)
                stop = os.lseek(self.fd, start, os.SEEK_HOLE)
            except OSError:  # ENXIO: no data from here on
                return
            if start >= end:
                return
            yield start, min(stop, end) - start
            offset = stop


def _table_bytes(size_bytes: int) -> int:
    """Returns the size of the digests of a region, in whole pages."""
    return -(-size_bytes // DIGEST_PAGE_BYTES * _DIGEST_BYTES // PAGE_BYTES) * PAGE_BYTES


def sealed_memory(size_bytes: int, name: str) -> int:
    """Creates shared memory without pages, whose size cannot change; returns its descriptor.

    Raises `RegionError`.
    """
    try:
        fd = _memfd(name)
    except OSError as error:
        raise RegionError(f"cannot create shared memory: {error}") from error
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise RegionError(f"cannot create {size_bytes} bytes of shared memory: {error}") from error
    return fd


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 6.3 does not know the flag
            raise
        return os.memfd_create(name, flags)


def _map(fd: int, size_bytes: int) -> tuple[int, memoryview]:
    """Maps a descriptor and takes ownership. Releasing the last view unmaps and closes it."""
    try:
        address = _map_aligned(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    _madvise(address, size_bytes, _MADV_DONTDUMP)  # keeps cached data out of core dumps
    array = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(array, _unmap, address, size_bytes, fd).atexit = False
    return address, memoryview(array).cast("B")


def _map_aligned(fd: int, size_bytes: int) -> int:
    """Maps a descriptor at a multiple of the huge page size, inside of a larger reservation."""
    spare = HUGE_PAGE_BYTES
    reserved = _mmap(
        None, size_bytes + spare, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
    )
    if reserved == _MAP_FAILED:
        raise RegionError(f"no address space for {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    address: int = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        _munmap(reserved, size_bytes + spare)
        raise RegionError(f"cannot map {size_bytes} bytes of shared memory: {reason}")
    before = address - reserved
    if before:
        _munmap(reserved, before)
    if spare > before:
        _munmap(address + size_bytes, spare - before)
    return address


def _unmap(address: int, size_bytes: int, fd: int) -> None:
    _munmap(address, size_bytes)
    os.close(fd)


def _require_memory(length: int) -> None:
    available = available_bytes()
    if available is not None and length + _KEEP_FREE_BYTES > available:
        raise RegionError(
            f"not enough memory: {length} bytes needed, {available} available, {_KEEP_FREE_BYTES} must stay free"
        )
