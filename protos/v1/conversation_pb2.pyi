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

class ConversationAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONVERSATION_ACTION_UNSPECIFIED: _ClassVar[ConversationAction]
    CONVERSATION_ACTION_RETAIN: _ClassVar[ConversationAction]
    CONVERSATION_ACTION_RELEASE: _ClassVar[ConversationAction]
    CONVERSATION_ACTION_DEMOTE: _ClassVar[ConversationAction]
    CONVERSATION_ACTION_PREFETCH: _ClassVar[ConversationAction]
    CONVERSATION_ACTION_PIN: _ClassVar[ConversationAction]
    CONVERSATION_ACTION_UNPIN: _ClassVar[ConversationAction]
    CONVERSATION_ACTION_DELETE: _ClassVar[ConversationAction]
CONVERSATION_ACTION_UNSPECIFIED: ConversationAction
CONVERSATION_ACTION_RETAIN: ConversationAction
CONVERSATION_ACTION_RELEASE: ConversationAction
CONVERSATION_ACTION_DEMOTE: ConversationAction
CONVERSATION_ACTION_PREFETCH: ConversationAction
CONVERSATION_ACTION_PIN: ConversationAction
CONVERSATION_ACTION_UNPIN: ConversationAction
CONVERSATION_ACTION_DELETE: ConversationAction

class ActOnConversationRequest(_message.Message):
    __slots__ = ("namespace_id", "tenant", "action", "conversation_id", "last_key", "keys", "retain_for")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FOR_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    tenant: str
    action: ConversationAction
    conversation_id: str
    last_key: bytes
    keys: _common_pb2.PackedKeys
    retain_for: _duration_pb2.Duration
    def __init__(self, namespace_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., action: _Optional[_Union[ConversationAction, str]] = ..., conversation_id: _Optional[str] = ..., last_key: _Optional[bytes] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., retain_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ActOnConversationResponse(_message.Message):
    __slots__ = ("changed_blocks", "shared_blocks", "kept_blocks", "missing_blocks")
    CHANGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    changed_blocks: int
    shared_blocks: int
    kept_blocks: int
    missing_blocks: int
    def __init__(self, changed_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., missing_blocks: _Optional[int] = ...) -> None: ...

class ListConversationsRequest(_message.Message):
    __slots__ = ("tenant", "conversation_id", "max_conversations", "page")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    conversation_id: str
    max_conversations: int
    page: int
    def __init__(self, tenant: _Optional[str] = ..., conversation_id: _Optional[str] = ..., max_conversations: _Optional[int] = ..., page: _Optional[int] = ...) -> None: ...

class ListConversationsResponse(_message.Message):
    __slots__ = ("conversations", "total", "next_page")
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_FIELD_NUMBER: _ClassVar[int]
    conversations: _containers.RepeatedCompositeFieldContainer[ConversationStatus]
    total: int
    next_page: int
    def __init__(self, conversations: _Optional[_Iterable[_Union[ConversationStatus, _Mapping]]] = ..., total: _Optional[int] = ..., next_page: _Optional[int] = ...) -> None: ...

class ConversationStatus(_message.Message):
    __slots__ = ("conversation_id", "tenant", "namespace_id", "requests", "blocks", "tiers", "age", "idle", "retained_for", "pinned")
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FOR_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    conversation_id: str
    tenant: str
    namespace_id: bytes
    requests: int
    blocks: int
    tiers: _containers.RepeatedCompositeFieldContainer[ConversationTier]
    age: _duration_pb2.Duration
    idle: _duration_pb2.Duration
    retained_for: _duration_pb2.Duration
    pinned: bool
    def __init__(self, conversation_id: _Optional[str] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., requests: _Optional[int] = ..., blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[ConversationTier, _Mapping]]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retained_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pinned: bool = ...) -> None: ...

class ConversationTier(_message.Message):
    __slots__ = ("tier", "blocks", "bytes", "retained_blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    blocks: int
    bytes: int
    retained_blocks: int
    def __init__(self, tier: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., retained_blocks: _Optional[int] = ...) -> None: ...
