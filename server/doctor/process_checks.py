"""Checks of the limits of the process, and of the clock."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

from ..process.limits import limit_findings, needs_of, room
from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["clock", "limits"]

_WATCH_SECONDS = 0.05
_JUMP_SECONDS = 0.02
_STA_UNSYNC = 0x40


def limits(context: CheckContext) -> Iterator[CheckResult]:
    """Checks the limits of open files, threads and memory. A server checks them at its start."""
    if context.config is None:
        return
    needs = needs_of(context.config)
    # This process has threads of gRPC, so it must not fork.
    found = room(needs.all_threads, fork=False)
    problems, warnings = limit_findings(needs, found)
    for problem in problems:
        seen, _, do = problem.partition(": ")
        yield fail(seen, "the server does not start", do)
    for warning in warnings:
        seen, _, do = warning.partition(": ")
        yield warn(
            seen,
            "new connections and streams fail, and engines count misses",
            do,
        )
    if not problems and not warnings:
        yield ok(f"{found.descriptors} open files and {found.threads} more threads are permitted")


def clock(_: CheckContext) -> Iterator[CheckResult]:
    """Checks that the wall clock is steady and synchronized."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_WATCH_SECONDS)
    jump = (time.time() - wall) - (time.monotonic() - steady)
    if abs(jump) > _JUMP_SECONDS:
        yield warn(
            f"the wall clock jumped by {jump:.3f} s during the check",
            "log, metrics, and the expiry of tokens and certificates use the wall clock; leases do not",
            "let the time service adjust the clock gradually (chrony: makestep only at the start)",
        )
        return
    if _unsynchronized():
        yield warn(
            "according to the kernel, the wall clock is not synchronized",
            "times in logs and metrics differ between hosts, and valid certificates can be refused; leases still work",
            "run chrony or systemd-timesyncd on the host",
        )
    else:
        yield ok("the wall clock is steady and synchronized")


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def _unsynchronized() -> bool:
    """Returns the kernel's flag for a clock that is not synchronized. Does not set the clock."""
    timex = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        state = libc.adjtimex(ctypes.byref(timex))
    except AttributeError:
        return False
    return state >= 0 and bool(timex.status & _STA_UNSYNC)
