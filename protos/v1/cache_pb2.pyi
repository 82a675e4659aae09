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

class OffloadPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFFLOAD_POLICY_UNSPECIFIED: _ClassVar[OffloadPolicy]
    OFFLOAD_POLICY_BLOCK_LEVEL: _ClassVar[OffloadPolicy]
    OFFLOAD_POLICY_REQUEST_LEVEL: _ClassVar[OffloadPolicy]

class LookupMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_MODE_UNSPECIFIED: _ClassVar[LookupMode]
    LOOKUP_MODE_PREFIX: _ClassVar[LookupMode]
    LOOKUP_MODE_EACH: _ClassVar[LookupMode]

class SourceOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_OUTCOME_UNSPECIFIED: _ClassVar[SourceOutcome]
    SOURCE_OUTCOME_FOUND: _ClassVar[SourceOutcome]
    SOURCE_OUTCOME_ABSENT: _ClassVar[SourceOutcome]
    SOURCE_OUTCOME_NOT_NEEDED: _ClassVar[SourceOutcome]
    SOURCE_OUTCOME_NOT_LISTED: _ClassVar[SourceOutcome]
    SOURCE_OUTCOME_UNREACHABLE: _ClassVar[SourceOutcome]
    SOURCE_OUTCOME_REFUSED: _ClassVar[SourceOutcome]
    SOURCE_OUTCOME_BUSY: _ClassVar[SourceOutcome]

class TierMedium(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_MEDIUM_UNSPECIFIED: _ClassVar[TierMedium]
    TIER_MEDIUM_MEMORY: _ClassVar[TierMedium]
    TIER_MEDIUM_DISK: _ClassVar[TierMedium]
    TIER_MEDIUM_NETWORK: _ClassVar[TierMedium]
OFFLOAD_POLICY_UNSPECIFIED: OffloadPolicy
OFFLOAD_POLICY_BLOCK_LEVEL: OffloadPolicy
OFFLOAD_POLICY_REQUEST_LEVEL: OffloadPolicy
LOOKUP_MODE_UNSPECIFIED: LookupMode
LOOKUP_MODE_PREFIX: LookupMode
LOOKUP_MODE_EACH: LookupMode
SOURCE_OUTCOME_UNSPECIFIED: SourceOutcome
SOURCE_OUTCOME_FOUND: SourceOutcome
SOURCE_OUTCOME_ABSENT: SourceOutcome
SOURCE_OUTCOME_NOT_NEEDED: SourceOutcome
SOURCE_OUTCOME_NOT_LISTED: SourceOutcome
SOURCE_OUTCOME_UNREACHABLE: SourceOutcome
SOURCE_OUTCOME_REFUSED: SourceOutcome
SOURCE_OUTCOME_BUSY: SourceOutcome
TIER_MEDIUM_UNSPECIFIED: TierMedium
TIER_MEDIUM_MEMORY: TierMedium
TIER_MEDIUM_DISK: TierMedium
TIER_MEDIUM_NETWORK: TierMedium

class BeginRequestRequest(_message.Message):
    __slots__ = ("session", "request_id", "keys", "mode", "prompt_tokens", "kv_transfer_params_json", "lease_duration", "wait", "priority", "exclude", "min_hits", "retain_for", "source", "conversation_id", "grant_id", "want_slots")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    MIN_HITS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    WANT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    request_id: str
    keys: _common_pb2.PackedKeys
    mode: LookupMode
    prompt_tokens: int
    kv_transfer_params_json: str
    lease_duration: _duration_pb2.Duration
    wait: _duration_pb2.Duration
    priority: int
    exclude: TierFilter
    min_hits: int
    retain_for: _duration_pb2.Duration
    source: str
    conversation_id: str
    grant_id: int
    want_slots: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., request_id: _Optional[str] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., mode: _Optional[_Union[LookupMode, str]] = ..., prompt_tokens: _Optional[int] = ..., kv_transfer_params_json: _Optional[str] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., exclude: _Optional[_Union[TierFilter, _Mapping]] = ..., min_hits: _Optional[int] = ..., retain_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., source: _Optional[str] = ..., conversation_id: _Optional[str] = ..., grant_id: _Optional[int] = ..., want_slots: bool = ...) -> None: ...

