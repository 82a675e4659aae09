"""Memory: the region that is shared, huge pages, pinning; and what a container allows."""

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
"""What the server wants beside the region."""
_THP = Path("/sys/kernel/mm/transparent_hugepage")


def shared_memory(scene: CheckContext) -> Iterator[CheckResult]:
    """Can the region be had. It is a memfd: nothing is in /dev/shm, whose size does not matter."""
    try:
        with HostRegion.create(mmap.PAGESIZE) as region:
            region.back(0, mmap.PAGESIZE)
    except RegionError as error:
        yield fail(
            f"{error}",
            "the CPU tier is a memfd, and cannot be made",
            "allow memfd_create and fallocate (seccomp, limits)",
        )
        return
    if scene.config is None:
        return
    size, limit = scene.config.region_size, memory_bytes()
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < size:
        yield fail(
            f"this process may make files of {human_size(most)} at most (RLIMIT_FSIZE)",
            f"the region of {human_size(size)} is a file in memory, and tiers are files on disk: a server is refused both",
            "ulimit -f unlimited; for systemd LimitFSIZE=infinity",
        )
    free = available_bytes()
    has = scene.status is not None and scene.status.region.backed_bytes > 0
    if has and scene.status is not None:
        region_ = scene.status.region
        seen = f"the server has {human_size(region_.backed_bytes)} of {human_size(region_.size_bytes)}"
        if region_.backed_bytes < region_.size_bytes:
            yield warn(
                seen, "the rest is not there (yet): it serves with what there is", "look again; else lower region_size"
            )
        else:
            yield ok(f"{seen}, in a memfd; /dev/shm is not used")
    elif free is not None and free < size:
        yield warn(
            f"{human_size(free)} of memory are free, region_size is {human_size(size)}",
            "the region is backed as far as memory goes, and the rest is missing",
            "lower region_size, or free memory before the server starts",
        )
    elif 0 <= most < size:
        return
    else:
        yield ok(f"{human_size(size)} fit into {human_size(limit)}, as a memfd; /dev/shm is not used")


def huge_pages(_: CheckContext) -> Iterator[CheckResult]:
    """Can the region lie on huge pages. Tried with a small one."""
    settings = ", ".join(f"{name}={_chosen(name)}" for name in ("enabled", "shmem_enabled"))
    try:
        with HostRegion.create(4 * HUGE_PAGE_BYTES) as region:
            region.back(0, region.size_bytes)
            huge = region.huge_bytes
    except RegionError as error:
        yield warn(f"not tried: {error}", "huge pages make attaching free", "see shared_memory")
        return
    page = human_size(HUGE_PAGE_BYTES)
    if huge:
        yield ok(f"MADV_COLLAPSE makes pages of {page} ({settings})")
        return
    yield warn(
        f"MADV_COLLAPSE makes no pages of {page} ({settings})",
        "processes pay 0.9 µs per 4 KiB page when they first touch the region, and direct I/O takes three times as long",
        "a kernel from 6.1 on with transparent huge pages; echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _chosen(name: str) -> str:
    try:
        text = (_THP / name).read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def memlock(scene: CheckContext) -> Iterator[CheckResult]:
    """May this user lock, and so pin, memory; tried with a page."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = _limit(soft)
    size = scene.config.region_size if scene.config else GIB
    raise_it = "ulimit -l unlimited; for systemd LimitMEMLOCK=infinity, for docker --ulimit memlock=-1"
    if not _locks_a_page():
        yield warn(
            f"the limit of locked memory is {said} (hard limit {_limit(hard)}): not a page can be locked",
            "memory that drivers read and write by DMA cannot be pinned: copies to and from GPUs go by way of the driver's "
            "own buffers, at about half the speed",
            raise_it,
        )
    elif machine.has_gpu() and 0 <= soft < size and not machine.has_capability(machine.CAP_IPC_LOCK):
        yield warn(
            f"the limit of locked memory is {said}, less than the region",
            "some drivers count pinned memory there, and refuse to pin what is beyond",
            raise_it,
        )
    else:
        beyond = (
            ", and this process may go beyond" if machine.has_capability(machine.CAP_IPC_LOCK) and soft >= 0 else ""
        )
        pinned = "" if machine.has_gpu() else "; nothing is pinned without a GPU"
        yield ok(f"the limit of locked memory is {said}{beyond}{pinned}")


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


def container(scene: CheckContext) -> Iterator[CheckResult]:
    """What the control groups allow of processors and memory."""
    cores, usable = machine.cpu_limit(), len(os.sched_getaffinity(0))
    if cores is not None and cores < 1:
        yield warn(
            f"the control group gives {cores:g} of a processor",
            "the event loop is stopped whenever that is used up: calls time out and count as misses",
            "give the server two processors at least",
        )
    most = min(usable, cores) if cores is not None else usable
    limit, size = machine.memory_limit(), scene.config.region_size if scene.config else 0
    if limit is not None and limit < size + _OWN_BYTES:
        yield fail(
            f"the control group allows {human_size(limit)} of memory, region_size is {human_size(size)}",
            f"the region is charged to it, and the server wants some {human_size(_OWN_BYTES)} besides: it would be killed",
            "raise the limit, or lower region_size",
        )
        return
    memory = "no limit of memory" if limit is None else f"{human_size(limit)} of memory"
    yield ok(f"{most:g} processors, {memory}")
