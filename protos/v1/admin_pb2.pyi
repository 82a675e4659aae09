import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from . import bounds_pb2 as _bounds_pb2
from . import cache_pb2 as _cache_pb2
from . import common_pb2 as _common_pb2
from . import handoff_pb2 as _handoff_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAIN_MODE_UNSPECIFIED: _ClassVar[DrainMode]
    DRAIN_MODE_END: _ClassVar[DrainMode]
    DRAIN_MODE_STAY: _ClassVar[DrainMode]
    DRAIN_MODE_UNDO: _ClassVar[DrainMode]

class LeaseKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_KIND_UNSPECIFIED: _ClassVar[LeaseKind]
    LEASE_KIND_READ: _ClassVar[LeaseKind]
    LEASE_KIND_WRITE: _ClassVar[LeaseKind]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_NEVER_STORED: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_STORE_FAILED: _ClassVar[MissReason]
    MISS_REASON_POLICY: _ClassVar[MissReason]
    MISS_REASON_BELOW_THRESHOLD: _ClassVar[MissReason]
    MISS_REASON_FORMAT_MISMATCH: _ClassVar[MissReason]
    MISS_REASON_EXPIRED: _ClassVar[MissReason]
    MISS_REASON_LOAD_FAILED: _ClassVar[MissReason]
    MISS_REASON_NO_ROOM: _ClassVar[MissReason]
    MISS_REASON_RESET: _ClassVar[MissReason]
    MISS_REASON_PENDING: _ClassVar[MissReason]
    MISS_REASON_DAMAGED: _ClassVar[MissReason]

class HoldEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOLD_END_UNSPECIFIED: _ClassVar[HoldEnd]
    HOLD_END_RELEASED: _ClassVar[HoldEnd]
    HOLD_END_EXPIRED: _ClassVar[HoldEnd]
    HOLD_END_REPLACED: _ClassVar[HoldEnd]
    HOLD_END_RESET: _ClassVar[HoldEnd]

class ClaimOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLAIM_OUTCOME_UNSPECIFIED: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_HELD: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_NOT_HELD: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_EXPIRED: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_OTHER_NAMESPACE: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_PEER_NOT_LISTED: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_NOTHING_HELD: _ClassVar[ClaimOutcome]
DRAIN_MODE_UNSPECIFIED: DrainMode
DRAIN_MODE_END: DrainMode
DRAIN_MODE_STAY: DrainMode
DRAIN_MODE_UNDO: DrainMode
LEASE_KIND_UNSPECIFIED: LeaseKind
LEASE_KIND_READ: LeaseKind
LEASE_KIND_WRITE: LeaseKind
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_NEVER_STORED: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_STORE_FAILED: MissReason
MISS_REASON_POLICY: MissReason
MISS_REASON_BELOW_THRESHOLD: MissReason
MISS_REASON_FORMAT_MISMATCH: MissReason
MISS_REASON_EXPIRED: MissReason
MISS_REASON_LOAD_FAILED: MissReason
MISS_REASON_NO_ROOM: MissReason
MISS_REASON_RESET: MissReason
MISS_REASON_PENDING: MissReason
MISS_REASON_DAMAGED: MissReason
HOLD_END_UNSPECIFIED: HoldEnd
HOLD_END_RELEASED: HoldEnd
HOLD_END_EXPIRED: HoldEnd
HOLD_END_REPLACED: HoldEnd
HOLD_END_RESET: HoldEnd
CLAIM_OUTCOME_UNSPECIFIED: ClaimOutcome
CLAIM_OUTCOME_HELD: ClaimOutcome
CLAIM_OUTCOME_NOT_HELD: ClaimOutcome
CLAIM_OUTCOME_EXPIRED: ClaimOutcome
CLAIM_OUTCOME_OTHER_NAMESPACE: ClaimOutcome
CLAIM_OUTCOME_PEER_NOT_LISTED: ClaimOutcome
CLAIM_OUTCOME_NOTHING_HELD: ClaimOutcome

class EvictRequest(_message.Message):
    __slots__ = ("tiers", "tenant", "namespace_id", "unused_for", "max_bytes", "include_retained", "dry_run")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FOR_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_RETAINED_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    namespace_id: bytes
    unused_for: _duration_pb2.Duration
    max_bytes: int
    include_retained: bool
    dry_run: bool
    def __init__(self, tiers: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., unused_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_bytes: _Optional[int] = ..., include_retained: bool = ..., dry_run: bool = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("tiers", "done")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierEviction]
    done: bool
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierEviction, _Mapping]]] = ..., done: bool = ...) -> None: ...

