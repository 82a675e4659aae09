"""Engine-independent offloading: which KV blocks a scheduler loads and saves, and when.

``core`` is the state machine that engine adapters drive; it uses ``loads``, ``saves`` and ``lazy``.
``model`` defines the interfaces through which the core uses the engine and the server. References
such as (B4.3) cite docs/behaviour.md.
"""

from .core import OffloadCore, ScheduledRequest
from .loads import BlockPosition, PrefixHit, PresenceQuery, search_hit
from .model import (
    BlockPool,
    BlockRead,
    BlockTables,
    CacheGeometry,
    CacheGroup,
    CacheGroupKind,
    EngineRequest,
    FreeBlock,
    LoadJob,
    LookupId,
    OffloadMode,
    OffloadOptions,
    OffloadServer,
    SaveJob,
    StepPlan,
)
from .saves import EndedSave

__all__ = [
    "BlockPool",
    "BlockPosition",
    "BlockRead",
    "BlockTables",
    "CacheGeometry",
    "CacheGroup",
    "CacheGroupKind",
    "EndedSave",
    "EngineRequest",
    "FreeBlock",
    "LoadJob",
    "LookupId",
    "OffloadCore",
    "OffloadMode",
    "OffloadOptions",
    "OffloadServer",
    "PrefixHit",
    "PresenceQuery",
    "SaveJob",
    "ScheduledRequest",
    "StepPlan",
    "search_hit",
]
