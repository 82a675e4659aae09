from . import bounds_pb2 as _bounds_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_KIND_UNSPECIFIED: _ClassVar[GroupKind]
    GROUP_KIND_FULL_ATTENTION: _ClassVar[GroupKind]
    GROUP_KIND_SLIDING_WINDOW: _ClassVar[GroupKind]
    GROUP_KIND_STATE: _ClassVar[GroupKind]

class KeyStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_STATUS_UNSPECIFIED: _ClassVar[KeyStatus]
    KEY_STATUS_HIT: _ClassVar[KeyStatus]
    KEY_STATUS_MISS: _ClassVar[KeyStatus]
    KEY_STATUS_HIT_PENDING: _ClassVar[KeyStatus]
    KEY_STATUS_RETRY: _ClassVar[KeyStatus]

class StoreStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_STATUS_UNSPECIFIED: _ClassVar[StoreStatus]
    STORE_STATUS_GRANTED: _ClassVar[StoreStatus]
    STORE_STATUS_PRESENT: _ClassVar[StoreStatus]
    STORE_STATUS_IN_PROGRESS: _ClassVar[StoreStatus]
    STORE_STATUS_NO_ROOM: _ClassVar[StoreStatus]

class DurableStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABLE_STATUS_UNSPECIFIED: _ClassVar[DurableStatus]
    DURABLE_STATUS_DURABLE: _ClassVar[DurableStatus]
    DURABLE_STATUS_PENDING: _ClassVar[DurableStatus]
    DURABLE_STATUS_VOLATILE: _ClassVar[DurableStatus]
GROUP_KIND_UNSPECIFIED: GroupKind
GROUP_KIND_FULL_ATTENTION: GroupKind
GROUP_KIND_SLIDING_WINDOW: GroupKind
GROUP_KIND_STATE: GroupKind
KEY_STATUS_UNSPECIFIED: KeyStatus
KEY_STATUS_HIT: KeyStatus
KEY_STATUS_MISS: KeyStatus
KEY_STATUS_HIT_PENDING: KeyStatus
KEY_STATUS_RETRY: KeyStatus
STORE_STATUS_UNSPECIFIED: StoreStatus
STORE_STATUS_GRANTED: StoreStatus
STORE_STATUS_PRESENT: StoreStatus
STORE_STATUS_IN_PROGRESS: StoreStatus
STORE_STATUS_NO_ROOM: StoreStatus
DURABLE_STATUS_UNSPECIFIED: DurableStatus
DURABLE_STATUS_DURABLE: DurableStatus
DURABLE_STATUS_PENDING: DurableStatus
DURABLE_STATUS_VOLATILE: DurableStatus

class SessionRef(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("model", "revision", "dtype", "layout", "hash_scheme", "world_size", "groups", "tenant", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    dtype: str
    layout: str
    hash_scheme: str
    world_size: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    tenant: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., hash_scheme: _Optional[str] = ..., world_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., tenant: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "kind", "block_tokens", "part_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: GroupKind
    block_tokens: int
    part_bytes: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[GroupKind, str]] = ..., block_tokens: _Optional[int] = ..., part_bytes: _Optional[int] = ...) -> None: ...

class PackedKeys(_message.Message):
    __slots__ = ("keys", "key_bytes", "lengths")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    key_bytes: int
    lengths: bytes
    def __init__(self, keys: _Optional[bytes] = ..., key_bytes: _Optional[int] = ..., lengths: _Optional[bytes] = ...) -> None: ...
