"""Refusal of a call: a gRPC status with a stable reason."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(Exception):
    """The server refuses a call; `reason` is the short name of a `kvtier.v1.ErrorReason`."""

    def __init__(
        self,
        reason: str,
        message: str,
        retry_after: float | None = None,
        *,
        hold_back: float = 0.0,
        audit_reason: str = "",
    ) -> None:
        """`retry_after` is the time in seconds after which the call may succeed, if known.

        `hold_back`: for how many seconds the server reads no further call; default: `retry_after`.
        `audit_reason` is the reason for the audit log, if the caller must not learn it.
        """
        super().__init__(message)
        self.reason = reason
        self.audit_reason = audit_reason or reason
        self.retry_after = retry_after
        self.hold_back = hold_back or retry_after or 0.0
