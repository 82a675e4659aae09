"""What this machine has and allows: memory, disk, descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from pathlib import Path

__all__ = ["allow_descriptors", "disk_bytes", "memory_bytes"]

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Returns the memory that this process may use: the machine's, or less where a cgroup says so."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return physical


def disk_bytes(directory: Path) -> int:
    """Returns what a directory can grow to: the free space of its file system and what its files occupy already.

    Neither the directory nor its parents need to exist.
    """
    existing = directory
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    occupied = 0
    if existing == directory:
        occupied = sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory) if entry.is_file())
    return shutil.disk_usage(existing).free + occupied


def allow_descriptors() -> None:
    """Lets this process have as many descriptors as the system allows: sessions, connections and files are some each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
