"""Sealed shared memory (memfd): created, mapped at a chosen address, and searched for its pages.

It is mapped with `mmap(2)` and not with Python's module `mmap`, which cannot choose the address.
Huge pages need an aligned mapping; otherwise MADV_COLLAPSE fails with EINVAL.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

__all__ = [
    "HUGE_PAGE_BYTES",
    "PAGE_BYTES",
    "RegionError",
    "advise",
    "backed_runs",
    "close_all",
    "map_ranges",
    "sealed_memory",
]


def _huge_page_bytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20


PAGE_BYTES = mmap.PAGESIZE
"""Sizes and offsets of regions must be multiples of this."""

HUGE_PAGE_BYTES = _huge_page_bytes()
"""If offset and length of a chunk are multiples of this, the whole chunk can have huge pages."""

_MFD_NOEXEC_SEAL = 0x8
_MADV_DONTDUMP = 16
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


_Range: TypeAlias = tuple[int, int, int, int]
"""Begin and end in the mapping, descriptor, and begin in the descriptor."""


def map_ranges(size_bytes: int, ranges: Sequence[_Range], fds: Sequence[int]) -> tuple[int, memoryview]:
    """Maps ranges of descriptors and takes ownership of the descriptors.

    Returns the address and a view of `size_bytes` bytes, of which only the ranges may be accessed.
    Releasing the last view unmaps the memory and closes the descriptors. Raises `RegionError`.
    """
    try:
        address = _map_aligned(size_bytes, ranges)
    except BaseException:
        close_all(fds)
        raise
    advise(address, size_bytes, _MADV_DONTDUMP)  # keeps cached data out of core dumps
    array = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(array, _unmap, address, size_bytes, tuple(fds)).atexit = False
    return address, memoryview(array).cast("B")


def _map_aligned(size_bytes: int, ranges: Sequence[_Range]) -> int:
    """Maps ranges at a multiple of the huge page size, inside of a larger reservation."""
    spare = HUGE_PAGE_BYTES
    reserved = _mmap(
        None, size_bytes + spare, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
    )
    if reserved == _MAP_FAILED:
        raise RegionError(f"no address space for {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    address: int = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    for begin, end, fd, start in ranges:
        if _mmap(address + begin, end - begin, protection, flags, fd, start) == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            _munmap(reserved, size_bytes + spare)
            raise RegionError(f"cannot map {end - begin} bytes of shared memory: {reason}")
    before = address - reserved
    if before:
        _munmap(reserved, before)
    if spare > before:
        _munmap(address + size_bytes, spare - before)
    return address


def advise(address: int, length: int, advice: int) -> bool:
    """Calls madvise(2); returns whether it succeeded, else ctypes has the errno."""
    return bool(_madvise(address, length, advice) == 0)


def _unmap(address: int, size_bytes: int, fds: Sequence[int]) -> None:
    _munmap(address, size_bytes)
    close_all(fds)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def backed_runs(fd: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yields offset and length of the ranges of a descriptor that have pages."""
    end = offset + length
    while offset < end:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
            stop = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError:  # ENXIO: no data from here on
            return
        if start >= end:
            return
        yield start, min(stop, end) - start
        offset = stop
