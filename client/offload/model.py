"""Interfaces through which the offload core uses engine and server; jobs and options of the core.

The core calls all methods of the interfaces on the scheduler's thread. The methods must not block,
and must not raise if a server fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias

__all__ = [
    "BlockPool",
    "BlockRead",
    "BlockTables",
    "CacheGeometry",
    "CacheGroup",
    "CacheGroupKind",
    "ContentOf",
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
"""``tables[group.index][position]`` is the id of a request's block, or ``null_block``."""

LookupId = NewType("LookupId", int)

_STATE_BLOCKS_PER_STEP = 2


# ---- cache geometry


class CacheGroupKind(Enum):
    """Which part of a prefix the layers of a group read.

    FULL: all tokens. WINDOW: the last tokens. STATE: only the state after the last token.
    """

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class CacheGroup:
    """One KV cache group.

    ``retained_tokens``: a hit needs only the blocks of its last ``retained_tokens`` tokens; None
    (full attention) if a hit needs all blocks.
    ``page_bytes[i]``: bytes of one block of ``layers[i]`` on one rank, without padding.
    ``formats[i]``: data format of these bytes, if known.
    ``is_state``: the layers have a recurrent state (for example Mamba) that they update in place. A
    hit needs only its last block. A block contains the state after its last token only if an engine
    step ended exactly at this token.
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
        """Readable name, with the window size. The name is part of the namespace."""
        kind = f"window_{self.retained_tokens}" if self.kind is CacheGroupKind.WINDOW else self.kind.value
        return f"{kind}.{self.index}"

    @property
    def part_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return sum(self.page_bytes)

    def first_needed_block(self, hit_tokens: int) -> int:
        if self.is_state:
            return max(0, hit_tokens - 1) // self.block_tokens
        if self.retained_tokens is None:
            return 0
        return max(0, hit_tokens - self.retained_tokens) // self.block_tokens

    def blocks_per_step(self, batched_tokens: int) -> int:
        """Maximum number of blocks of this group that a step allocates (B4.7)."""
        if self.is_state:
            return _STATE_BLOCKS_PER_STEP
        if self.retained_tokens is None:
            return -(-batched_tokens // self.block_tokens)
        return -(-(self.retained_tokens + 1) // self.block_tokens) + 1


@dataclass(frozen=True)
class CacheGeometry:
    """Cache groups and block sizes.

    ``step_tokens``: block size of the scheduler; the length of a hit is a multiple of it.
    ``hash_tokens``: number of tokens that one of the engine's block hashes covers.
    ``drop_last_block``: whether the engine recomputes the last block of each hit.
    ``null_block``: the block id that stands for "no block".
    """

    groups: tuple[CacheGroup, ...]
    step_tokens: int
    hash_tokens: int
    drop_last_block: bool = False
    null_block: int = 0

    @property
    def leading_group(self) -> CacheGroup:
        """The group by whose blocks tokens are counted: the first full-attention group, if any."""
        return next((group for group in self.groups if group.kind is CacheGroupKind.FULL), self.groups[0])


# ---- what the adapter of an engine implements


class EngineRequest(Protocol):
    """One request, from its arrival to its end. Properties return current values."""

    @property
    def request_id(self) -> str:
        """The engine's id of the request, unique among unfinished requests.

        The adapter uses the same id when it calls the core.
        """
        ...

    @property
    def server_name(self) -> str:
        """The request's id at the server: ``request_id``, shortened if the server requires it."""
        ...

    @property
    def total_tokens(self) -> int:
        """Prompt tokens and generated tokens so far."""
        ...

    @property
    def may_load(self) -> bool:
        """Whether the request may use stored blocks. The core asks before each lookup."""
        ...

    @property
    def may_save(self) -> bool: ...

    @property
    def request_level(self) -> bool:
        """Whether a tier must receive every block of the request, also loaded blocks (B1.1)."""
        ...

    def final_blocks(self, group: CacheGroup) -> int:
        """Number of leading full blocks without draft tokens (B4.6). Only these have a key."""
        ...

    def key(self, group: CacheGroup, position: int) -> bytes:
        """Key under which the server stores the block; ``position < final_blocks(group)``."""
        ...


ContentOf: TypeAlias = Callable[[Any, CacheGroup, int], Any]
"""Returns what the server is told about a block, besides its bytes: `(request, group, position)`.

Returns None to tell nothing. It returns None for all blocks of a request, or for none of them.
"""


class FreeBlock(NamedTuple):
    """An engine block and the key to store it under; ``key`` is None if it cannot be stored."""

    block_id: int
    group_index: int
    key: bytes | None


class BlockPool(Protocol):
    """The engine's blocks and their reference counts.

    A block without a reference is free: the engine may evict its content and overwrite it.
    """

    @property
    def num_blocks(self) -> int: ...

    def hold(self, block_ids: Sequence[int]) -> None:
        """Adds one reference to each block."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Removes one reference from each block.

        Blocks with content that become free are put at the end of the eviction order, in the order
        of ``block_ids``.
        """

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        """Removes one reference from each block.

        Blocks that become free are put near the head of the eviction order, in the order of
        ``block_ids``: before the free blocks with content, but behind the blocks in ``behind`` that
        are already at the head.
        """

    def references(self, block_id: int) -> int: ...

    def cached_key(self, block_id: int) -> bytes | None:
        """Key under which the engine's prefix cache will have the block after this step, if any."""

    def free_block(self, block_id: int) -> FreeBlock | None:
        """The block; None if the block has a reference."""

    def free_blocks(self) -> Iterator[FreeBlock]:
        """The free blocks in eviction order."""
        ...


