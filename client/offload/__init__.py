"""What an engine's scheduler offloads, when, and what it waits for: decided here once, for every engine.

``core`` is the door: a state machine that engines' adapters feed with events and whose plans their workers carry out. It knows
neither an engine nor kvtier's client; ``engine`` says what it asks of both. Behind the door: ``loads`` (with ``hits`` and
``reads``: what a request may load), ``saves`` (what is stored when it is full, and what is in flight) and ``lazy`` (what is stored
when it is about to be evicted).
"""

from .core import Computed, OffloadCore
from .loads import Found, Place, Question, search
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
    Mode,
    OffloadOptions,
    OffloadServer,
    SaveJob,
    StepPlan,
)
from .saves import EndedSave

__all__ = [
    "BlockPool",
    "BlockRead",
    "BlockTables",
    "CacheGeometry",
    "CacheGroup",
    "CacheGroupKind",
    "Computed",
    "EndedSave",
    "EngineRequest",
    "Found",
    "FreeBlock",
    "LoadJob",
    "LookupId",
    "Mode",
    "OffloadCore",
    "OffloadOptions",
    "OffloadServer",
    "Place",
    "Question",
    "SaveJob",
    "StepPlan",
    "search",
]