class TierFilter(_message.Message):
    __slots__ = ("names", "media", "remote")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    media: _containers.RepeatedScalarFieldContainer[TierMedium]
    remote: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., media: _Optional[_Iterable[_Union[TierMedium, str]]] = ..., remote: bool = ...) -> None: ...

class TierVote(_message.Message):
    __slots__ = ("tier", "policy", "why")
    TIER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    tier: str
    policy: OffloadPolicy
    why: str
    def __init__(self, tier: _Optional[str] = ..., policy: _Optional[_Union[OffloadPolicy, str]] = ..., why: _Optional[str] = ...) -> None: ...

class BeginRequestResponse(_message.Message):
    __slots__ = ("policy", "votes", "lookup")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    policy: OffloadPolicy
    votes: _containers.RepeatedCompositeFieldContainer[TierVote]
    lookup: LookupResponse
    def __init__(self, policy: _Optional[_Union[OffloadPolicy, str]] = ..., votes: _Optional[_Iterable[_Union[TierVote, _Mapping]]] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session", "request_id", "keys", "mode", "lease_duration", "wait", "want_slots", "exclude", "min_hits", "retain_for", "source", "grant_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    WANT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    MIN_HITS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    request_id: str
    keys: _common_pb2.PackedKeys
    mode: LookupMode
    lease_duration: _duration_pb2.Duration
    wait: _duration_pb2.Duration
    want_slots: bool
    exclude: TierFilter
    min_hits: int
    retain_for: _duration_pb2.Duration
    source: str
    grant_id: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., request_id: _Optional[str] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., mode: _Optional[_Union[LookupMode, str]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., want_slots: bool = ..., exclude: _Optional[_Union[TierFilter, _Mapping]] = ..., min_hits: _Optional[int] = ..., retain_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., source: _Optional[str] = ..., grant_id: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("statuses", "prefix_hits", "sources", "lease_id", "slot_offsets", "not_retained_blocks", "source_outcome")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NOT_RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    prefix_hits: int
    sources: bytes
    lease_id: int
    slot_offsets: bytes
    not_retained_blocks: int
    source_outcome: SourceOutcome
    def __init__(self, statuses: _Optional[bytes] = ..., prefix_hits: _Optional[int] = ..., sources: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., slot_offsets: _Optional[bytes] = ..., not_retained_blocks: _Optional[int] = ..., source_outcome: _Optional[_Union[SourceOutcome, str]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session", "request_id", "keys", "wait", "exclude", "retain_for", "source")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    request_id: str
    keys: _common_pb2.PackedKeys
    wait: _duration_pb2.Duration
    exclude: TierFilter
    retain_for: _duration_pb2.Duration
    source: str
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., request_id: _Optional[str] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., exclude: _Optional[_Union[TierFilter, _Mapping]] = ..., retain_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., source: _Optional[str] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("present_blocks", "started_blocks", "missing_blocks", "no_room_blocks", "unanswered_blocks", "not_retained_blocks", "source_outcome")
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STARTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NOT_RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    present_blocks: int
    started_blocks: int
    missing_blocks: int
    no_room_blocks: int
    unanswered_blocks: int
    not_retained_blocks: int
    source_outcome: SourceOutcome
    def __init__(self, present_blocks: _Optional[int] = ..., started_blocks: _Optional[int] = ..., missing_blocks: _Optional[int] = ..., no_room_blocks: _Optional[int] = ..., unanswered_blocks: _Optional[int] = ..., not_retained_blocks: _Optional[int] = ..., source_outcome: _Optional[_Union[SourceOutcome, str]] = ...) -> None: ...

class PrepareLoadRequest(_message.Message):
    __slots__ = ("session", "lease_id", "items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    lease_id: int
    items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., lease_id: _Optional[int] = ..., items: _Optional[_Iterable[int]] = ...) -> None: ...

class PrepareLoadResponse(_message.Message):
    __slots__ = ("slot_offsets", "part_sizes_bytes")
    SLOT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PART_SIZES_BYTES_FIELD_NUMBER: _ClassVar[int]
    slot_offsets: bytes
    part_sizes_bytes: bytes
    def __init__(self, slot_offsets: _Optional[bytes] = ..., part_sizes_bytes: _Optional[bytes] = ...) -> None: ...

class CompleteLoadRequest(_message.Message):
    __slots__ = ("session", "lease_id", "release", "copied_bytes", "damaged_items", "wrong_items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    WRONG_ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    lease_id: int
    release: bool
    copied_bytes: int
    damaged_items: _containers.RepeatedScalarFieldContainer[int]
    wrong_items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., lease_id: _Optional[int] = ..., release: bool = ..., copied_bytes: _Optional[int] = ..., damaged_items: _Optional[_Iterable[int]] = ..., wrong_items: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteLoadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("session", "lease_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("session", "lease_ids", "lease_duration")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_duration: _duration_pb2.Duration
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., lease_ids: _Optional[_Iterable[int]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ("missing_lease_ids",)
    MISSING_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    missing_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, missing_lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrepareStoreRequest(_message.Message):
    __slots__ = ("session", "request_id", "keys", "retain_for", "grant_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FOR_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    request_id: str
    keys: _common_pb2.PackedKeys
    retain_for: _duration_pb2.Duration
    grant_id: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., request_id: _Optional[str] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., retain_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., grant_id: _Optional[int] = ...) -> None: ...

class PrepareStoreResponse(_message.Message):
    __slots__ = ("store_id", "statuses", "slot_offsets", "not_retained_blocks")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    SLOT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NOT_RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    store_id: int
    statuses: bytes
    slot_offsets: bytes
    not_retained_blocks: int
    def __init__(self, store_id: _Optional[int] = ..., statuses: _Optional[bytes] = ..., slot_offsets: _Optional[bytes] = ..., not_retained_blocks: _Optional[int] = ...) -> None: ...

class CompleteStoreRequest(_message.Message):
    __slots__ = ("session", "store_id", "failed_items")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    store_id: int
    failed_items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., store_id: _Optional[int] = ..., failed_items: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteStoreResponse(_message.Message):
    __slots__ = ("failed_items",)
    FAILED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    failed_items: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, failed_items: _Optional[_Iterable[int]] = ...) -> None: ...

class WithdrawGrantsRequest(_message.Message):
    __slots__ = ("session", "grant_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_IDS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    grant_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., grant_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WithdrawGrantsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("session", "keys", "wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    keys: _common_pb2.PackedKeys
    wait: _duration_pb2.Duration
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., keys: _Optional[_Union[_common_pb2.PackedKeys, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    def __init__(self, statuses: _Optional[bytes] = ...) -> None: ...

class FinishRequestRequest(_message.Message):
    __slots__ = ("session", "request_id", "wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    request_id: str
    wait: _duration_pb2.Duration
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., request_id: _Optional[str] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FinishRequestResponse(_message.Message):
    __slots__ = ("settled", "incomplete_blocks")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    settled: bool
    incomplete_blocks: int
    def __init__(self, settled: bool = ..., incomplete_blocks: _Optional[int] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session", "wait", "retire")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionRef
    wait: _duration_pb2.Duration
    retire: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionRef, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., retire: bool = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("pending_blocks",)
    PENDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pending_blocks: int
    def __init__(self, pending_blocks: _Optional[int] = ...) -> None: ...
