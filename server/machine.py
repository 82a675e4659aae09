"""What this machine has: memory and disk, for defaults that fit it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["disk_bytes", "memory_bytes"]

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
