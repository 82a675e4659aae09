"""Interfaces of the offload core to the engine and the server, its jobs and its options.

All methods are called on the scheduler's thread. They must not block, and must not raise because a
server failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType, Protocol, TypeAlias

__all__ = [
    "Backoff",
    "BlockPool",
    "BlockRead",
    "BlockTables",
    "CacheGeometry",
    "CacheGroup",
    "CacheGroupKind",
    "EngineRequest",
    "FreeBlock",
    "LoadJob",
    "LookupId",
    "OffloadMode",
    "OffloadOptions",
    "OffloadServer",
    "SaveJob",
    "StepPlan",
]

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""Block ids of a request, or ``null_block``: ``tables[group.index][position]``."""

LookupId = NewType("LookupId", int)

_STATE_BLOCKS_PER_STEP = 2
_MIN_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0


# ---- cache geometry


class CacheGroupKind(Enum):
    """Part of a prefix that a group's layers read: all, the last tokens, or the final state."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class CacheGroup:
    """One KV cache group.

    ``retained_tokens``: tokens before a hit's end that it needs; None for full attention.
    ``page_bytes[i]``: bytes of one block of ``layers[i]`` on one rank, without padding.
    ``formats[i]``: data format of these bytes, if known.
    ``is_state``: a recurrent state (Mamba, for example), updated in place. A hit needs only the
    block that ends with it, and a block has the state at its end only if a step ended there.
    """

    index: int
    block_tokens: int
    retained_tokens: int | None
    layers: tuple[str, ...] = ()
    page_bytes: tuple[int, ...] = ()
    formats: tuple[str, ...] = ()
    is_state: bool = False

    @property
    def kind(self) -> CacheGroupKind:
        if self.is_state:
            return CacheGroupKind.STATE
        return CacheGroupKind.FULL if self.retained_tokens is None else CacheGroupKind.WINDOW

    @property
    def name(self) -> str:
        """Readable name, with the window size. It is part of the namespace."""
        kind = f"window_{self.retained_tokens}" if self.kind is CacheGroupKind.WINDOW else self.kind.value
        return f"{kind}.{self.index}"

    @property
    def part_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return sum(self.page_bytes)

    def first_needed_block(self, hit_tokens: int) -> int:
        """The first block position that a hit of ``hit_tokens`` needs."""
        if self.is_state:
            return max(0, hit_tokens - 1) // self.block_tokens
        if self.retained_tokens is None:
            return 0
        return max(0, hit_tokens - self.retained_tokens) // self.block_tokens

    def blocks_per_step(self, batched_tokens: int) -> int:
        """Most blocks of this group that a step of ``batched_tokens`` may allocate (B4.7)."""
        if self.is_state:
            return _STATE_BLOCKS_PER_STEP
        if self.retained_tokens is None:
            return -(-batched_tokens // self.block_tokens)
        return -(-(self.retained_tokens + 1) // self.block_tokens) + 1


@dataclass(frozen=True)
class CacheGeometry:
    """Cache groups and block sizes.

    ``step_tokens``: block size of the scheduler; hits are multiples of it.
    ``hash_tokens``: tokens covered by one of the engine's hashes.
    ``drop_last_block``: the engine recomputes the last block of a hit.
    ``null_block``: the block id that stands for "no block".
    """

    groups: tuple[CacheGroup, ...]
    step_tokens: int
    hash_tokens: int
    drop_last_block: bool = False
    null_block: int = 0

    @property
    def leading_group(self) -> CacheGroup:
        """The group that stands for all tokens in estimates and counts: full attention if any."""
        return next((group for group in self.groups if group.kind is CacheGroupKind.FULL), self.groups[0])


# ---- what the adapter of an engine implements


class EngineRequest(Protocol):
    """One request, from its arrival to its end. Properties return current values."""

    @property
    def request_id(self) -> str:
        """The engine's id, as in the events; unique among the requests that have not ended."""
        ...

    @property
    def server_name(self) -> str:
        """The id that the server uses. It differs if the engine's id is too long for the server."""
        ...

    @property
    def total_tokens(self) -> int:
        """Prompt tokens and generated tokens so far."""
        ...

    @property
    def may_load(self) -> bool:
        """Whether the request may use stored blocks; read each time it is matched."""
        ...

    @property
    def may_save(self) -> bool: ...

    @property
    def request_level(self) -> bool:
        """Whether a tier asks for every block of the request, loaded blocks included (B1.1)."""
        ...

    def final_blocks(self, group: CacheGroup) -> int:
        """How many blocks of ``group`` have a key: those without draft tokens (B4.6)."""
        ...

    def key(self, group: CacheGroup, position: int) -> bytes:
        """Key of a block in the store; ``position`` is below ``final_blocks(group)``."""
        ...


class FreeBlock(NamedTuple):
    """A block without references; ``key`` is None if its content cannot be stored."""

    block_id: int
    group_index: int
    key: bytes | None


