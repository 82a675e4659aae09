"""The host region: memory that the server and every client on its host see.

The server creates it and hands its descriptor over a Unix socket; clients attach. Server and clients copy blocks from
and into it without a system call, so the figures of the first touch decide: on 4 KiB pages the first write to fresh
memory runs at 1-3 GB/s, on huge pages that somebody has backed already at the speed of memcpy.
`docs/decisions/0002-host-region.md` has the measurements.

Mapping is done with `mmap(2)` itself and not with the module `mmap`, because huge pages want a mapping that is
aligned to them, and `mmap.mmap` takes the place that it is given (measured: then MADV_COLLAPSE fails with EINVAL
throughout).
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

__all__ = ["HUGE_PAGE_BYTES", "PAGE_BYTES", "HostRegion", "RegionError"]


def _huge_page_bytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20


PAGE_BYTES = mmap.PAGESIZE
"""What sizes and offsets of regions must be multiples of."""


HUGE_PAGE_BYTES = _huge_page_bytes()
"""What the offset and length of a chunk should be multiples of, so that all of it can become huge pages."""


_KEEP_FREE_BYTES = 256 << 20
"""Memory that backing a region leaves to everybody else."""


_MFD_NOEXEC_SEAL = 0x8


_MADV_DONTDUMP = 16


_MADV_POPULATE_WRITE = 23


_MADV_COLLAPSE = 25


_PROT_NONE = 0


_MAP_FIXED = 0x10


_MAP_NORESERVE = 0x4000


_MAP_FAILED = ctypes.c_void_p(-1).value


_libc = ctypes.CDLL(None, use_errno=True)  # CDLL, not PyDLL: the GIL is free during the calls


_mmap = _libc.mmap


_mmap.restype = ctypes.c_void_p


_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


_munmap = _libc.munmap


_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_madvise = _libc.madvise


_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostRegion:
    """A shared mapping of a sealed memfd: its size never changes, so no access to `memory` can end in SIGBUS.

    `memory`, and every view made from it, keeps mapping and descriptor alive: `close` lets go of the region's own
    hold, and the last view unmaps. Whoever works with `address` instead must know that the region is open, or hold a
    view.

    All methods may be called from any thread. Only `back` and `populate` take time, and they do so without the GIL;
    the other attributes and methods are safe on an event loop.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Takes over `fd`, also when it fails. Use `create` or `attach`."""
        self.size_bytes = size_bytes
        self.backed_bytes = 0
        """Bytes for which `back` has returned, so far."""
        self.huge_bytes = 0
        """Those of `backed_bytes` that are on huge pages."""
        self.nodes: Sequence[int] = ()
        """Memory nodes that `back` spreads pages over, a huge page at each in turn; the kernel's choice where there are none."""
        self.misplaced: OSError | None = None
        """Why `back` could not place pages there: then they are where the kernel put them."""
        self.address, memory = _map(fd, size_bytes)
        self._fd: int | None = fd
        self._memory: memoryview | None = memory

    @classmethod
    def create(cls, size_bytes: int, name: str = "kvtier") -> HostRegion:
        """Makes a new region. Its pages are not there yet: see `back`. `name` shows in /proc/PID/maps.

        Raises `RegionError` where the size is not a positive multiple of `PAGE_BYTES`, or the kernel refuses.
        """
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise RegionError(
                f"the size of a region must be a positive multiple of {PAGE_BYTES} bytes, not {size_bytes}"
            )
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
        return cls(fd, size_bytes)

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> HostRegion:
        """Maps a descriptor that the server handed out. The caller keeps `fd` and may close it at once.

        Raises `RegionError` where `fd` is not shared memory of exactly this size, sealed against shrinking (a peer
        could otherwise make every access here end in SIGBUS), or cannot be written to.
        """
        try:
            size = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise RegionError(f"descriptor {fd} is not shared memory: {error}") from error
        if size != size_bytes or size <= 0 or size % PAGE_BYTES:
            raise RegionError(f"the region has {size} bytes where {size_bytes} were announced")
        if not seals & fcntl.F_SEAL_SHRINK:
            raise RegionError("the region is not sealed against shrinking")
        try:
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as error:
            raise RegionError(f"cannot keep the region's descriptor: {error}") from error
        return cls(own, size_bytes)

    @property
    def fd(self) -> int:
        """The descriptor, open as long as the region is. Raises `RegionError` after `close`."""
        if self._fd is None:
            raise RegionError("the region is closed")
        return self._fd

    @property
    def memory(self) -> memoryview:
        """All of the region: flat, writable, of format 'B'. Raises `RegionError` after `close`."""
        if self._memory is None:
            raise RegionError("the region is closed")
        return self._memory

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._memory is None

    def back(self, offset: int, length: int) -> None:
        """Gives a chunk its pages, huge ones where the kernel has them; they are zero unless somebody wrote already.

        Called by the server, chunk by chunk (tens to hundreds of MiB) on a background thread; bytes that are in use
        already are left as they are. Huge pages come at the speed of clearing memory (6-15 GB/s measured), small ones
        at 1-2 GB/s.

        Raises `RegionError` where memory is short: then a part of the chunk may be backed, and the region can be used
        up to where it was before.
        """
        with self._held():
            self._check(offset, length)
            _demand(length)
            self._place(offset, length)
            try:
                huge = self._collapse(offset, length)
                os.posix_fallocate(self.fd, offset, length)  # what did not become huge, and the edges
            except OSError as error:
                raise RegionError(f"cannot back {length} bytes at {offset}: {error.strerror}") from error
            if huge < length:
                # A page that was only allocated is cleared at its first touch, at 2 GB/s: not in a request's time.
                self._advise(offset, length, _MADV_POPULATE_WRITE)
        self.backed_bytes += length
        self.huge_bytes += huge

    def populate(self, offset: int, length: int) -> int:
        """Enters backed pages into this process's page table, so that no copy pays for it; returns their bytes.

        Called by attachers, in the background. Leaves out what is not backed yet (touching it would charge the attacher
        with it), and does nothing on kernels before 5.14.
        """
        with self._held():
            self._check(offset, length)
            return sum(
                size
                for start, size in self._backed_runs(offset, length)
                if self._advise(start, size, _MADV_POPULATE_WRITE)
            )

    def count_backed(self, offset: int, length: int) -> int:
        """Returns how many bytes of a chunk have pages, whoever gave them to it."""
        with self._held():
            self._check(offset, length)
            return sum(size for _, size in self._backed_runs(offset, length))

    def close(self) -> None:
        """Gives up mapping and descriptor, which last until the last view is gone. May be repeated, from any thread."""
        self._fd = None
        memory, self._memory = self._memory, None
        if memory is not None:
            # Fails where somebody has a buffer of this very view; then that buffer keeps the mapping.
            with suppress(BufferError):
                memory.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _held(self) -> memoryview:
        """Returns a view to hold during system calls on `address` and `fd`: a `close` meanwhile then ends neither."""
        return self.memory[:]

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length <= 0 or offset + length > self.size_bytes or offset % PAGE_BYTES or length % PAGE_BYTES:
            raise RegionError(f"{length} bytes at {offset} are not whole pages of a region of {self.size_bytes} bytes")

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
        """Makes huge pages out of a chunk, as far as it goes, and returns their bytes.

        MADV_COLLAPSE works whatever `shmem_enabled` says. Of a range with a single page in it, it makes a cleared
        huge page at once; with all the small pages allocated first it copies them (2.1 against 6-15 GB/s).
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
        # One place where no huge page was to be had ends the call for all that follow.
        return sum(self._advise(start, HUGE_PAGE_BYTES, _MADV_COLLAPSE) for start in starts) * HUGE_PAGE_BYTES

    def _supports_collapse(self, start: int) -> bool:
        """Says whether collapsing can work: kernels before 6.1 and those without huge pages answer EINVAL."""
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


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel before 6.3 does not know the flag
            raise
        return os.memfd_create(name, flags)


def _map(fd: int, size_bytes: int) -> tuple[int, memoryview]:
    """Maps a descriptor and takes it over. Both live as long as the view that is returned and all made from it."""
    try:
        address = _map_aligned(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    _madvise(address, size_bytes, _MADV_DONTDUMP)  # a core dump of an engine needs neither its bulk nor its secrets
    # Views of the array keep it alive.
    array = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(array, _unmap, address, size_bytes, fd).atexit = False
    return address, memoryview(array).cast("B")


def _map_aligned(fd: int, size_bytes: int) -> int:
    """Maps a descriptor at a multiple of the huge page's size: into a reservation one larger, then cut to fit."""
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


def _demand(length: int) -> None:
    room = available_bytes()
    if room is not None and length + _KEEP_FREE_BYTES > room:
        raise RegionError(
            f"memory is short: {length} bytes wanted, {room} available, {_KEEP_FREE_BYTES} of them to be kept free"
        )


class RegionError(Exception):
    """A host region cannot be created, mapped or backed; the message is for people."""
