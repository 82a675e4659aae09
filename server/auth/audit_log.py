"""The audit log: lines with the event `audit`, that say who did what, or was refused what. Never a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..telemetry.logs import get_logger
from .roles import CALLER

__all__ = ["AuditLog"]

_log = get_logger(__name__)

_ADMIN = "/kvtier.v1.AdminService/"
_LOOKS = frozenset({"GetStatus", "ListLeases", "ListHandoffs", "ExplainRequest"})
"""Calls of AdminService that change nothing. Of these, and of refusals, a line per kind and caller in `_QUIET_SECONDS`."""
_REFUSALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "WRONG_TENANT", "RATE_LIMITED"})
_REFUSED = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
_QUIET_SECONDS = 10.0
_MAX_KINDS = 1024


class AuditLog:
    """Writes it. Lives on the event loop."""

    def __init__(self, *, looks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`looks` says whether looking is worth a line: not where nobody is asked who he is."""
        self._looks = looks
        self._clock = clock
        self._last: dict[tuple[str, ...], tuple[float, int]] = {}

    def called(self, method: str, outcome: str) -> None:
        """Takes note of a call that ended. Others than AdminService's are no news here, nor are those that were `refused`."""
        if not method.startswith(_ADMIN) or outcome in _REFUSED:
            return
        name = CALLER.get().name
        if method.removeprefix(_ADMIN) not in _LOOKS:
            _log.info("audit", who=name, what=method, outcome=outcome)
        elif self._looks:
            self._now_and_then(name, method, outcome)

    def refused(self, method: str, context: Any, reason: str, who: str | None = None) -> None:
        """Takes note of a refusal, if it is one of these. `who` is asked where it is not `CALLER`."""
        if reason not in _REFUSALS:
            return
        if who is not None:
            self._now_and_then(who, method, f"refused: {reason}")
            return
        who = CALLER.get().name
        if reason == "UNAUTHENTICATED":
            peer = context.peer() if hasattr(context, "peer") else ""
            who = str(peer).rpartition(":")[0] or "unknown"
        self._now_and_then(who, method, f"refused: {reason}")

    def _now_and_then(self, who: str, what: str, outcome: str) -> None:
        now, kind = self._clock(), (who, what, outcome)
        last, left_out = self._last.get(kind, (-_QUIET_SECONDS, 0))
        if now - last < _QUIET_SECONDS:
            self._last[kind] = (last, left_out + 1)
            return
        if len(self._last) >= _MAX_KINDS:
            # Whoever comes from ever new addresses must not fill the memory; what was left out of the others is forgotten.
            self._last.clear()
        self._last[kind] = (now, 0)
        _log.info("audit", who=who, what=what, outcome=outcome, **({"left_out": left_out} if left_out else {}))
