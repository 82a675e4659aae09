from . import bounds_pb2 as _bounds_pb2
from . import common_pb2 as _common_pb2
from . import devices_pb2 as _devices_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushRequest(_message.Message):
    __slots__ = ("session", "store_id", "offset_bytes", "xxh3_64", "complete", "payload")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    store_id: int
    offset_bytes: int
    xxh3_64: int
    complete: bool
    payload: bytes
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., store_id: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., xxh3_64: _Optional[int] = ..., complete: bool = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("received_bytes", "completed")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    completed: bool
    def __init__(self, received_bytes: _Optional[int] = ..., completed: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("session", "lease_id", "items", "complete")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    lease_id: int
    items: _containers.RepeatedScalarFieldContainer[int]
    complete: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., lease_id: _Optional[int] = ..., items: _Optional[_Iterable[int]] = ..., complete: bool = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("offset_bytes", "xxh3_64", "completed", "digests", "payload")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    xxh3_64: int
    completed: bool
    digests: bytes
    payload: bytes
    def __init__(self, offset_bytes: _Optional[int] = ..., xxh3_64: _Optional[int] = ..., completed: bool = ..., digests: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("session", "store_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    store_id: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., store_id: _Optional[int] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("port", "socket_suffix", "received_bytes", "plain_port", "socket_port", "unix_suffix")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SOCKET_SUFFIX_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAIN_PORT_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PORT_FIELD_NUMBER: _ClassVar[int]
    UNIX_SUFFIX_FIELD_NUMBER: _ClassVar[int]
    port: int
    socket_suffix: str
    received_bytes: int
    plain_port: int
    socket_port: int
    unix_suffix: str
    def __init__(self, port: _Optional[int] = ..., socket_suffix: _Optional[str] = ..., received_bytes: _Optional[int] = ..., plain_port: _Optional[int] = ..., socket_port: _Optional[int] = ..., unix_suffix: _Optional[str] = ...) -> None: ...

class RegisterDeviceBuffersRequest(_message.Message):
    __slots__ = ("session", "device_uuid", "origin", "allocations", "groups", "event_handles")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLES_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    device_uuid: str
    origin: _devices_pb2.ProcessOrigin
    allocations: _containers.RepeatedCompositeFieldContainer[_devices_pb2.DeviceAllocation]
    groups: _containers.RepeatedCompositeFieldContainer[_devices_pb2.DeviceGroup]
    event_handles: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., device_uuid: _Optional[str] = ..., origin: _Optional[_Union[_devices_pb2.ProcessOrigin, _Mapping]] = ..., allocations: _Optional[_Iterable[_Union[_devices_pb2.DeviceAllocation, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[_devices_pb2.DeviceGroup, _Mapping]]] = ..., event_handles: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RegisterDeviceBuffersResponse(_message.Message):
    __slots__ = ("buffers_id", "order")
    BUFFERS_ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    buffers_id: int
    order: _devices_pb2.DeviceOrder
    def __init__(self, buffers_id: _Optional[int] = ..., order: _Optional[_Union[_devices_pb2.DeviceOrder, str]] = ...) -> None: ...

class UnregisterDeviceBuffersRequest(_message.Message):
    __slots__ = ("session", "buffers_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    buffers_id: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., buffers_id: _Optional[int] = ...) -> None: ...

class UnregisterDeviceBuffersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreFromDeviceRequest(_message.Message):
    __slots__ = ("session", "buffers_id", "store_id", "blocks", "items", "after", "deadline_nanoseconds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    buffers_id: int
    store_id: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    items: _containers.RepeatedScalarFieldContainer[int]
    after: _devices_pb2.DeviceAfter
    deadline_nanoseconds: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., buffers_id: _Optional[int] = ..., store_id: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., items: _Optional[_Iterable[int]] = ..., after: _Optional[_Union[_devices_pb2.DeviceAfter, _Mapping]] = ..., deadline_nanoseconds: _Optional[int] = ...) -> None: ...

class StoreFromDeviceResponse(_message.Message):
    __slots__ = ("moved_bytes",)
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    moved_bytes: int
    def __init__(self, moved_bytes: _Optional[int] = ...) -> None: ...

class LoadToDeviceRequest(_message.Message):
    __slots__ = ("session", "buffers_id", "lease_id", "items", "blocks", "after", "deadline_nanoseconds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    buffers_id: int
    lease_id: int
    items: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    after: _devices_pb2.DeviceAfter
    deadline_nanoseconds: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., buffers_id: _Optional[int] = ..., lease_id: _Optional[int] = ..., items: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ..., after: _Optional[_Union[_devices_pb2.DeviceAfter, _Mapping]] = ..., deadline_nanoseconds: _Optional[int] = ...) -> None: ...

class LoadToDeviceResponse(_message.Message):
    __slots__ = ("moved_bytes",)
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    moved_bytes: int
    def __init__(self, moved_bytes: _Optional[int] = ...) -> None: ...
