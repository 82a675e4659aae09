from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_ARGUMENT: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_MANY_KEYS: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_KEY: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_NAMESPACE: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_SESSION: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_EPOCH: _ClassVar[ErrorReason]
    ERROR_REASON_LEASE_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_OWNER: _ClassVar[ErrorReason]
    ERROR_REASON_STORE_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_WRONG_SIZE: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKSUM_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_READY: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_LIMIT_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_UNSUPPORTED_VERSION: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_FSCK_RUNNING: _ClassVar[ErrorReason]
    ERROR_REASON_REQUEST_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_HOLD_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_HOLD_EXPIRED: _ClassVar[ErrorReason]
    ERROR_REASON_DEVICE_UNAVAILABLE: _ClassVar[ErrorReason]
    ERROR_REASON_DEVICE_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_PERMISSION_DENIED: _ClassVar[ErrorReason]
    ERROR_REASON_WRONG_TENANT: _ClassVar[ErrorReason]
    ERROR_REASON_RATE_LIMITED: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_ARGUMENT: ErrorReason
ERROR_REASON_TOO_MANY_KEYS: ErrorReason
ERROR_REASON_INVALID_KEY: ErrorReason
ERROR_REASON_INVALID_NAMESPACE: ErrorReason
ERROR_REASON_UNKNOWN_SESSION: ErrorReason
ERROR_REASON_STALE_EPOCH: ErrorReason
ERROR_REASON_LEASE_NOT_FOUND: ErrorReason
ERROR_REASON_NOT_OWNER: ErrorReason
ERROR_REASON_STORE_NOT_FOUND: ErrorReason
ERROR_REASON_WRONG_SIZE: ErrorReason
ERROR_REASON_CHECKSUM_MISMATCH: ErrorReason
ERROR_REASON_NOT_READY: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_LIMIT_EXCEEDED: ErrorReason
ERROR_REASON_UNSUPPORTED_VERSION: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_FSCK_RUNNING: ErrorReason
ERROR_REASON_REQUEST_NOT_FOUND: ErrorReason
ERROR_REASON_HOLD_NOT_FOUND: ErrorReason
ERROR_REASON_HOLD_EXPIRED: ErrorReason
ERROR_REASON_DEVICE_UNAVAILABLE: ErrorReason
ERROR_REASON_DEVICE_LOST: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_PERMISSION_DENIED: ErrorReason
ERROR_REASON_WRONG_TENANT: ErrorReason
ERROR_REASON_RATE_LIMITED: ErrorReason
