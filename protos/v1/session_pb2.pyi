import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from . import bounds_pb2 as _bounds_pb2
from . import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CapabilitiesResponse(_message.Message):
    __slots__ = ("server_version", "protocol_versions", "epoch", "limits", "region", "tiers", "devices")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    protocol_versions: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    limits: Limits
    region: Region
    tiers: _containers.RepeatedScalarFieldContainer[str]
    devices: Devices
    def __init__(self, server_version: _Optional[str] = ..., protocol_versions: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., region: _Optional[_Union[Region, _Mapping]] = ..., tiers: _Optional[_Iterable[str]] = ..., devices: _Optional[_Union[Devices, _Mapping]] = ...) -> None: ...

class Devices(_message.Message):
    __slots__ = ("offered", "why_not")
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    offered: bool
    why_not: str
    def __init__(self, offered: bool = ..., why_not: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_keys", "max_key_bytes", "max_part_bytes", "max_frame_bytes", "max_wait", "max_lease")
    MAX_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_FIELD_NUMBER: _ClassVar[int]
    max_keys: int
    max_key_bytes: int
    max_part_bytes: int
    max_frame_bytes: int
    max_wait: _duration_pb2.Duration
    max_lease: _duration_pb2.Duration
    def __init__(self, max_keys: _Optional[int] = ..., max_key_bytes: _Optional[int] = ..., max_part_bytes: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("attach_path", "size_bytes", "takes_calls")
    ATTACH_PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAKES_CALLS_FIELD_NUMBER: _ClassVar[int]
    attach_path: str
    size_bytes: int
    takes_calls: bool
    def __init__(self, attach_path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., takes_calls: bool = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("protocol_version", "client_name", "engine_id", "rank", "namespace", "pid", "transport", "engine_address", "served_model", "verify_all")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    VERIFY_ALL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_name: str
    engine_id: str
    rank: int
    namespace: _common_pb2.Namespace
    pid: int
    transport: str
    engine_address: str
    served_model: str
    verify_all: bool
    def __init__(self, protocol_version: _Optional[int] = ..., client_name: _Optional[str] = ..., engine_id: _Optional[str] = ..., rank: _Optional[int] = ..., namespace: _Optional[_Union[_common_pb2.Namespace, _Mapping]] = ..., pid: _Optional[int] = ..., transport: _Optional[str] = ..., engine_address: _Optional[str] = ..., served_model: _Optional[str] = ..., verify_all: bool = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("session", "heartbeat_interval", "namespace_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    heartbeat_interval: _duration_pb2.Duration
    namespace_id: bytes
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...