class TierEviction(_message.Message):
    __slots__ = ("tier", "blocks", "bytes", "kept_blocks", "kept_bytes", "looked_at", "total")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    tier: str
    blocks: int
    bytes: int
    kept_blocks: int
    kept_bytes: int
    looked_at: int
    total: int
    def __init__(self, tier: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., looked_at: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: DrainMode
    def __init__(self, mode: _Optional[_Union[DrainMode, str]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("stores", "jobs", "queued_bytes", "sessions", "done", "complete")
    STORES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    stores: int
    jobs: int
    queued_bytes: int
    sessions: int
    done: bool
    complete: bool
    def __init__(self, stores: _Optional[int] = ..., jobs: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., done: bool = ..., complete: bool = ...) -> None: ...

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
    __slots__ = ("server_version", "epoch", "uptime", "draining", "tiers", "sessions", "leases", "stores", "quarantined_bytes", "namespaces", "holds", "pid", "protocol_versions", "region", "loop_lag", "lookup_keys", "lookup_misses", "misses", "handoffs", "held_bytes", "downgrades")
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
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_KEYS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_MISSES_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DOWNGRADES_FIELD_NUMBER: _ClassVar[int]
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
    holds: int
    pid: int
    protocol_versions: _containers.RepeatedScalarFieldContainer[int]
    region: RegionStatus
    loop_lag: _duration_pb2.Duration
    lookup_keys: int
    lookup_misses: int
    misses: _containers.RepeatedCompositeFieldContainer[MissCount]
    handoffs: _containers.RepeatedCompositeFieldContainer[HandoffTotals]
    held_bytes: int
    downgrades: _containers.RepeatedCompositeFieldContainer[Downgrade]
    def __init__(self, server_version: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: bool = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., leases: _Optional[int] = ..., stores: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., namespaces: _Optional[int] = ..., holds: _Optional[int] = ..., pid: _Optional[int] = ..., protocol_versions: _Optional[_Iterable[int]] = ..., region: _Optional[_Union[RegionStatus, _Mapping]] = ..., loop_lag: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lookup_keys: _Optional[int] = ..., lookup_misses: _Optional[int] = ..., misses: _Optional[_Iterable[_Union[MissCount, _Mapping]]] = ..., handoffs: _Optional[_Iterable[_Union[HandoffTotals, _Mapping]]] = ..., held_bytes: _Optional[int] = ..., downgrades: _Optional[_Iterable[_Union[Downgrade, _Mapping]]] = ...) -> None: ...

class Downgrade(_message.Message):
    __slots__ = ("feature", "cause", "remedy")
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    feature: str
    cause: str
    remedy: str
    def __init__(self, feature: _Optional[str] = ..., cause: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class RegionStatus(_message.Message):
    __slots__ = ("size_bytes", "backed_bytes", "huge_bytes", "memory_nodes", "misplaced")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HUGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NODES_FIELD_NUMBER: _ClassVar[int]
    MISPLACED_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    backed_bytes: int
    huge_bytes: int
    memory_nodes: _containers.RepeatedScalarFieldContainer[int]
    misplaced: str
    def __init__(self, size_bytes: _Optional[int] = ..., backed_bytes: _Optional[int] = ..., huge_bytes: _Optional[int] = ..., memory_nodes: _Optional[_Iterable[int]] = ..., misplaced: _Optional[str] = ...) -> None: ...

class MissCount(_message.Message):
    __slots__ = ("reason", "keys")
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    reason: MissReason
    keys: int
    def __init__(self, reason: _Optional[_Union[MissReason, str]] = ..., keys: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "type", "capacity_bytes", "available_bytes", "used_bytes", "blocks", "hits", "misses", "evictions", "jobs", "healthy", "trouble", "expired", "not_retained", "shares", "damaged_blocks", "queued_bytes", "dropped_blocks", "declined", "estimates", "stored_bytes", "loaded_bytes", "free_disk_bytes", "shared")
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
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    NOT_RETAINED_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
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
    expired: int
    not_retained: int
    shares: _containers.RepeatedCompositeFieldContainer[ShareStatus]
    damaged_blocks: int
    queued_bytes: int
    dropped_blocks: int
    declined: int
    estimates: _containers.RepeatedCompositeFieldContainer[HitRatioEstimate]
    stored_bytes: int
    loaded_bytes: int
    free_disk_bytes: int
    shared: bool
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., jobs: _Optional[int] = ..., healthy: bool = ..., trouble: _Optional[str] = ..., expired: _Optional[int] = ..., not_retained: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[ShareStatus, _Mapping]]] = ..., damaged_blocks: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., declined: _Optional[int] = ..., estimates: _Optional[_Iterable[_Union[HitRatioEstimate, _Mapping]]] = ..., stored_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., free_disk_bytes: _Optional[int] = ..., shared: bool = ...) -> None: ...

class HitRatioEstimate(_message.Message):
    __slots__ = ("scale", "hit_ratio")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    scale: float
    hit_ratio: float
    def __init__(self, scale: _Optional[float] = ..., hit_ratio: _Optional[float] = ...) -> None: ...

class ShareStatus(_message.Message):
    __slots__ = ("tenant", "quota_bytes", "limit_bytes", "used_bytes", "retained_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quota_bytes: int
    limit_bytes: int
    used_bytes: int
    retained_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., quota_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., retained_bytes: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("client_name", "engine_id", "rank", "pid", "transport", "age", "model", "attached", "groups", "world_size", "tenant", "namespace_id", "leases", "leased_blocks", "stores", "storing_bytes", "idle", "calls")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    STORING_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    engine_id: str
    rank: int
    pid: int
    transport: str
    age: _duration_pb2.Duration
    model: str
    attached: bool
    groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.Group]
    world_size: int
    tenant: str
    namespace_id: bytes
    leases: int
    leased_blocks: int
    stores: int
    storing_bytes: int
    idle: _duration_pb2.Duration
    calls: int
    def __init__(self, client_name: _Optional[str] = ..., engine_id: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., transport: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., model: _Optional[str] = ..., attached: bool = ..., groups: _Optional[_Iterable[_Union[_common_pb2.Group, _Mapping]]] = ..., world_size: _Optional[int] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[bytes] = ..., leases: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., stores: _Optional[int] = ..., storing_bytes: _Optional[int] = ..., idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., calls: _Optional[int] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("max_leases",)
    MAX_LEASES_FIELD_NUMBER: _ClassVar[int]
    max_leases: int
    def __init__(self, max_leases: _Optional[int] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "total")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseStatus]
    total: int
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseStatus, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class LeaseStatus(_message.Message):
    __slots__ = ("lease_id", "kind", "engine_id", "client_name", "pid", "request_id", "age", "remaining", "blocks", "bytes", "pending_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    kind: LeaseKind
    engine_id: str
    client_name: str
    pid: int
    request_id: str
    age: _duration_pb2.Duration
    remaining: _duration_pb2.Duration
    blocks: int
    bytes: int
    pending_blocks: int
    def __init__(self, lease_id: _Optional[int] = ..., kind: _Optional[_Union[LeaseKind, str]] = ..., engine_id: _Optional[str] = ..., client_name: _Optional[str] = ..., pid: _Optional[int] = ..., request_id: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., pending_blocks: _Optional[int] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id", "engine_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engine_id: str
    def __init__(self, request_id: _Optional[str] = ..., engine_id: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("engine_id", "age", "finished", "votes", "policy", "incomplete_blocks", "lookups", "total_lookups", "holds")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    age: _duration_pb2.Duration
    finished: bool
    votes: _containers.RepeatedCompositeFieldContainer[_cache_pb2.TierVote]
    policy: _cache_pb2.OffloadPolicy
    incomplete_blocks: int
    lookups: _containers.RepeatedCompositeFieldContainer[LookupExplained]
    total_lookups: int
    holds: _containers.RepeatedCompositeFieldContainer[HoldExplained]
    def __init__(self, engine_id: _Optional[str] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., finished: bool = ..., votes: _Optional[_Iterable[_Union[_cache_pb2.TierVote, _Mapping]]] = ..., policy: _Optional[_Union[_cache_pb2.OffloadPolicy, str]] = ..., incomplete_blocks: _Optional[int] = ..., lookups: _Optional[_Iterable[_Union[LookupExplained, _Mapping]]] = ..., total_lookups: _Optional[int] = ..., holds: _Optional[_Iterable[_Union[HoldExplained, _Mapping]]] = ...) -> None: ...

class HoldExplained(_message.Message):
    __slots__ = ("age", "direction", "status", "num_tokens", "blocks", "pending_blocks", "claims", "claimed_blocks", "end", "end_age")
    AGE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    END_AGE_FIELD_NUMBER: _ClassVar[int]
    age: _duration_pb2.Duration
    direction: _handoff_pb2.HandoffDirection
    status: _handoff_pb2.PublishStatus
    num_tokens: int
    blocks: int
    pending_blocks: int
    claims: int
    claimed_blocks: int
    end: HoldEnd
    end_age: _duration_pb2.Duration
    def __init__(self, age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., direction: _Optional[_Union[_handoff_pb2.HandoffDirection, str]] = ..., status: _Optional[_Union[_handoff_pb2.PublishStatus, str]] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., pending_blocks: _Optional[int] = ..., claims: _Optional[int] = ..., claimed_blocks: _Optional[int] = ..., end: _Optional[_Union[HoldEnd, str]] = ..., end_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LookupExplained(_message.Message):
    __slots__ = ("age", "spans", "first_missed_key", "hold", "claim_outcome", "unwanted_blocks")
    AGE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FIRST_MISSED_KEY_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    CLAIM_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    age: _duration_pb2.Duration
    spans: _containers.RepeatedCompositeFieldContainer[KeySpan]
    first_missed_key: bytes
    hold: _handoff_pb2.HoldRef
    claim_outcome: ClaimOutcome
    unwanted_blocks: int
    def __init__(self, age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[KeySpan, _Mapping]]] = ..., first_missed_key: _Optional[bytes] = ..., hold: _Optional[_Union[_handoff_pb2.HoldRef, _Mapping]] = ..., claim_outcome: _Optional[_Union[ClaimOutcome, str]] = ..., unwanted_blocks: _Optional[int] = ...) -> None: ...

class KeySpan(_message.Message):
    __slots__ = ("keys", "hit_tier", "miss_reason", "deferred")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HIT_TIER_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    keys: int
    hit_tier: str
    miss_reason: MissReason
    deferred: bool
    def __init__(self, keys: _Optional[int] = ..., hit_tier: _Optional[str] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., deferred: bool = ...) -> None: ...

class ListHandoffsRequest(_message.Message):
    __slots__ = ("max_handoffs",)
    MAX_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    max_handoffs: int
    def __init__(self, max_handoffs: _Optional[int] = ...) -> None: ...

class ListHandoffsResponse(_message.Message):
    __slots__ = ("handoffs", "total", "held_bytes", "totals", "missed_claims")
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    MISSED_CLAIMS_FIELD_NUMBER: _ClassVar[int]
    handoffs: _containers.RepeatedCompositeFieldContainer[HandoffStatus]
    total: int
    held_bytes: int
    totals: _containers.RepeatedCompositeFieldContainer[HandoffTotals]
    missed_claims: _containers.RepeatedCompositeFieldContainer[MissedClaims]
    def __init__(self, handoffs: _Optional[_Iterable[_Union[HandoffStatus, _Mapping]]] = ..., total: _Optional[int] = ..., held_bytes: _Optional[int] = ..., totals: _Optional[_Iterable[_Union[HandoffTotals, _Mapping]]] = ..., missed_claims: _Optional[_Iterable[_Union[MissedClaims, _Mapping]]] = ...) -> None: ...

class MissedClaims(_message.Message):
    __slots__ = ("outcome", "claims")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    outcome: ClaimOutcome
    claims: int
    def __init__(self, outcome: _Optional[_Union[ClaimOutcome, str]] = ..., claims: _Optional[int] = ...) -> None: ...

class HandoffStatus(_message.Message):
    __slots__ = ("engine_id", "request_id", "direction", "tenant", "num_tokens", "blocks", "bytes", "pending_blocks", "claims", "age", "remaining")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    direction: _handoff_pb2.HandoffDirection
    tenant: str
    num_tokens: int
    blocks: int
    bytes: int
    pending_blocks: int
    claims: int
    age: _duration_pb2.Duration
    remaining: _duration_pb2.Duration
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ..., direction: _Optional[_Union[_handoff_pb2.HandoffDirection, str]] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., pending_blocks: _Optional[int] = ..., claims: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HandoffTotals(_message.Message):
    __slots__ = ("direction", "open", "published", "declined", "claimed", "released", "expired", "dropped", "claimed_bytes", "held_time")
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_TIME_FIELD_NUMBER: _ClassVar[int]
    direction: _handoff_pb2.HandoffDirection
    open: int
    published: int
    declined: int
    claimed: int
    released: int
    expired: int
    dropped: int
    claimed_bytes: int
    held_time: _duration_pb2.Duration
    def __init__(self, direction: _Optional[_Union[_handoff_pb2.HandoffDirection, str]] = ..., open: _Optional[int] = ..., published: _Optional[int] = ..., declined: _Optional[int] = ..., claimed: _Optional[int] = ..., released: _Optional[int] = ..., expired: _Optional[int] = ..., dropped: _Optional[int] = ..., claimed_bytes: _Optional[int] = ..., held_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
