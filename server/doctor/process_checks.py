"""Checks of file descriptors and the clock."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterator

from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["clock", "descriptors"]

_LEAST_DESCRIPTORS = 256
_PER_SESSION = 4
"""Approximate number of descriptors per session: heartbeats, attach, and one or two for calls."""
_BESIDES = 128
_WATCH_SECONDS = 0.05
_JUMP_SECONDS = 0.02
_STA_UNSYNC = 0x40


def descriptors(context: CheckContext) -> Iterator[CheckResult]:
    """Checks the hard limit of file descriptors. A server raises its soft limit to this limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sessions = context.config.limits.max_sessions if context.config else 0
    wanted = _BESIDES + sessions * _PER_SESSION
    more = "raise the hard limit: ulimit -Hn; for systemd LimitNOFILE=, for docker --ulimit nofile="
    if hard < _LEAST_DESCRIPTORS:
        yield fail(
            f"{hard} open files are permitted", "a server needs dozens of open files, and a few more per client", more
        )
    elif hard < wanted:
        yield warn(
            f"{hard} open files are permitted, limits.max_sessions is {sessions}",
            f"{sessions} sessions need about {wanted} files: when all files are in use, new connections fail",
            f"{more}; or lower limits.max_sessions",
        )
    else:
        yield ok(f"{hard} open files are permitted")


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
