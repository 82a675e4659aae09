from google.protobuf import descriptor_pb2 as _descriptor_pb2
from . import errors_pb2 as _errors_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerLimit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_LIMIT_UNSPECIFIED: _ClassVar[ServerLimit]
    SERVER_LIMIT_MAX_KEYS: _ClassVar[ServerLimit]
    SERVER_LIMIT_MAX_KEY_BYTES: _ClassVar[ServerLimit]
    SERVER_LIMIT_MAX_FRAME_BYTES: _ClassVar[ServerLimit]
    SERVER_LIMIT_ALL_KEYS_BYTES: _ClassVar[ServerLimit]
    SERVER_LIMIT_ALL_LENGTHS_BYTES: _ClassVar[ServerLimit]
SERVER_LIMIT_UNSPECIFIED: ServerLimit
SERVER_LIMIT_MAX_KEYS: ServerLimit
SERVER_LIMIT_MAX_KEY_BYTES: ServerLimit
SERVER_LIMIT_MAX_FRAME_BYTES: ServerLimit
SERVER_LIMIT_ALL_KEYS_BYTES: ServerLimit
SERVER_LIMIT_ALL_LENGTHS_BYTES: ServerLimit
BOUND_FIELD_NUMBER: _ClassVar[int]
bound: _descriptor.FieldDescriptor

class Bound(_message.Message):
    __slots__ = ("max_characters", "max_bytes", "max_bytes_by", "max_items", "max_items_by", "reason")
    MAX_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_BY_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    max_characters: int
    max_bytes: int
    max_bytes_by: ServerLimit
    max_items: int
    max_items_by: ServerLimit
    reason: _errors_pb2.ErrorReason
    def __init__(self, max_characters: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_bytes_by: _Optional[_Union[ServerLimit, str]] = ..., max_items: _Optional[int] = ..., max_items_by: _Optional[_Union[ServerLimit, str]] = ..., reason: _Optional[_Union[_errors_pb2.ErrorReason, str]] = ...) -> None: ...
