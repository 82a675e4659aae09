"""Checks of memory: shared region, huge pages, pinned memory, and limits of the container."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ...cuda.host.memory import available_bytes
from ...cuda.host.region import HUGE_PAGE_BYTES, HostRegion, RegionError
from ..config.machine import memory_bytes
from ..config.units import GIB, MIB, human_size
from . import machine
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["container", "huge_pages", "memlock", "shared_memory"]

_OWN_BYTES = 256 * MIB
"""Memory of the server besides the region."""
_THP = Path("/sys/kernel/mm/transparent_hugepage")


def shared_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Checks that the region, which is a memfd, can be created and fits into memory."""
    try:
        with HostRegion.create(mmap.PAGESIZE) as region:
            region.back(0, mmap.PAGESIZE)
    except RegionError as error:
        yield fail(
            f"{error}",
            "the memory of the CPU tier, a memfd, cannot be created",
            "permit memfd_create and fallocate (check seccomp and resource limits)",
        )
        return
    if context.config is None:
        return
    size, limit = context.config.region_size, memory_bytes()
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < size:
        yield fail(
            f"files of at most {human_size(most)} are allowed (RLIMIT_FSIZE)",
            f"the limit forbids the region, a memfd of {human_size(size)}; files of tiers can exceed the limit too",
            "ulimit -f unlimited; for systemd LimitFSIZE=infinity",
        )
    free = available_bytes()
    if context.status is not None and context.status.region.backed_bytes > 0:
        backed = context.status.region
        seen = f"the server has {human_size(backed.backed_bytes)} of {human_size(backed.size_bytes)}"
        if backed.backed_bytes < backed.size_bytes:
            yield warn(
                seen,
                "the rest is not allocated yet, or memory is short; the server uses only the allocated part",
                "check again later, or lower region_size",
            )
        else:
            yield ok(f"{seen}, in a memfd; /dev/shm is not used")
    elif free is not None and free < size:
        yield warn(
            f"{human_size(free)} of memory is free, region_size is {human_size(size)}",
            "the server can allocate only a part of the region",
            "lower region_size, or free memory before the server starts",
        )
    elif not 0 <= most < size:
        yield ok(f"a region of {human_size(size)} fits into {human_size(limit)} of memory; /dev/shm is not used")


def huge_pages(_: CheckContext) -> Iterator[CheckResult]:
    """Checks with a small region whether huge pages are available."""
    settings = ", ".join(f"{name}={_chosen(name)}" for name in ("enabled", "shmem_enabled"))
    try:
        with HostRegion.create(4 * HUGE_PAGE_BYTES) as region:
            region.back(0, region.size_bytes)
            huge = region.huge_bytes
    except RegionError as error:
        yield warn(
            f"not tried: {error}", "without huge pages the first access to the region is slow", "see shared_memory"
        )
        return
    page = human_size(HUGE_PAGE_BYTES)
    if huge:
        yield ok(f"MADV_COLLAPSE makes pages of {page} ({settings})")
        return
    yield warn(
        f"MADV_COLLAPSE makes no pages of {page} ({settings})",
        "first access costs 0.9 µs per 4 KiB page and process, and direct I/O takes three times as long",
        "use Linux 6.1 or later; echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _chosen(name: str) -> str:
    try:
        text = (_THP / name).read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def memlock(context: CheckContext) -> Iterator[CheckResult]:
    """Locks one page to check that memory can be locked. Pinning memory for DMA needs this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _limit(soft)
    size = context.config.region_size if context.config else GIB
    raise_it = "ulimit -l unlimited; for systemd LimitMEMLOCK=infinity, for docker --ulimit memlock=-1"
    if not _locks_a_page():
        yield warn(
            f"the limit of locked memory is {text} (hard limit {_limit(hard)}): no page can be locked",
            "memory cannot be pinned for DMA: copies to and from GPUs use the driver's buffers, at about half the speed",
            raise_it,
        )
    elif machine.has_gpu() and 0 <= soft < size and not machine.has_capability(machine.CAP_IPC_LOCK):
        yield warn(
            f"the limit of locked memory is {text}, less than the region",
            "some drivers count pinned memory as locked, and refuse to pin more than the limit",
            raise_it,
        )
    else:
        beyond = (
            "; this process may exceed the limit" if machine.has_capability(machine.CAP_IPC_LOCK) and soft >= 0 else ""
        )
        pinned = "" if machine.has_gpu() else "; nothing is pinned without a GPU"
        yield ok(f"the limit of locked memory is {text}{beyond}{pinned}")


def _limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else human_size(limit)


def _locks_a_page() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        address = ctypes.c_char.from_buffer(page)
        try:
            locked: bool = libc.mlock(ctypes.byref(address), ctypes.c_size_t(mmap.PAGESIZE)) == 0
            if locked:
                libc.munlock(ctypes.byref(address), ctypes.c_size_t(mmap.PAGESIZE))
        finally:
            del address
    return locked


def container(context: CheckContext) -> Iterator[CheckResult]:
    """Checks the control group's limits of processors and memory."""
    cores, usable = machine.cpu_limit(), len(os.sched_getaffinity(0))
    if cores is not None and cores < 1:
        yield warn(
            f"the control group permits {cores:g} of a processor",
            "the kernel suspends the server when it has used this up: calls time out, and engines count misses",
            "give the server at least two processors",
        )
    most = min(usable, cores) if cores is not None else usable
    limit, size = machine.memory_limit(), context.config.region_size if context.config else 0
    if limit is not None and limit < size + _OWN_BYTES:
        yield fail(
            f"the control group permits {human_size(limit)} of memory, region_size is {human_size(size)}",
            f"the kernel would kill the server, which needs about {human_size(_OWN_BYTES)} besides the region",
            "raise the limit, or lower region_size",
        )
        return
    memory = "no limit of memory" if limit is None else f"{human_size(limit)} of memory"
    yield ok(f"{most:g} processors, {memory}")
