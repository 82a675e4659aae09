"""What is held of a request that has ended, and how its blocks are named (B2.17, B2.18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..offload import BlockTables, CacheGeometry, CacheGroup, FreeBlock
from .model import HandoffRequest

__all__ = ["HeldBlocks", "hold_blocks"]


@dataclass
class HeldBlocks:
    """The blocks of a request that another engine needs to go on from ``num_tokens``.

    ``positions``: per group. ``blocks``: all of them, each with the name under which it is held.
    """

    num_tokens: int
    positions: list[list[int]] = field(default_factory=list)
    blocks: list[FreeBlock] = field(default_factory=list)

    @property
    def keys(self) -> list[bytes]:
        """Of all blocks, in their order."""
        return [block.key for block in self.blocks if block.key is not None]

    @property
    def flat_positions(self) -> list[int]:
        """Of all blocks, in their order."""
        return [position for group in self.positions for position in group]


def hold_blocks(
    geometry: CacheGeometry, engine_id: str, request: HandoffRequest, tables: BlockTables, confirmed_tokens: int
) -> HeldBlocks:
    """Returns what can be held: nothing, of 0 tokens, where a block is gone that would be needed.

    Of a window that is the tail that it reaches, and that of the token before, if it is there still: where the prompt ends here,
    its last token is computed again. A state moves on with the request, and by its end engines have let go of the
    block of the one that could be gone on from: with such groups nothing is held, and the cache has what was stored on the way.
    Where the last block of a hit is computed anew, whole steps are handed over.
    """
    nothing = HeldBlocks(0, positions=[[] for _ in geometry.groups])
    if any(group.is_state for group in geometry.groups):
        return nothing
    num_tokens = confirmed_tokens
    if geometry.drop_last_block:
        num_tokens -= num_tokens % geometry.step_tokens
    holding = HeldBlocks(num_tokens)
    for group in geometry.groups:
        end, table = -(-num_tokens // group.block_tokens), tables[group.index]
        positions = range(_first_held(geometry, group, table, num_tokens), end)
        for position in positions:
            if position >= len(table) or table[position] == geometry.null_block:
                return nothing
            is_full = (position + 1) * group.block_tokens <= num_tokens
            if is_full and position < request.final_blocks(group):
                key: bytes | None = request.key(group, position)
            else:
                key = request.hold_key(engine_id, request.hold_name, group, position, num_tokens)
            if key is None:
                return nothing
            holding.blocks.append(FreeBlock(table[position], group.index, key))
        holding.positions.append(list(positions))
    return holding


def _first_held(geometry: CacheGeometry, group: CacheGroup, table: Sequence[int], num_tokens: int) -> int:
    needed, earlier = group.first_needed_block(num_tokens), group.first_needed_block(max(0, num_tokens - 1))
    return earlier if earlier < len(table) and table[earlier] != geometry.null_block else needed
