import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FsckRequest(_message.Message):
    __slots__ = ("repair", "tiers", "max_rate_bytes")
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    repair: bool
    tiers: _containers.RepeatedScalarFieldContainer[str]
    max_rate_bytes: int
    def __init__(self, repair: bool = ..., tiers: _Optional[_Iterable[str]] = ..., max_rate_bytes: _Optional[int] = ...) -> None: ...

class FsckResponse(_message.Message):
    __slots__ = ("tier", "tier_type", "blocks", "checked_bytes", "total_blocks", "findings", "done", "note", "error")
    TIER_FIELD_NUMBER: _ClassVar[int]
    TIER_TYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    tier: str
    tier_type: str
    blocks: int
    checked_bytes: int
    total_blocks: int
    findings: _containers.RepeatedCompositeFieldContainer[FsckFinding]
    done: bool
    note: str
    error: str
    def __init__(self, tier: _Optional[str] = ..., tier_type: _Optional[str] = ..., blocks: _Optional[int] = ..., checked_bytes: _Optional[int] = ..., total_blocks: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[FsckFinding, _Mapping]]] = ..., done: bool = ..., note: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class FsckFinding(_message.Message):
    __slots__ = ("namespace_id", "key", "size_bytes", "problem", "repaired")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key: bytes
    size_bytes: int
    problem: str
    repaired: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., problem: _Optional[str] = ..., repaired: bool = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("server_version", "epoch", "uptime", "draining", "tiers", "sessions", "leases", "stores", "quarantined_bytes", "namespaces")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    epoch: int
    uptime: _duration_pb2.Duration
    draining: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    leases: int
    stores: int
    quarantined_bytes: int
    namespaces: int
    def __init__(self, server_version: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: bool = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., leases: _Optional[int] = ..., stores: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., namespaces: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "type", "capacity_bytes", "available_bytes", "used_bytes", "blocks", "hits", "misses", "evictions", "jobs", "healthy", "trouble", "damaged_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    capacity_bytes: int
    available_bytes: int
    used_bytes: int
    blocks: int
    hits: int
    misses: int
    evictions: int
    jobs: int
    healthy: bool
    trouble: str
    damaged_blocks: int
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., jobs: _Optional[int] = ..., healthy: bool = ..., trouble: _Optional[str] = ..., damaged_blocks: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("client_name", "engine_id", "rank", "pid", "transport", "age", "model", "attached")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    engine_id: str
    rank: int
    pid: int
    transport: str
    age: _duration_pb2.Duration
    model: str
    attached: bool
    def __init__(self, client_name: _Optional[str] = ..., engine_id: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., transport: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., model: _Optional[str] = ..., attached: bool = ...) -> None: ...
