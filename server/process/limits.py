"""Limits of the process: what a configuration needs, and what the kernel permits.

Without a free descriptor or thread, gRPC aborts the process. So the server checks the limits before
it starts, with a reserve for its work, and refuses to start if they are too small.

The check starts threads that wait, and ends them. This counts the threads that RLIMIT_NPROC, the
control group's `pids.max` and the address space permit now, beside other processes of the user.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from ..config.schema import Config
from ..config.units import KIB, MIB, human_size

__all__ = ["Needs", "Room", "limit_findings", "needs_of", "raise_soft_limits", "room"]

_PIDS_LIMIT = Path("/sys/fs/cgroup/pids.max")
_PROBE_STACK_BYTES = 256 * KIB
_PROBE_SECONDS = 20
_USUAL_STACK_BYTES = 8 * MIB
_LEAST_STACK_BYTES = 512 * KIB
"""Stack of a thread. With 64 KiB the interpreter crashes."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a server needs to start (`…`), and to serve all clients that it may have (`all_…`)."""

    descriptors: int
    all_descriptors: int
    threads: int
    """Threads and child processes."""
    all_threads: int
    address_bytes: int
    """Growth of the address space."""
    data_bytes: int
    """Growth of the private memory, of which stacks of threads are the largest part."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the kernel permits. None: no limit."""

    descriptors: int
    """`sys.maxsize`: no limit."""
    threads: int
    """Threads that could be started now, at most as many as were tried."""
    address_bytes: int | None
    data_bytes: int | None
    stack_bytes: int | None


def needs_of(config: Config) -> Needs:
    tiers = len(config.tiers)
    stores = [tier for tier in config.tiers if not tier.is_remote]
    # Measured with one tier: 24 descriptors; 12 threads and 4 processes while the server starts.
    # A tier on disk has up to 64 slab files, a tier on another host some connections per thread.
    descriptors = 96 + 64 * tiers + 4 * len(config.endpoints)
    threads = 32 + 16 * tiers
    return Needs(
        descriptors=descriptors,
        # A session has connections for heartbeats, attach, and one or two for calls.
        all_descriptors=descriptors + 4 * config.limits.max_sessions,
        threads=threads,
        # The bulk process has 128 connections with a thread each, the metrics port has 64.
        all_threads=threads + 128 + 64,
        address_bytes=config.region_size
        + sum(tier.size for tier in stores if tier.type == "lmdb")
        + 24 * _USUAL_STACK_BYTES
        + 64 * MIB,
        data_bytes=24 * _USUAL_STACK_BYTES + 64 * MIB,
    )


def raise_soft_limits() -> None:
    """Raises the soft limits of descriptors and processes to their hard limits."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        _, hard = resource.getrlimit(limit)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (hard, hard))


def room(threads: int, *, fork: bool) -> Room:
    """Measures what this process may use. Starts at most `threads` threads.

    With `fork` a child starts them, so this process keeps no memory for them. A process with
    threads must not fork.
    """
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    pages, *_, data_pages, _ = map(int, Path("/proc/self/statm").read_text().split())
    return Room(
        descriptors=sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors,
        threads=_startable_in_child(threads) if fork else _startable(threads),
        address_bytes=_left(resource.RLIMIT_AS, pages * resource.getpagesize()),
        data_bytes=_left(resource.RLIMIT_DATA, data_pages * resource.getpagesize()),
        stack_bytes=_left(resource.RLIMIT_STACK, 0),
    )


def limit_findings(needs: Needs, found: Room) -> tuple[list[str], list[str]]:
    """Returns problems that prevent the start, and warnings. Each is one line."""
    problems, warnings = [], []
    sizes = (
        ("address space (RLIMIT_AS, ulimit -v)", found.address_bytes, needs.address_bytes),
        ("private memory (RLIMIT_DATA, ulimit -d)", found.data_bytes, needs.data_bytes),
        ("stack of a thread (RLIMIT_STACK, ulimit -s)", found.stack_bytes, _LEAST_STACK_BYTES),
    )
    for what, permitted, needed in sizes:
        if permitted is not None and permitted < needed:
            problems.append(
                f"{human_size(permitted)} of {what} is permitted, the server needs {human_size(needed)}: raise the limit"
            )
    descriptors = "raise the hard limit: ulimit -Hn; for systemd LimitNOFILE=, for docker --ulimit nofile="
    if found.descriptors < needs.descriptors:
        problems.append(
            f"{found.descriptors} open files are permitted, the server needs {needs.descriptors}: {descriptors}"
        )
    elif found.descriptors < needs.all_descriptors:
        warnings.append(
            f"{found.descriptors} open files are permitted, but the sessions of limits.max_sessions can need "
            f"{needs.all_descriptors}, and new connections fail when all are in use: {descriptors}; "
            "or lower limits.max_sessions"
        )
    threads = (
        f"raise the limits: ulimit -u ({_text(resource.getrlimit(resource.RLIMIT_NPROC)[1])}), the control group's "
        f"pids.max ({_pids_limit()}); for systemd LimitNPROC= and TasksMax=, for docker --pids-limit"
    )
    if found.threads < needs.threads:
        problems.append(f"{found.threads} more threads can be started, the server needs {needs.threads}: {threads}")
    elif found.threads < needs.all_threads:
        warnings.append(
            f"{found.threads} more threads can be started, but streams and metrics can need {needs.all_threads}, "
            f"and further connections are closed: {threads}"
        )
    return problems, warnings


def _startable(most: int) -> int:
    """Returns how many threads could be started."""
    end = threading.Lock()  # not an event, whose `wait` needs memory
    end.acquire()
    started: list[threading.Thread] = []
    before = threading.stack_size(_PROBE_STACK_BYTES)
    try:
        for _ in range(most):
            thread = threading.Thread(target=_wait, args=(end,), name="kvtier-probe", daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        pass
    finally:
        threading.stack_size(before)
        end.release()
        for thread in started:
            thread.join()
    return len(started)


def _wait(end: threading.Lock) -> None:
    with end:
        pass


def _startable_in_child(most: int) -> int:
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return 0
    if not pid:
        signal.alarm(_PROBE_SECONDS)  # `start` waits for ever for a thread without memory
        try:
            # Else the interpreter prints a traceback for a thread whose first steps find no memory.
            sys.stderr = None
            os.write(writer, b"%d" % _startable(most))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        count = answer.read()
    os.waitpid(pid, 0)
    return int(count or 0)


def _left(limit: int, used: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else max(0, soft - used)


def _pids_limit() -> str:
    try:
        return _PIDS_LIMIT.read_text().strip()
    except OSError:
        return "unknown"


def _text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
