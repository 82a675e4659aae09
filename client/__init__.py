"""The client of kvtier: find blocks, read them, write them, from sync code or from asyncio."""

from .aio import AsyncClient, AsyncLease
from .errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KVTierError,
    LeaseLost,
    LimitExceeded,
    NotConnected,
    NotOwner,
    ServerError,
    SessionLost,
    Unavailable,
)
from .namespace import Group, GroupKind, Namespace, make_key
from .results import (
    DurableStatus,
    KeyStatus,
    LookupResult,
    Medium,
    OffloadPolicy,
    ReadBatch,
    RequestOutcome,
    StoreStatus,
    TierFilter,
    TierVote,
    WriteBatch,
)
from .sync import Client, Lease
from .timeouts import Timeouts

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "ChecksumMismatch",
    "Client",
    "DeadlineExceeded",
    "Draining",
    "DurableStatus",
    "Group",
    "GroupKind",
    "InvalidRequest",
    "KVTierError",
    "KeyStatus",
    "Lease",
    "LeaseLost",
    "LimitExceeded",
    "LookupResult",
    "Medium",
    "Namespace",
    "NotConnected",
    "NotOwner",
    "OffloadPolicy",
    "ReadBatch",
    "RequestOutcome",
    "ServerError",
    "SessionLost",
    "StoreStatus",
    "TierFilter",
    "TierVote",
    "Timeouts",
    "Unavailable",
    "WriteBatch",
    "make_key",
]