class OffloadServer(Protocol):
    """Sends the core's requests to the server. The adapter reports results by calling the core."""

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        """Looks up and pins the stored blocks of tokens [``start``, ``limit``) (B4.3).

        The adapter passes the result to ``OffloadCore.lookup_ended``. Returns False if no server is
        connected; the core then treats the lookup as a miss.
        """
        ...

    def drop_lookup(self, lookup: LookupId) -> None:
        """Cancels a lookup: the adapter reports no result and unpins the blocks that it found."""

    def abandon_lookup(self, lookup: LookupId) -> None:
        """Cancels a lookup that timed out, in the same way as ``drop_lookup``."""

    def end_request(self, request: EngineRequest) -> None:
        """Ends the request at the server (B3.12).

        The core calls this once per request, after the last store of the request has ended.
        """

    def empty(self) -> None:
        """Asks the server to empty the CPU tier; does not wait.

        When the server has done so, the adapter calls ``OffloadCore.emptied``. If calls overlap,
        the adapter calls ``emptied`` only once, when the server has done the last of them.
        """


# ---- jobs of the workers


@dataclass
class BlockRead:
    """Blocks to load from one lease.

    Workers copy key ``indices[i]`` of the lease into block ``block_ids[i]`` of group ``groups[i]``.
    ``endpoint``: the server that granted the lease; empty for the engine's own server.
    ``slots``: see ``PrefixHit.slots``; None if workers ask the server.
    """

    lease_id: int
    indices: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    endpoint: str = ""
    slots: Any = None

    def add(self, index: int, group_index: int, block_id: int) -> None:
        self.indices.append(index)
        self.groups.append(group_index)
        self.block_ids.append(block_id)


@dataclass
class LoadJob:
    """Load of one request. If ``reads`` is empty, workers report the job as failed.

    ``is_last``: False if further jobs of this load follow. Workers report a load once: when all of
    its jobs up to the last one have ended. The load has failed if one of its jobs has failed. A job
    that is not the last may have no reads; it does not fail.
    """

    request_id: str
    reads: list[BlockRead] = field(default_factory=list)
    is_last: bool = True

    @property
    def num_blocks(self) -> int:
        return sum(len(read.block_ids) for read in self.reads)


@dataclass
class SaveJob:
    """Blocks to store together.

    The core holds a reference to each block until every worker has reported ``job_id``, or the job
    has expired. ``request_id``: the request's ``server_name``; empty in lazy mode and for blocks
    that a peer will pull. ``contents``: what ``ContentOf`` returned for each block; may be empty.
    ``audits``: indices of the keys of which workers compare the block with the stored one.
    """

    job_id: int
    request_id: str
    keys: list[bytes] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    contents: list[Any] = field(default_factory=list)
    audits: list[int] = field(default_factory=list)

    def add(self, key: bytes, group_index: int, block_id: int) -> None:
        self.keys.append(key)
        self.groups.append(group_index)
        self.block_ids.append(block_id)


@dataclass
class StepPlan:
    """Jobs of one step. Workers report each job separately.

    Workers start the loads after the compute that may still read the old content of the blocks, and
    the saves after the compute that writes the blocks. A worker needs one device event for all
    loads of a step, and one for all saves (B4.4, B4.11).
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


# ---- options


class OffloadMode(Enum):
    """EAGER: the core stores a block when the block is full (B4.6).

    LAZY: the core stores a block shortly before the engine evicts the block (B4.7).
    """

    EAGER = "eager"
    LAZY = "lazy"


@dataclass(frozen=True)
class OffloadOptions:
    """Settings of the core; all times in seconds.

    ``lookup_timeout_s``: maximum time that a request waits for its lookup; after this time the
    engine computes the request.
    ``hit_lifetime_s``: if a hit is not loaded within this time, the core looks it up again. This
    time must be shorter than the lease of the lookup.
    ``max_held_fraction``: maximum fraction of the engine's blocks that saves in flight may hold;
    the core offers further blocks in later steps.
    ``save_lost_after_s``: if no report of a save arrives within this time, the save counts as not
    stored and the engine may reuse its blocks. Workers must stop reading the blocks within this
    time, and must not store the bytes later (B5.6).
    ``batched_tokens``: maximum number of tokens that the engine computes per step. Lazy mode uses
    it to estimate how many blocks the engine will evict in the next two steps.
    ``audit_every``: one of this number of hits is audited: the engine computes its last step, and
    workers compare these blocks with the stored ones. 0: none is.
    """

    mode: OffloadMode = OffloadMode.EAGER
    lookup_timeout_s: float = 1.0
    hit_lifetime_s: float = 10.0
    max_held_fraction: float = 0.5
    save_lost_after_s: float = 600.0
    batched_tokens: int = 0
    audit_every: int = 0
