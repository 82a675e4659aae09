from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushRequest(_message.Message):
    __slots__ = ("session", "store_id", "offset_bytes", "xxh3_64", "payload")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    store_id: int
    offset_bytes: int
    xxh3_64: int
    payload: bytes
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., store_id: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., xxh3_64: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("received_bytes",)
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("session", "lease_id", "items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    lease_id: int
    items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., lease_id: _Optional[int] = ..., items: _Optional[_Iterable[int]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("offset_bytes", "xxh3_64", "payload")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    xxh3_64: int
    payload: bytes
    def __init__(self, offset_bytes: _Optional[int] = ..., xxh3_64: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...
