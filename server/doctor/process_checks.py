"""Descriptors and clocks."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterator

from .finding import CheckContext, CheckResult, fail, ok, warn

__all__ = ["clock", "descriptors"]

_LEAST_DESCRIPTORS = 256
_PER_SESSION = 4
"""Descriptors of a session, about: its stream, the connection that maps the region, one or two for calls."""
_BESIDES = 128
_WATCH_SECONDS = 0.05
_JUMP_SECONDS = 0.02
_STA_UNSYNC = 0x40


def descriptors(scene: CheckContext) -> Iterator[CheckResult]:
    """May a server have as many descriptors as its sessions want. It raises its own soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sessions = scene.config.limits.max_sessions if scene.config else 0
    wanted = _BESIDES + sessions * _PER_SESSION
    more = "raise the hard limit: ulimit -Hn; for systemd LimitNOFILE=, for docker --ulimit nofile="
    if hard < _LEAST_DESCRIPTORS:
        yield fail(
            f"{hard} open files are allowed", "a server has some dozens of its own, and more with every client", more
        )
    elif hard < wanted:
        yield warn(
            f"{hard} open files are allowed, limits.max_sessions is {sessions}",
            f"so many sessions want about {wanted}: the last of them are turned away",
            f"{more} or lower limits.max_sessions",
        )
    else:
        yield ok(f"{hard} open files are allowed")


def clock(_: CheckContext) -> Iterator[CheckResult]:
    """Does the wall clock run steadily, and does somebody set it. Leases and expiry go by the monotonic clock."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(_WATCH_SECONDS)
    jump = (time.time() - wall) - (time.monotonic() - steady)
    if abs(jump) > _JUMP_SECONDS:
        yield warn(
            f"the wall clock jumped by {jump:.3f} s while it was looked at",
            "times in logs and metrics, tokens and certificates go by it; leases do not",
            "let it be slewed instead of stepped (chrony: makestep only at the start)",
        )
        return
    if _unsynchronized():
        yield warn(
            "the wall clock is not synchronized, as far as the kernel knows",
            "times in logs and metrics of several hosts do not fit together, and certificates go by it; leases do not",
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
    """Returns whether the kernel says that its clock is not synchronized. Changes nothing: `modes` is 0."""
    timex = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        state = libc.adjtimex(ctypes.byref(timex))
    except AttributeError:
        return False
    return state >= 0 and bool(timex.status & _STA_UNSYNC)
