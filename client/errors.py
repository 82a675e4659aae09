"""Exceptions of client calls.

All derive from `KVTierError`. An engine treats each exception as a cache miss. `Unavailable` and
its subclasses mean that there is no session now. `reason` is a stable code
(`kvtier.v1.ErrorReason`); the text is for logs and may change.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import grpc

from ..protos.error_reasons import reason_of

__all__ = [
    "AccessDenied",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "Draining",
    "ForkedClient",
    "HoldGone",
    "InvalidRequest",
    "KVTierError",
    "LeaseLost",
    "LimitExceeded",
    "NotConnected",
    "NotOwner",
    "ServerError",
    "SessionLost",
    "Unavailable",
    "UnsupportedServer",
    "error_for",
    "error_from",
    "error_from_call",
]


class KVTierError(Exception):
    """Base class of all exceptions of client calls."""

    permanent = False
    """Whether the server refuses each such call until a setting or argument changes."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        """`kvtier.v1.ErrorReason` without prefix; empty if the server gave no reason."""


class Unavailable(KVTierError):
    """There is no session now; the client reconnects automatically."""


class NotConnected(Unavailable):
    """There is no connection to a server."""


class DeadlineExceeded(Unavailable):
    """The server did not respond in time."""


class SessionLost(Unavailable):
    """The session ended; the client opens a new one in the background."""


class Draining(Unavailable):
    """The server is shutting down."""


class InvalidRequest(KVTierError):
    """The arguments of the call are invalid. A retry with the same arguments fails again."""

    permanent = True


class ForkedClient(KVTierError):
    """The process was forked after the client was constructed. It needs a client of its own."""

    permanent = True


class LeaseLost(KVTierError):
    """A lease or store ended while it was in use, or an item of the lease is not ready."""


class HoldGone(KVTierError):
    """The hold was never published, was released, has expired, or is about to expire."""


class AccessDenied(KVTierError):
    """The server does not know the credentials, or the credentials forbid this call or tenant."""

    permanent = True


class NotOwner(KVTierError):
    """The lease or store belongs to another engine."""

    permanent = True


class LimitExceeded(KVTierError):
    """The server refused the call because of a limit; try again later."""


class ChecksumMismatch(KVTierError):
    """Received bytes do not match their checksum."""


class DeviceUnavailable(KVTierError):
    """The server cannot copy to or from this device now; the message begins with the cause."""


class UnsupportedServer(KVTierError):
    """The peer does not know the call: it is not a kvtier server, or its version is too old."""

    permanent = True


class ServerError(KVTierError):
    """The server has a defect, or the peer is not a kvtier server."""


ERROR_OF = MappingProxyType(
    {
        "INVALID_ARGUMENT": InvalidRequest,
        "TOO_MANY_KEYS": InvalidRequest,
        "INVALID_KEY": InvalidRequest,
        "INVALID_NAMESPACE": InvalidRequest,
        "WRONG_SIZE": InvalidRequest,
        "UNSUPPORTED_VERSION": InvalidRequest,
        "UNKNOWN_SESSION": SessionLost,
        "STALE_EPOCH": SessionLost,
        "LEASE_NOT_FOUND": LeaseLost,
        "STORE_NOT_FOUND": LeaseLost,
        "NOT_READY": LeaseLost,
        "NOT_OWNER": NotOwner,
        "CHECKSUM_MISMATCH": ChecksumMismatch,
        "DRAINING": Draining,
        "LIMIT_EXCEEDED": LimitExceeded,
        "FSCK_RUNNING": LimitExceeded,
        "INTERNAL": ServerError,
        "REQUEST_NOT_FOUND": InvalidRequest,
        "HOLD_NOT_FOUND": HoldGone,
        "HOLD_EXPIRED": HoldGone,
        "DEVICE_UNAVAILABLE": DeviceUnavailable,
        "DEVICE_LOST": DeviceUnavailable,
        "RETENTION_FULL": LimitExceeded,
        "CONVERSATION_NOT_FOUND": InvalidRequest,
        "UNAUTHENTICATED": AccessDenied,
        "PERMISSION_DENIED": AccessDenied,
        "WRONG_TENANT": AccessDenied,
        "RATE_LIMITED": LimitExceeded,
    }
)
"""Exception for each reason; a test checks that no reason is missing."""

_ERROR_OF_STATUS = MappingProxyType(
    {
        grpc.StatusCode.UNAVAILABLE: NotConnected,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.CANCELLED: SessionLost,
        grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
        grpc.StatusCode.UNIMPLEMENTED: UnsupportedServer,
        # A proxy between client and server gives no reason.
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
        grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    }
)
_HTTP_STATUS = "Received http2 header with status"
"""Begin of the details if the peer has answered with an HTTP status, and not as gRPC."""


def error_for(reason: str, message: str) -> KVTierError:
    """Returns the exception for a reason given by the server."""
    return ERROR_OF.get(reason, ServerError)(message, reason)


def error_from_call(error: Any) -> KVTierError:
    """Returns the exception for the `grpc.RpcError` of a failed call."""
    return error_from(error.code(), error.details(), reason_of(error.trailing_metadata()))


def error_from(code: grpc.StatusCode, details: str | None, reason: str | None) -> KVTierError:
    """Returns the exception for a failed call; `reason` is None if the server gave none."""
    if reason is not None:
        return error_for(reason, details or reason)
    error = _ERROR_OF_STATUS.get(code, ServerError)(f"{code.name}: {details or 'no details'}")
    # A proxy that restarts can refuse calls for a while. gRPC turns its HTTP status into a code.
    error.permanent = code is grpc.StatusCode.UNIMPLEMENTED and not (details or "").startswith(_HTTP_STATUS)
    return error