class BlockPool(Protocol):
    """The engine's blocks and their reference counts; a free block may be overwritten."""

    @property
    def num_blocks(self) -> int: ...

    def hold(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each block."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes it. Blocks that become free are evicted in this order, after all cached ones."""

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        """Removes it. Blocks that become free are evicted in this order, before all cached ones.

        Only blocks of ``behind`` that are in a row at the eviction end are evicted earlier.
        """

    def references(self, block_id: int) -> int:
        """Reference count of a block."""
        ...

    def cached_key(self, block_id: int) -> bytes | None:
        """Key of the block in the engine's prefix cache at the end of this step, if any."""

    def free_block(self, block_id: int) -> FreeBlock | None:
        """The block if it has no reference."""

    def free_blocks(self) -> Iterator[FreeBlock]:
        """The free blocks in eviction order."""
        ...


class OffloadServer(Protocol):
    """Sends the core's requests to the server. Results arrive later, as events."""

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        """Looks up and pins the stored blocks of tokens [``start``, ``limit``) (B4.3).

        ``OffloadCore.lookup_ended`` answers it. Returns False if no server is connected: a miss.
        """
        ...

    def drop_lookup(self, lookup: LookupId) -> None:
        """Unpins the blocks of a lookup, finished or not. The core expects no result."""

    def give_up_lookup(self, lookup: LookupId) -> None:
        """As ``drop_lookup``, after the lookup timed out."""

    def end_request(self, request: EngineRequest) -> None:
        """Ends the request at the server after its last store (B3.12). Called once per request."""

    def empty(self) -> None:
        """Empties the primary tier. ``OffloadCore.emptied`` answers the last call."""


# ---- jobs of the workers


@dataclass
class BlockRead:
    """Blocks to load: key ``indices[i]`` of the lease goes to ``block_ids[i]`` of ``groups[i]``.

    ``endpoint``: the server that granted the lease; empty for the engine's own server.
    """

    lease_id: int
    indices: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    endpoint: str = ""

    def add(self, index: int, group_index: int, block_id: int) -> None:
        self.indices.append(index)
        self.groups.append(group_index)
        self.block_ids.append(block_id)


@dataclass
class LoadJob:
    """Load of one request. Workers report a job without ``reads`` as failed at once."""

    request_id: str
    reads: list[BlockRead] = field(default_factory=list)


@dataclass
class SaveJob:
    """Blocks to store together. The core holds them until every worker has reported ``job_id``.

    ``request_id`` is the server's; empty for blocks that belong to no request (lazy mode).
    """

    job_id: int
    request_id: str
    keys: list[bytes] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    def add(self, key: bytes, group_index: int, block_id: int) -> None:
        self.keys.append(key)
        self.groups.append(group_index)
        self.block_ids.append(block_id)


@dataclass
class StepPlan:
    """Jobs of one step. Each is reported on its own.

    Loads wait for the compute that may read the blocks' old content, saves for the compute that
    writes them: one event for all loads and one for all saves (B4.4, B4.11).
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


# ---- options


class OffloadMode(Enum):
    """EAGER stores a block once it is full (B4.6); LAZY before the engine evicts it (B4.7)."""

    EAGER = "eager"
    LAZY = "lazy"


@dataclass(frozen=True)
class OffloadOptions:
    """Settings of the core; all times in seconds.

    ``lookup_timeout_s``: longest wait of a request for its lookup; then the engine computes it.
    ``hit_lifetime_s``: a hit not loaded within this time is looked up again, before its lease ends.
    ``max_held_fraction``: largest share of the engine's blocks that saves in flight may hold.
    ``save_lost_after_s``: after this time without a report a save is lost. By then workers must
    have stopped reading its blocks, and must not publish what they read (B5.6).
    ``batched_tokens``: most tokens that one step computes; the look-ahead of lazy mode.
    """

    mode: OffloadMode = OffloadMode.EAGER
    lookup_timeout_s: float = 1.0
    hit_lifetime_s: float = 10.0
    max_held_fraction: float = 0.5
    save_lost_after_s: float = 600.0
    batched_tokens: int = 0


@dataclass
class Backoff:
    """Growing intervals between attempts to store in a full server, in seconds."""

    interval_s: float = _MIN_BACKOFF_S
    until: float = 0.0

    def is_over(self, now: float) -> bool:
        return now >= self.until

    def start(self, now: float) -> None:
        """A store was refused: waits one interval."""
        self.until = now + self.interval_s

    def grow(self, now: float) -> None:
        """A store is tried again: doubles the interval and waits."""
        self.interval_s = min(2 * self.interval_s, _MAX_BACKOFF_S)
        self.until = now + self.interval_s

    def reset(self) -> None:
        """A store was accepted."""
        self.interval_s, self.until = _MIN_BACKOFF_S, 0.0
