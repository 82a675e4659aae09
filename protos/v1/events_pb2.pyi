from . import bounds_pb2 as _bounds_pb2
from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplayPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLAY_PHASE_UNSPECIFIED: _ClassVar[ReplayPhase]
    REPLAY_PHASE_BEGIN: _ClassVar[ReplayPhase]
    REPLAY_PHASE_CONTINUE: _ClassVar[ReplayPhase]
    REPLAY_PHASE_END: _ClassVar[ReplayPhase]

class BlockEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_EVENT_KIND_UNSPECIFIED: _ClassVar[BlockEventKind]
    BLOCK_EVENT_KIND_STORED: _ClassVar[BlockEventKind]
    BLOCK_EVENT_KIND_REMOVED: _ClassVar[BlockEventKind]
    BLOCK_EVENT_KIND_CLEARED: _ClassVar[BlockEventKind]
REPLAY_PHASE_UNSPECIFIED: ReplayPhase
REPLAY_PHASE_BEGIN: ReplayPhase
REPLAY_PHASE_CONTINUE: ReplayPhase
REPLAY_PHASE_END: ReplayPhase
BLOCK_EVENT_KIND_UNSPECIFIED: BlockEventKind
BLOCK_EVENT_KIND_STORED: BlockEventKind
BLOCK_EVENT_KIND_REMOVED: BlockEventKind
BLOCK_EVENT_KIND_CLEARED: BlockEventKind

class WatchEventsRequest(_message.Message):
    __slots__ = ("session", "all_namespaces", "after", "with_contents")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ALL_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WITH_CONTENTS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    all_namespaces: bool
    after: EventCursor
    with_contents: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., all_namespaces: bool = ..., after: _Optional[_Union[EventCursor, _Mapping]] = ..., with_contents: bool = ...) -> None: ...

class EventCursor(_message.Message):
    __slots__ = ("epoch", "sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("cursor", "phase", "events")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    cursor: EventCursor
    phase: ReplayPhase
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    def __init__(self, cursor: _Optional[_Union[EventCursor, _Mapping]] = ..., phase: _Optional[_Union[ReplayPhase, str]] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("kind", "namespace_id", "tier", "medium", "keys", "contents")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    kind: BlockEventKind
    namespace_id: bytes
    tier: str
    medium: str
    keys: _common_pb2.PackedKeys
    contents: BlockContents
    def __init__(self, kind: _Optional[_Union[BlockEventKind, str]] = ..., namespace_id: _Optional[bytes] = ..., tier: _Optional[str] = ..., medium: _Optional[str] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., contents: _Optional[_Union[BlockContents, _Mapping]] = ...) -> None: ...

class BlockContents(_message.Message):
    __slots__ = ("token_ids", "parent_keys", "lora_name")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    parent_keys: _common_pb2.PackedKeys
    lora_name: str
    def __init__(self, token_ids: _Optional[bytes] = ..., parent_keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., lora_name: _Optional[str] = ...) -> None: ...

class DescribeBlocksRequest(_message.Message):
    __slots__ = ("session", "keys", "contents")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    keys: _common_pb2.PackedKeys
    contents: BlockContents
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., contents: _Optional[_Union[BlockContents, _Mapping]] = ...) -> None: ...

class DescribeBlocksResponse(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: bool = ...) -> None: ...
