"""What an engine's KV blocks are: groups of layers that share a block table, and the sizes of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

__all__ = ["BlockTables", "CacheGeometry", "CacheGroup", "GroupKind"]

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""A request's blocks: ``tables[group.index][position]`` is a block id, ``CacheGeometry.null_block`` where there is none."""

_STATE_BLOCKS_PER_STEP = 2


class GroupKind(Enum):
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
    def kind(self) -> GroupKind:
        """Which blocks of a prefix count."""
        if self.is_state:
            return GroupKind.STATE
        return GroupKind.FULL if self.retained_tokens is None else GroupKind.WINDOW

    @property
    def name(self) -> str:
        """For people, and part of the namespace: it carries the window."""
        kind = f"window_{self.retained_tokens}" if self.kind is GroupKind.WINDOW else self.kind.value
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
        return next((group for group in self.groups if group.kind is GroupKind.FULL), self.groups[0])
