"""Facts about the machine: properties that the figures depend on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import lmdb

__all__ = ["facts"]

ROOT = Path(__file__).resolve().parent.parent


def facts(work_dir: Path) -> dict[str, str]:
    """Returns the facts by name."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "kvtier": f"{metadata.version('kvtier')} {_or_nothing(_commit)}",
        "cpu": f"{_or_nothing(_cpu)}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "huge pages": _or_nothing(_huge_pages),
        "kernel": platform.release(),
        "disk": _or_nothing(lambda: _file_system(work_dir)),
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {metadata.version(name)}" for name in ("grpcio", "protobuf", "lmdb", "numpy")),
        "lmdb engine": ".".join(map(str, lmdb.version())),
        "load": f"{os.getloadavg()[0]:.1f} at the start{_priority()}",
    }


def _priority() -> str:
    """Returns whether Linux prefers the processes of this session to others on a busy machine."""
    try:
        nice = Path("/proc/self/autogroup").read_text().split()[-1]
    except (OSError, IndexError):
        return ""
    return "" if nice == "0" else f" (the benchmark's session has nice {nice})"


def _or_nothing(what: Callable[[], str]) -> str:
    try:
        return what()
    except (OSError, LookupError, subprocess.SubprocessError):
        return "?"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def _huge_pages() -> str:
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    chosen = {name: (folder / name).read_text() for name in ("enabled", "shmem_enabled")}
    return ", ".join(f"{name} {text[text.index('[') + 1 : text.index(']')]}" for name, text in chosen.items())


def _file_system(path: Path) -> str:
    device = path.stat().st_dev
    entries = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return next(f"{kind} on {source}" for source, target, kind, *_ in entries if Path(target).stat().st_dev == device)
