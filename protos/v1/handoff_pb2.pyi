import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from . import bounds_pb2 as _bounds_pb2
from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffDirection(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_DIRECTION_UNSPECIFIED: _ClassVar[HandoffDirection]
    HANDOFF_DIRECTION_PREFILL_TO_DECODE: _ClassVar[HandoffDirection]
    HANDOFF_DIRECTION_DECODE_TO_PREFILL: _ClassVar[HandoffDirection]

class PublishStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUBLISH_STATUS_UNSPECIFIED: _ClassVar[PublishStatus]
    PUBLISH_STATUS_PUBLISHED: _ClassVar[PublishStatus]
    PUBLISH_STATUS_NO_ROOM: _ClassVar[PublishStatus]
    PUBLISH_STATUS_TOO_MANY: _ClassVar[PublishStatus]

class NotClaimedReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_CLAIMED_REASON_UNSPECIFIED: _ClassVar[NotClaimedReason]
    NOT_CLAIMED_REASON_PEER_NOT_LISTED: _ClassVar[NotClaimedReason]
    NOT_CLAIMED_REASON_NOTHING_HELD: _ClassVar[NotClaimedReason]
HANDOFF_DIRECTION_UNSPECIFIED: HandoffDirection
HANDOFF_DIRECTION_PREFILL_TO_DECODE: HandoffDirection
HANDOFF_DIRECTION_DECODE_TO_PREFILL: HandoffDirection
PUBLISH_STATUS_UNSPECIFIED: PublishStatus
PUBLISH_STATUS_PUBLISHED: PublishStatus
PUBLISH_STATUS_NO_ROOM: PublishStatus
PUBLISH_STATUS_TOO_MANY: PublishStatus
NOT_CLAIMED_REASON_UNSPECIFIED: NotClaimedReason
NOT_CLAIMED_REASON_PEER_NOT_LISTED: NotClaimedReason
NOT_CLAIMED_REASON_NOTHING_HELD: NotClaimedReason

class HoldRef(_message.Message):
    __slots__ = ("engine_id", "request_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class PublishHoldRequest(_message.Message):
    __slots__ = ("session", "request_id", "direction", "keys", "positions", "num_tokens", "duration")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    request_id: str
    direction: HandoffDirection
    keys: _common_pb2.PackedKeys
    positions: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    duration: _duration_pb2.Duration
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., request_id: _Optional[str] = ..., direction: _Optional[_Union[HandoffDirection, str]] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., positions: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PublishHoldResponse(_message.Message):
    __slots__ = ("status", "remaining", "pending_blocks")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    status: PublishStatus
    remaining: _duration_pb2.Duration
    pending_blocks: int
    def __init__(self, status: _Optional[_Union[PublishStatus, str]] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pending_blocks: _Optional[int] = ...) -> None: ...

class ClaimHoldRequest(_message.Message):
    __slots__ = ("session", "hold", "request_id", "first_positions", "lease_duration", "wait", "min_blocks", "grant_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    MIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    hold: HoldRef
    request_id: str
    first_positions: _containers.RepeatedScalarFieldContainer[int]
    lease_duration: _duration_pb2.Duration
    wait: _duration_pb2.Duration
    min_blocks: int
    grant_id: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., hold: _Optional[_Union[HoldRef, _Mapping]] = ..., request_id: _Optional[str] = ..., first_positions: _Optional[_Iterable[int]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., min_blocks: _Optional[int] = ..., grant_id: _Optional[int] = ...) -> None: ...

class ClaimHoldResponse(_message.Message):
    __slots__ = ("keys", "positions", "statuses", "lease_id", "num_tokens", "direction", "remaining", "settled_blocks")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    keys: _common_pb2.PackedKeys
    positions: _containers.RepeatedScalarFieldContainer[int]
    statuses: bytes
    lease_id: int
    num_tokens: int
    direction: HandoffDirection
    remaining: _duration_pb2.Duration
    settled_blocks: int
    def __init__(self, keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., positions: _Optional[_Iterable[int]] = ..., statuses: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., direction: _Optional[_Union[HandoffDirection, str]] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., settled_blocks: _Optional[int] = ...) -> None: ...

class RenewHoldsRequest(_message.Message):
    __slots__ = ("session", "holds", "extension")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    EXTENSION_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    holds: _containers.RepeatedCompositeFieldContainer[HoldRef]
    extension: _duration_pb2.Duration
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., holds: _Optional[_Iterable[_Union[HoldRef, _Mapping]]] = ..., extension: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewHoldsResponse(_message.Message):
    __slots__ = ("missing_holds",)
    MISSING_HOLDS_FIELD_NUMBER: _ClassVar[int]
    missing_holds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, missing_holds: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseHoldsRequest(_message.Message):
    __slots__ = ("session", "holds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    holds: _containers.RepeatedCompositeFieldContainer[HoldRef]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., holds: _Optional[_Iterable[_Union[HoldRef, _Mapping]]] = ...) -> None: ...

class ReleaseHoldsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportNotClaimedRequest(_message.Message):
    __slots__ = ("session", "hold", "request_id", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    hold: HoldRef
    request_id: str
    reason: NotClaimedReason
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., hold: _Optional[_Union[HoldRef, _Mapping]] = ..., request_id: _Optional[str] = ..., reason: _Optional[_Union[NotClaimedReason, str]] = ...) -> None: ...

class ReportNotClaimedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
