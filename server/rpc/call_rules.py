"""Rules of every call, over gRPC and over sockets: checks before the handler, record of the end.

Both kinds of servers use the same object. So refusals, metrics, audit log and traces are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from ...protos.error_reasons import STATUS_OF
from ...protos.wire.request_bounds import OutOfBounds, RequestBounds
from ...tiers.errors import CoreError
from ..auth.audit_log import AuditLog
from ..refused import Refused
from ..telemetry.logs import get_logger
from ..telemetry.tracing import Tracing
from .in_flight_limits import RefusalPace

__all__ = ["CallRefusal", "CallRules", "session_id_of"]

_log = get_logger(__name__)

_PACKAGE = "/kvtier.v1."
_GARBAGE_SECONDS = 0.1
"""A caller whose request cannot be parsed is held back for so long."""
_MAX_DELAY_SECONDS = 1.0
"""Longest time for which a refused caller is held back."""
_SESSION_TAGS, _SESSION_ID_BYTES = b"\n\n\x10", 16
"""Tags and length of the session's id, which most requests begin with."""
_RELEASES = frozenset(
    f"{_PACKAGE}{name}"
    for name in (
        "CacheService/CompleteLoad",
        "CacheService/ReleaseLease",
        "CacheService/CompleteStore",
        "CacheService/WithdrawGrants",
        "CacheService/FinishRequest",
        "HandoffService/ReleaseHolds",
        "TransferService/UnregisterDeviceBuffers",
    )
)
"""Methods that release slots or pins. Their handlers permit some calls above the rate limit."""


class CallRefusal(NamedTuple):
    """Answer to a call that was refused or has failed."""

    code: grpc.StatusCode
    reason: str
    message: str
    retry_after: float | None
    hold_back: float
    """For how many seconds the caller must not be able to call again."""


class CallRules:
    """Parsers of requests, refusals of errors, and records of ended calls.

    When a call or stream has ended, `ended` calls `observe(method, code, seconds, trace_id)`. If
    the call was refused or has failed, `refusal_of` first calls `refused(method, reason)`. Both run
    in the context of the call, which names its caller and its request.
    """

    def __init__(
        self,
        observe: Callable[..., None],
        refused: Callable[[str, str], None] = lambda *_: None,
        tracing: Tracing | None = None,
        *,
        authorize: Callable[[str, Any], None] | None = None,
        audit_log: AuditLog | None = None,
        bounds: RequestBounds | None = None,
        check_rate: Callable[[bytes], None] | None = None,
    ) -> None:
        """`authorize(method, context)` runs before each call and can raise `Refused`.

        `bounds` checks each single request before it is parsed. A handler of a stream of requests
        checks them itself. Before that, `check_rate(session_id)` can raise `Refused`.
        """
        self.authorize = authorize
        self.bounds = bounds
        self.refusal_pace = RefusalPace()
        self.tracing = tracing
        self._observe = observe
        self._refused = refused
        self._audit_log = audit_log
        self._check_rate = check_rate

    def parser_of(self, method: str, parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Returns a parser that checks a request before. It raises `Refused`.

        If gRPC parsed requests, a parsing error would be answered with UNKNOWN and no reason.
        """
        name, bounds, tracing = method.removeprefix(_PACKAGE), self.bounds, self.tracing
        check_rate = None if method in _RELEASES else self._check_rate

        def check_and_parse(message: bytes) -> Any:
            if check_rate is not None and (session_id := session_id_of(message)):
                check_rate(session_id)
            try:
                if bounds is not None:
                    bounds.check(name, message)
                request = parse(message)
            except OutOfBounds as error:
                raise Refused(error.reason, str(error)) from None
            except DecodeError as error:
                text = f"the message cannot be parsed: {error}"
                raise Refused("INVALID_ARGUMENT", text, hold_back=_GARBAGE_SECONDS) from error
            if tracing is not None:
                tracing.record_request_id(request)
            return request

        return check_and_parse

    def refusal_of(self, method: str, context: Any, error: Exception) -> CallRefusal:
        """Counts a refusal or failure of a call, and returns the answer.

        Removes the traceback of the error: its frames refer to the request, and gRPC keeps the
        error in a reference cycle with the context. Without that, ten refused messages of 7 MB
        occupied 600 MB.
        """
        if isinstance(error, CoreError | Refused):
            reason, message = error.reason, str(error)
        else:
            reason, message = "INTERNAL", "a defect of the server; its log has the traceback"
            _log.error("call failed", method=method, exc_info=error)
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self._refused(method, reason)
        if self._audit_log is not None:
            audited = error.audit_reason if isinstance(error, Refused) else reason
            self._audit_log.record_refusal(method, context, audited)
        retry_after, hold_back = (error.retry_after, error.hold_back) if isinstance(error, Refused) else (None, 0.0)
        return CallRefusal(STATUS_OF[reason], reason, message, retry_after, min(hold_back, _MAX_DELAY_SECONDS))

    def ended(self, method: str, code: str, began: float, context: Any) -> None:
        """Records the end of a call. `began`: its time on the clock of `time.monotonic`."""
        seconds, trace_id = time.monotonic() - began, None
        if self.tracing is not None:
            trace_id = self.tracing.call_ended(method, code, seconds, context)
        self._observe(method, code, seconds, trace_id)
        if self._audit_log is not None:
            self._audit_log.record_call(method, code)


def session_id_of(message: bytes) -> bytes:
    """Returns the id of the session that a serialized request begins with; b"" if it has none."""
    return message[4 : 4 + _SESSION_ID_BYTES] if message[:1] + message[2:4] == _SESSION_TAGS else b""
