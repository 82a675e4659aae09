"""Audit log: log lines with the event `audit` that name caller, call and outcome, but no token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..telemetry.line_limit import LineLimit
from ..telemetry.logs import get_logger
from .roles import CALLER

__all__ = ["AuditLog"]

_log = get_logger(__name__)

_ADMIN = "/kvtier.v1.AdminService/"
_READS = frozenset({"GetStatus", "ListLeases", "ListHandoffs", "ExplainRequest"})
"""Calls of AdminService that change nothing."""
_REFUSALS = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED", "WRONG_TENANT", "RATE_LIMITED"})
_REFUSED = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
_INTERVAL_SECONDS = 10.0
"""Minimum time between two log lines for the same refusal, or for the same call of `_READS`."""


class AuditLog:
    """Writer of the audit log. All calls must come from the event loop."""

    def __init__(self, *, logs_reads: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs_reads = logs_reads
        self._limit = LineLimit(1, _INTERVAL_SECONDS, clock)

    def record_call(self, method: str, outcome: str) -> None:
        """Logs an ended call of AdminService, except a refusal that `record_refusal` logs."""
        if not method.startswith(_ADMIN) or outcome in _REFUSED:
            return
        name = CALLER.get().name
        if method.removeprefix(_ADMIN) not in _READS:
            _log.info("audit", who=name, what=method, outcome=outcome)
        elif self._logs_reads:
            self._log_limited(name, method, outcome)

    def record_refusal(self, method: str, context: Any, reason: str, who: str | None = None) -> None:
        """Logs a refusal if its reason is in `_REFUSALS`. `who`: the caller; default: `CALLER`."""
        if reason not in _REFUSALS:
            return
        if who is None:
            who = CALLER.get().name
            if reason == "UNAUTHENTICATED":
                peer = context.peer() if hasattr(context, "peer") else ""
                who = str(peer).rpartition(":")[0] or "unknown"
        self._log_limited(who, method, f"refused: {reason}")

    def _log_limited(self, who: str, what: str, outcome: str) -> None:
        left_out = self._limit.admit((who, what, outcome))
        if left_out is not None:
            _log.info("audit", who=who, what=what, outcome=outcome, **({"left_out": left_out} if left_out else {}))
