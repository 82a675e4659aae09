"""Errors of the core: `CoreError` and its subclasses, each with a stable reason.

`reason` is a name of `kvtier.v1.ErrorReason` without the prefix `ERROR_REASON_`. The server maps
each reason to a gRPC status.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CoreError",
    "HoldExpired",
    "HoldNotFound",
    "InvalidItem",
    "InvalidKey",
    "InvalidNamespace",
    "LeaseNotFound",
    "LimitExceeded",
    "NotOwner",
    "NotReady",
    "StoreNotFound",
    "UnknownSession",
]


class CoreError(Exception):
    """The core refused an event and changed nothing."""

    reason: ClassVar[str] = "INTERNAL"


class InvalidKey(CoreError):
    """A key is malformed or names an unknown group."""

    reason = "INVALID_KEY"


class InvalidNamespace(CoreError):
    """A namespace is inconsistent, or its parts are too large for this server."""

    reason = "INVALID_NAMESPACE"


class InvalidItem(CoreError):
    """An argument is invalid, for example an item number out of range."""

    reason = "INVALID_ARGUMENT"


class LimitExceeded(CoreError):
    reason = "LIMIT_EXCEEDED"


class UnknownSession(CoreError):
    reason = "UNKNOWN_SESSION"


class LeaseNotFound(CoreError):
    """No lease has this id: it was released, expired, ended with its session or never began."""

    reason = "LEASE_NOT_FOUND"


class StoreNotFound(CoreError):
    """No store has this id: it was completed, expired, ended with its session or never began."""

    reason = "STORE_NOT_FOUND"


class HoldNotFound(CoreError):
    """No hold has this name: it was released, dropped, or never published."""

    reason = "HOLD_NOT_FOUND"


class HoldExpired(CoreError):
    """The hold can no longer be claimed: it has expired, or expires in less than 5 seconds."""

    reason = "HOLD_EXPIRED"


class RetentionFull(CoreError):
    """The blocks to retain exceed the part of the CPU tier that the tenant may retain."""

    reason = "RETENTION_FULL"


class NotOwner(CoreError):
    """The lease or store belongs to another engine."""

    reason = "NOT_OWNER"


class NotReady(CoreError):
    """The caller asked for the slot of an item that is a miss, or whose block is not ready."""

    reason = "NOT_READY"
