"""Resources of this machine: memory and disk space."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path

__all__ = ["disk_bytes", "existing_directory", "max_descriptors", "max_grpc_connections", "memory_bytes"]

_MAX_GRPC_CONNECTIONS = 4096
"""An idle connection holds 17 KiB, with TLS 45 KiB."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Returns the machine's memory, or the cgroup's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return physical


def existing_directory(path: Path) -> Path:
    """Returns the path if it is a directory, otherwise its nearest parent that is one."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def disk_bytes(*directories: Path) -> int:
    """Returns the bytes of the directories' files plus the free space.

    The directories have one file system. They may not exist.
    """
    occupied = sum(
        entry.stat().st_blocks * 512
        for directory in directories
        if directory.is_dir()
        for entry in os.scandir(directory)
        if entry.is_file()
    )
    return shutil.disk_usage(existing_directory(directories[0])).free + occupied


def max_descriptors() -> int:
    """Returns how many file descriptors this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def max_grpc_connections(endpoints: int) -> int:
    """Returns the limit of gRPC connections of each endpoint, the Unix socket included.

    gRPC closes further connections when it accepts them. Half of the descriptors remain for calls
    over sockets (a quarter) and the files of the tiers.
    """
    return max(16, min(_MAX_GRPC_CONNECTIONS, max_descriptors() // 2 // endpoints))
