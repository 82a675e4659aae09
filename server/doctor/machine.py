"""Facts from the kernel about this machine, this process and its control group."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["CAP_IPC_LOCK", "cpu_limit", "file_system", "has_capability", "has_gpu", "memory_limit"]

CAP_IPC_LOCK = 14

_CGROUP = Path("/sys/fs/cgroup")
_GPU = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_NO_LIMIT = 1 << 60
_ESCAPED = re.compile(r"\\([0-7]{3})")


def has_gpu() -> bool:
    return any(path.exists() for path in _GPU)


def has_capability(number: int) -> bool:
    """Returns whether this process has an effective capability."""
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return bool(found and int(found[1], 16) >> number & 1)


def cpu_limit(root: Path = _CGROUP) -> float | None:
    """Returns the control group's limit of processors; None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:  # version 1
        quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memory_limit(root: Path = _CGROUP) -> int | None:
    """Returns the control group's memory limit in bytes; None without a limit."""
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return limit if limit < _NO_LIMIT else None
    return None


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Returns the type of the file system of a path, or "unknown"."""
    best, kind = -1, "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), rest.split()[0]
    return kind
