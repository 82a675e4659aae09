"""Error reasons, their gRPC status codes, and their encoding in the trailing metadata.

A refused call ends with the status code of the reason and a `google.rpc.ErrorInfo` in the trailing
metadata (`grpc-status-details-bin`). Clients must decide by the reason, never by the text of the
error.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

__all__ = ["DOMAIN", "STATUS_OF", "error_details", "reason_of", "reason_within", "status_of", "status_within"]

DOMAIN = "kvtier.dev"
_DETAILS_KEY = "grpc-status-details-bin"

STATUS_OF = MappingProxyType(
    {
        "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
        "TOO_MANY_KEYS": grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_KEY": grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_NAMESPACE": grpc.StatusCode.INVALID_ARGUMENT,
        "UNKNOWN_SESSION": grpc.StatusCode.UNAUTHENTICATED,
        "STALE_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
        "LEASE_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "NOT_OWNER": grpc.StatusCode.PERMISSION_DENIED,
        "STORE_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "WRONG_SIZE": grpc.StatusCode.INVALID_ARGUMENT,
        "CHECKSUM_MISMATCH": grpc.StatusCode.DATA_LOSS,
        "NOT_READY": grpc.StatusCode.FAILED_PRECONDITION,
        "DRAINING": grpc.StatusCode.UNAVAILABLE,
        "LIMIT_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "UNSUPPORTED_VERSION": grpc.StatusCode.FAILED_PRECONDITION,
        "FSCK_RUNNING": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "INTERNAL": grpc.StatusCode.INTERNAL,
        "REQUEST_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "HOLD_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "HOLD_EXPIRED": grpc.StatusCode.NOT_FOUND,
        "DEVICE_UNAVAILABLE": grpc.StatusCode.FAILED_PRECONDITION,
        "DEVICE_LOST": grpc.StatusCode.ABORTED,
        "RETENTION_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CONVERSATION_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
        "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
        "WRONG_TENANT": grpc.StatusCode.PERMISSION_DENIED,
        "RATE_LIMITED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Status code of each reason in `kvtier.v1.ErrorReason`."""


def status_of(reason: str, message: str, retry_after: float | None = None) -> status_pb2.Status:
    """Returns the status of a refused call. `retry_after`: seconds after which to retry."""
    code: int = STATUS_OF[reason].value[0]
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    if retry_after is not None:
        hint = error_details_pb2.RetryInfo()
        hint.retry_delay.FromNanoseconds(int(retry_after * 1e9))
        status.details.add().Pack(hint)
    return status


def error_details(reason: str, message: str, retry_after: float | None = None) -> tuple[tuple[str, bytes], ...]:
    """Returns the trailing metadata of a refused call; for the arguments see `status_of`."""
    return ((_DETAILS_KEY, status_of(reason, message, retry_after).SerializeToString()),)


def status_within(trailing_metadata: Iterable[Any] | None) -> status_pb2.Status | None:
    """Returns the status in a failed call's metadata; None if the metadata has no status."""
    for key, value in trailing_metadata or ():
        if key == _DETAILS_KEY:
            status: status_pb2.Status = status_pb2.Status.FromString(value)
            return status
    return None


def reason_of(trailing_metadata: Iterable[Any] | None) -> str | None:
    """Returns the reason in a failed call's metadata; None if the error is not from kvtier."""
    status = status_within(trailing_metadata)
    return None if status is None else reason_within(status)


def reason_within(status: status_pb2.Status) -> str | None:
    """Returns the reason in a status; None if the status is not from kvtier."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return None
