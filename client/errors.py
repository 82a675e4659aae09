"""Everything that a client call raises.

    KVTierError
    ├── Unavailable            nobody to talk to now; the client goes on trying by itself
    │   ├── NotConnected       no server yet, or no server any more
    │   ├── DeadlineExceeded   no answer in time
    │   ├── SessionLost        the session fell: server restarted, or silence; a new one is on its way
    │   └── Draining           the server is shutting down
    ├── InvalidRequest         the call cannot succeed as it is
    ├── LeaseLost              a lease or store ended early: treat what was read as garbage, what was written as lost
    ├── HoldGone               a request that should be handed over is not held (any more)
    ├── AccessDenied           the server does not know these credentials, or they are not for this call or tenant
    ├── NotOwner               the lease or store belongs to another engine
    ├── LimitExceeded          too much at once; try again later
    ├── DeviceUnavailable      the server does not move bytes of this device, or not any more: use another way
    ├── ChecksumMismatch       bytes arrived damaged
    └── ServerError            a defect of the server, or something that is not kvtier answered

For an engine each of them means one thing: a miss. `reason` is stable (`kvtier.v1.ErrorReason`), the text is for people.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import grpc

from ..protos.error_reasons import reason_of

__all__ = [
    "AccessDenied",
    "BreakEvenError",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "Draining",
    "HoldGone",
    "InvalidRequest",
    "KVTierError",
    "LeaseLost",
    "LimitExceeded",
    "NobodyAnswers",
    "NotConnected",
    "NotOwner",
    "ServerError",
    "SessionLost",
    "Unavailable",
    "error_for",
    "error_from",
    "error_from_status",
]


class KVTierError(Exception):
    """Something went wrong between this client and its server."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        """Name of a `kvtier.v1.ErrorReason` without its prefix; empty where the server did not say."""


class Unavailable(KVTierError):
    """There is nobody to talk to now; the client goes on trying by itself."""


class NotConnected(Unavailable):
    """There is no server yet, or none any more."""


class DeadlineExceeded(Unavailable):
    """The server did not answer in time."""


class SessionLost(Unavailable):
    """The session fell; a new one is opened in the background."""


class Draining(Unavailable):
    """The server is shutting down."""


class InvalidRequest(KVTierError):
    """The call cannot succeed as it is."""


class LeaseLost(KVTierError):
    """A lease or a store ended before its use did, or an item of it is not ready."""


class HoldGone(KVTierError):
    """A request that should be handed over is not held: never published, released, expired, or about to."""


class AccessDenied(KVTierError):
    """The server does not know the client's credentials, or they are not for this call or this tenant."""


class NotOwner(KVTierError):
    """The lease or store belongs to another engine."""


class LimitExceeded(KVTierError):
    """The server has too much to do for this one."""


class ChecksumMismatch(KVTierError):
    """Bytes arrived damaged."""


class DeviceUnavailable(KVTierError):
    """The server does not move bytes to and from this device, or not any more; the message begins with the cause."""


class ServerError(KVTierError):
    """The server has a defect, or is not a kvtier server."""


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
        "UNAUTHENTICATED": AccessDenied,
        "PERMISSION_DENIED": AccessDenied,
        "WRONG_TENANT": AccessDenied,
        "RATE_LIMITED": LimitExceeded,
    }
)
"""The exception of each reason; complete, by test."""


_ERROR_OF_STATUS = MappingProxyType(
    {
        grpc.StatusCode.UNAVAILABLE: NotConnected,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.CANCELLED: SessionLost,
        grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    }
)


def error_for(reason: str, message: str) -> KVTierError:
    """Returns the exception for a reason that the server gave."""
    return ERROR_OF.get(reason, ServerError)(message, reason)


def error_from_status(
    code: grpc.StatusCode, details: str | None, trailing_metadata: Iterable[Any] | None
) -> KVTierError:
    """Returns the exception for a call that gRPC reports as failed."""
    return error_from(code, details, reason_of(trailing_metadata))


def error_from(code: grpc.StatusCode, details: str | None, reason: str | None) -> KVTierError:
    """Returns the exception for a call that failed with this status, and with this reason if the server gave one."""
    if reason is not None:
        return error_for(reason, details or reason)
    return _ERROR_OF_STATUS.get(code, ServerError)(f"{code.name}: {details or 'no details'}")


class BreakEvenError(Exception):
    """It cannot be measured; one line that says why, and what to do about it."""


class NobodyAnswers(BreakEvenError):
    """The server or the engine does not answer."""
