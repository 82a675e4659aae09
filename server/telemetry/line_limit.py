"""Limit of equal log lines, so that no client or peer can fill a disk with its log lines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["LimitedLines", "LineLimit"]

_LINES, _SECONDS = 100, 10.0
"""Per kind of line: 100 at once, for example a trace of a child, then one per 10 s."""
_MAX_KINDS = 1024
_UNLIMITED = ("kvtier.server.auth.audit_log",)
"""Loggers that limit their lines themselves: no call of an administrator may be left out."""


class LineLimit:
    """Limit of the lines of each kind. Any thread may use it."""

    def __init__(self, lines: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`lines` of a kind are written at once, further ones one per `seconds`."""
        self._seconds = seconds
        self._ahead = (lines - 1) * seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """Per kind the time that its lines have used up, and the number of lines left out."""
        self._sweep_at = 0.0

    def admit(self, kind: Hashable) -> int | None:
        """Returns how many lines were left out since the last one; None if this one is left out."""
        now = self._clock()
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS and not self._forget_idle(now):
                kind = None  # one kind for all further ones, for example of new addresses
            used, left_out = self._kinds.get(kind, (0.0, 0))
            if used - now > self._ahead:
                self._kinds[kind] = (used, left_out + 1)
                return None
            self._kinds[kind] = (max(used, now) + self._seconds, 0)
            return left_out

    def _forget_idle(self, now: float) -> bool:
        """Forgets kinds whose next line is the first one; returns whether there were any."""
        if now < self._sweep_at:
            return False
        self._sweep_at = now + self._seconds
        idle = [kind for kind, (used, _) in self._kinds.items() if used <= now]
        for kind in idle:
            del self._kinds[kind]
        return bool(idle)


class LimitedLines(logging.Filter):
    """Filter of a log handler: applies a `LineLimit` to the lines with the same logger and text.

    The text is that before its values are inserted. Lines of level DEBUG have no limit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = LineLimit(_LINES, _SECONDS)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG or record.name in _UNLIMITED:
            return True
        event: Any = record.msg
        kind = (event.get("event"), event.get("child"), event.get("who")) if isinstance(event, dict) else event
        left_out = self._limit.admit((record.name, record.levelno, kind if isinstance(kind, tuple) else str(kind)))
        if left_out and isinstance(event, dict):
            record.msg = {**event, "left_out": left_out}
        elif left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} such lines were left out)", None
        return left_out is not None
