from . import bounds_pb2 as _bounds_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeviceOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_ORDER_UNSPECIFIED: _ClassVar[DeviceOrder]
    DEVICE_ORDER_EVENTS: _ClassVar[DeviceOrder]
    DEVICE_ORDER_CALLER_WAITS: _ClassVar[DeviceOrder]
DEVICE_ORDER_UNSPECIFIED: DeviceOrder
DEVICE_ORDER_EVENTS: DeviceOrder
DEVICE_ORDER_CALLER_WAITS: DeviceOrder

class ProcessOrigin(_message.Message):
    __slots__ = ("boot_id", "pid", "pid_namespace", "shm_device")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SHM_DEVICE_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid: int
    pid_namespace: int
    shm_device: int
    def __init__(self, boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., pid_namespace: _Optional[int] = ..., shm_device: _Optional[int] = ...) -> None: ...

class DeviceAllocation(_message.Message):
    __slots__ = ("handle", "size_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    size_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class DeviceGroup(_message.Message):
    __slots__ = ("group_index", "num_blocks", "runs")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    num_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[DeviceRun]
    def __init__(self, group_index: _Optional[int] = ..., num_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[DeviceRun, _Mapping]]] = ...) -> None: ...

class DeviceRun(_message.Message):
    __slots__ = ("allocation_index", "offset_bytes", "block_stride_bytes", "piece_bytes", "pieces", "piece_stride_bytes")
    ALLOCATION_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PIECE_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    allocation_index: int
    offset_bytes: int
    block_stride_bytes: int
    piece_bytes: int
    pieces: int
    piece_stride_bytes: int
    def __init__(self, allocation_index: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., piece_bytes: _Optional[int] = ..., pieces: _Optional[int] = ..., piece_stride_bytes: _Optional[int] = ...) -> None: ...

class DeviceAfter(_message.Message):
    __slots__ = ("event_index",)
    EVENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    event_index: int
    def __init__(self, event_index: _Optional[int] = ...) -> None: ...
