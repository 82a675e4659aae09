"""What the core asks of its surroundings: of the engine's requests and blocks, and of whoever talks to the server.

Everything is called on the thread that calls the core, may not block, and may not raise for what a server does.
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
    "Mode",
    "OffloadOptions",
    "OffloadServer",
    "SaveJob",
    "StepPlan",
]


BlockTables: TypeAlias = Sequence[Sequence[int]]
"""A request's blocks: ``tables[group.index][position]`` is a block id, ``CacheGeometry.null_block`` where there is none."""


_STATE_BLOCKS_PER_STEP = 2


class CacheGroupKind(Enum):
    """What of a prefix a group's layers look at: all of it, its last tokens, or one state at its end."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True)
class CacheGroup:
    """One KV cache group.

    ``retained_tokens``: how many tokens before a hit's end the group needs; None for full attention. Of a group with ``is_state``
    (Mamba and its like) a hit needs the block that ends with it, which holds the state there. The state is computed in place and
    moves on from block to block: a block has the one at its end only if a step ended just there.
    ``page_bytes[i]`` is what one block of ``layers[i]`` takes on one rank, without padding; ``formats[i]``, where given, says
    what these bytes are.
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
        """Which blocks of a prefix count."""
        if self.is_state:
            return CacheGroupKind.STATE
        return CacheGroupKind.FULL if self.retained_tokens is None else CacheGroupKind.WINDOW

    @property
    def name(self) -> str:
        """For people, and part of the namespace: it carries the window."""
        kind = f"window_{self.retained_tokens}" if self.kind is CacheGroupKind.WINDOW else self.kind.value
        return f"{kind}.{self.index}"

    @property
    def part_bytes(self) -> int:
        """One rank's bytes of one block."""
        return sum(self.page_bytes)

    def first_needed_block(self, hit_tokens: int) -> int:
        """The first block that a hit of ``hit_tokens`` must have."""
        if self.is_state:
            return max(0, hit_tokens - 1) // self.block_tokens
        if self.retained_tokens is None:
            return 0
        return max(0, hit_tokens - self.retained_tokens) // self.block_tokens

    def blocks_per_step(self, batched_tokens: int) -> int:
        """How many blocks a step of at most ``batched_tokens`` may take for this group (B4.7)."""
        if self.is_state:
            return _STATE_BLOCKS_PER_STEP
        if self.retained_tokens is None:
            return -(-batched_tokens // self.block_tokens)
        return -(-(self.retained_tokens + 1) // self.block_tokens) + 1


@dataclass(frozen=True)
class CacheGeometry:
    """Groups and block sizes.

    ``step_tokens``: hits are whole multiples of it (the scheduler's block). ``hash_tokens``: how many one of the engine's hashes is
    for. ``drop_last_block``: the last block of a hit is computed anew. ``null_block``: the id that stands for "no block".
    """

    groups: tuple[CacheGroup, ...]
    step_tokens: int
    hash_tokens: int
    drop_last_block: bool = False
    null_block: int = 0

    @property
    def leading_group(self) -> CacheGroup:
        """The group whose blocks stand for a request's tokens in guesses and counts: one that keeps all of them, if any does."""
        return next((group for group in self.groups if group.kind is CacheGroupKind.FULL), self.groups[0])


LookupId = NewType("LookupId", int)


class EngineRequest(Protocol):
    """One request, from its arrival to its end; its answers are as of now. None of it changes what the core is told by events."""

    @property
    def request_id(self) -> str:
        """The engine's name of it, as in the events; unique among the requests that have not ended."""
        ...

    @property
    def server_name(self) -> str:
        """How the server knows it: not always the same, since an engine may take longer ids than the server does."""
        ...

    @property
    def total_tokens(self) -> int:
        """Tokens that are known by now: the prompt and what was generated."""
        ...

    @property
    def may_load(self) -> bool:
        """Whether the request may use what the store has; asked each time it is matched."""
        ...

    @property
    def may_save(self) -> bool:
        """Whether its blocks may be stored."""
        ...

    @property
    def whole(self) -> bool:
        """Whether some tier asks for every block of the request, those that were loaded included (B1.1)."""
        ...

    def final_blocks(self, group: CacheGroup) -> int:
        """How many of its blocks of ``group`` have a key: those whose tokens are final, so no draft that may be rejected (B4.6)."""
        ...

    def key(self, group: CacheGroup, position: int) -> bytes:
        """The name under which the store has, or is to have, a block; ``position`` is below ``final_blocks(group)``."""
        ...


class FreeBlock(NamedTuple):
    """A block that nobody uses. ``key`` is None when its content has no name, or none that may be stored."""

    block_id: int
    group_index: int
    key: bytes | None


class BlockPool(Protocol):
    """The engine's blocks and the references on them. A block without any may be overwritten at once."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        ...

    def hold(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Take that reference from each; those that are then free are evicted in this order, after all others that hold content."""

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        """Take that reference from each; those that are then free are evicted in this order, before all others with content.

        But not before the blocks of ``behind``, as far as these are in a row at the eviction end.
        """

    def references(self, block_id: int) -> int:
        """How many references there are on a block."""
        ...

    def known_as(self, block_id: int) -> bytes | None:
        """The key under which the engine itself would find the block by the end of this step; None where it would not."""
        ...

    def free_block(self, block_id: int) -> FreeBlock | None:
        """The block if nobody uses it."""
        ...

    def free_blocks(self) -> Iterator[FreeBlock]:
        """The free blocks in the order of eviction."""
        ...


class OffloadServer(Protocol):
    """Carries out what the core wants of the server; it answers later, with events."""

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        """Find out what the store has of [``start``, ``limit``) tokens, and keep what it has from eviction (B4.3).

        Answered by ``OffloadCore.lookup_ended``. False when there is nobody to ask: a miss at once, and no answer.
        """
        ...

    def drop_lookup(self, lookup: LookupId) -> None:
        """Nobody will load what was, or will be, found: let it be evicted. No answer is expected any more."""

    def give_up_lookup(self, lookup: LookupId) -> None:
        """As drop_lookup, because it took longer than a request may wait."""

    def end_request(self, request: EngineRequest) -> None:
        """The request has ended and nothing more of it will be stored (B3.12). Called once for each that arrived."""

    def empty(self) -> None:
        """Empty the primary tier, now that no transfer is in flight. The last of these is answered by ``OffloadCore.emptied``."""


@dataclass
class BlockRead:
    """Blocks of one lease to load: key ``indices[i]`` of the lease goes into engine block ``block_ids[i]`` of ``groups[i]``.

    ``endpoint``: the server that has granted the lease; empty for the engine's own.
    """

    lease_id: int
    indices: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    endpoint: str = ""


@dataclass
class LoadJob:
    """One request's load. Without ``reads`` it is one that cannot be done: workers report it as failed at once.

    ``request_id`` is the engine's, which waits for it.
    """

    request_id: str
    reads: list[BlockRead] = field(default_factory=list)


@dataclass
class SaveJob:
    """Blocks to store in one go; the core keeps them from reuse until every worker reports ``job_id``.

    ``request_id`` is how the server knows it; empty where they belong to no request any more (lazy mode).
    """

    job_id: int
    request_id: str
    keys: list[bytes] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass
class StepPlan:
    """One step's work: its loads are one event and its saves another (B4.4).

    Workers order each behind one mark in their compute: loads behind what may still use a block's last content, saves behind what
    writes the blocks (B4.11). Each job is reported by itself.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


class Mode(Enum):
    """EAGER stores a block as soon as it is full (B4.6); LAZY when the engine is about to evict it (B4.7)."""

    EAGER = "eager"
    LAZY = "lazy"


@dataclass(frozen=True)
class OffloadOptions:
    """Settings of the core; all times in seconds.

    ``lookup_timeout_s``: how long a request may wait to learn what is stored; afterwards it is computed.
    ``hit_lifetime_s``: a hit that waited longer for room in the engine is looked up again: its lease may be about to end.
    ``max_held_fraction``: the share of the engine's blocks that saves in flight may hold back from reuse.
    ``save_lost_after_s``: a save that is not reported by then never will be. Workers must have stopped by then to read its blocks,
    or to publish what they read (B5.6).
    ``batched_tokens``: the most that one step computes (lazy mode looks that far ahead).
    """

    mode: Mode = Mode.EAGER
    lookup_timeout_s: float = 1.0
    hit_lifetime_s: float = 10.0
    max_held_fraction: float = 0.5
    save_lost_after_s: float = 600.0
    batched_tokens: int = 0


_FIRST_S = 1.0


_LAST_S = 30.0


@dataclass
class Backoff:
    """Growing intervals: a full server costs a call now and then, not one per step. Times are the caller's, in seconds."""

    interval_s: float = _FIRST_S
    until: float = 0.0

    def is_over(self, now: float) -> bool:
        """Whether it may be tried (again)."""
        return now >= self.until

    def start(self, now: float) -> None:
        """Something was not taken: wait one interval."""
        self.until = now + self.interval_s

    def grow(self, now: float) -> None:
        """It is tried again: the next wait is twice as long."""
        self.interval_s = min(2 * self.interval_s, _LAST_S)
        self.until = now + self.interval_s

    def reset(self) -> None:
        """Something was taken."""
        self.interval_s, self.until = _FIRST_S, 0.0
