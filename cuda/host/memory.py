"""How much memory this process may still take before the kernel kills something.

A memfd has no size limit of its own: `fallocate` goes on until the out-of-memory killer comes. So whoever backs a
region asks here first.
"""

from __future__ import annotations

from pathlib import Path

from .cgroup import own_groups

__all__ = ["available_bytes"]

_MEMINFO = Path("/proc/meminfo")
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version of cgroups: the files of the limit and of what is used, and how names in `memory.stat` begin."""


def available_bytes() -> int | None:
    """Returns the bytes that can be taken now, by the machine's and the cgroup's (v1, v2) account; None if unknown.

    Page cache that the kernel would drop counts as available. Callable from any thread; reads a few files under /proc
    and /sys (some 0.1 ms).
    """
    groups = (_room(group, *_NAMES[version]) for version, group in own_groups("memory"))
    rooms = [room for room in (_machine(), *groups) if room is not None]
    return min(rooms) if rooms else None


def _machine() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _room(group: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max":
            return None
        usage = int((group / usage_name).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Shared memory is accounted as anonymous here, so the file lists are cache that can go.
        cache = sum(int(statistics.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
        return max(0, int(limit) - usage + cache)
    except (OSError, ValueError):
        return None
