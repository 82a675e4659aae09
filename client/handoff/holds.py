"""Blocks that an engine holds for a peer: positions, keys and ids (B2.17, B2.18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..offload import BlockTables, CacheGeometry, CacheGroup, FreeBlock
from .model import HandoffRequest, PrefixCache

__all__ = [
    "HeldBlocks",
    "HeldLength",
    "block_key",
    "early_length",
    "find_blocks",
    "held_length",
    "hold_blocks",
    "name_blocks",
]


@dataclass
class HeldBlocks:
    """Blocks of a request that another engine needs to continue from ``num_tokens``.

    ``positions``: positions of the blocks per group. ``keys``: keys of all blocks. ``blocks``: the
    engine's blocks with their keys; of an early hold those that the engine has at the end.
    """

    num_tokens: int
    positions: list[list[int]] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    blocks: list[FreeBlock] = field(default_factory=list)


def hold_blocks(
    geometry: CacheGeometry,
    engine_id: str,
    request: HandoffRequest,
    tables: BlockTables,
    hold: HeldLength,
    cache: PrefixCache,
) -> HeldBlocks:
    """Returns the blocks to hold: none if the engine lacks one of them (B2.17, B2.18).

    ``hold``: result of ``held_length``.

    In a window group these are the blocks of the last window. A peer whose prompt has exactly these
    tokens computes the last token again, and needs the window of the token before it. If that
    window begins one block earlier and the engine still has this block, the block is held too.

    The request's table may lack a state or a window block that the request itself no longer needs.
    Such a block is taken from the engine's prefix cache.
    """
    nothing = HeldBlocks(0, positions=[[] for _ in geometry.groups])
    num_tokens = hold.tokens
    held = HeldBlocks(num_tokens)
    for group in geometry.groups:
        end, table = -(-num_tokens // group.block_tokens), tables[group.index]
        in_table = not group.is_state or hold.is_running
        positions = range(_first_held(geometry, group, table, num_tokens), end)
        for position in positions:
            block_id = _held_block(geometry, request, group, table if in_table else (), position, cache)
            key = block_key(request, engine_id, request.hold_name, group, position, num_tokens)
            if block_id is None or key is None:
                return nothing
            held.keys.append(key)
            held.blocks.append(FreeBlock(block_id, group.index, key))
        held.positions.append(list(positions))
    return held


def name_blocks(geometry: CacheGeometry, engine_id: str, request: HandoffRequest) -> HeldBlocks | None:
    """Returns the hold of a prompt that is not computed yet; None if a peer could pull nothing.

    In a window group it has the window of the last token, also if this begins a block earlier.
    """
    num_tokens = early_length(geometry, request.prompt_tokens)
    held = HeldBlocks(num_tokens)
    for group in geometry.groups:
        positions = range(group.first_needed_block(max(0, num_tokens - 1)), -(-num_tokens // group.block_tokens))
        for position in positions:
            key = block_key(request, engine_id, request.hold_name, group, position, num_tokens)
            if key is None:
                return None
            held.keys.append(key)
        held.positions.append(list(positions))
    return held if held.keys else None


def early_length(geometry: CacheGeometry, prompt_tokens: int) -> int:
    """Returns the number of tokens of a hold that is published before the prompt is computed.

    A hold that would end with a state ends before the prompt's last token (see ``held_length``).
    """
    step = geometry.step_tokens
    if any(group.is_state for group in geometry.groups):
        return (prompt_tokens - 1) // step * step
    return prompt_tokens - (prompt_tokens % step if geometry.drop_last_block else 0)


def find_blocks(
    geometry: CacheGeometry, request: HandoffRequest, tables: BlockTables, held: HeldBlocks, cache: PrefixCache
) -> None:
    """Adds the blocks to an early hold that the engine has at the end of the request.

    The engine has stored the others during the prefill, or they will be missing.
    """
    keys = iter(held.keys)
    for group, positions in zip(geometry.groups, held.positions, strict=True):
        for position in positions:
            # A state in the table may already contain tokens after its block.
            table = () if group.is_state else tables[group.index]
            key, block_id = next(keys), _held_block(geometry, request, group, table, position, cache)
            if block_id is not None:
                held.blocks.append(FreeBlock(block_id, group.index, key))


class HeldLength(NamedTuple):
    """Number of tokens of a hold. ``is_running``: its states are those of the running request."""

    tokens: int
    is_running: bool = True


def held_length(
    geometry: CacheGeometry,
    request: HandoffRequest,
    confirmed_tokens: int,
    state_tokens: int | None,
    cache: PrefixCache,
    *,
    same_prompt: bool,
) -> HeldLength:
    """Returns from how many tokens a peer can continue.

    ``state_tokens``: number of tokens that the request's recurrent state contains; None if unknown.
    ``same_prompt``: the peer's prompt is that of this request. The peer computes the last token of
    its prompt, so it cannot use a state that contains this token. Then, or if ``state_tokens`` is
    None, the hold ends with the last state that the engine's prefix cache has, at a block's end.
    """
    step = geometry.step_tokens
    states = [group for group in geometry.groups if group.is_state]
    if not states:
        return HeldLength(confirmed_tokens - (confirmed_tokens % step if geometry.drop_last_block else 0))
    if state_tokens is not None and not same_prompt:
        return HeldLength(state_tokens)
    limit = min(confirmed_tokens, request.prompt_tokens - 1) if same_prompt else confirmed_tokens
    for end in range(limit // step * step, 0, -step):
        blocks = (cache.cached_block(request, group, end // group.block_tokens - 1) for group in states)
        if all(block is not None for block in blocks):
            return HeldLength(end, is_running=False)
    return HeldLength(0)


def _held_block(
    geometry: CacheGeometry,
    request: HandoffRequest,
    group: CacheGroup,
    table: Sequence[int],
    position: int,
    cache: PrefixCache,
) -> int | None:
    """Returns the id of the engine's block of this position; None if the engine lacks it."""
    if position < len(table) and table[position] != geometry.null_block:
        return table[position]
    return cache.cached_block(request, group, position) if position < request.final_blocks(group) else None


def _first_held(geometry: CacheGeometry, group: CacheGroup, table: Sequence[int], num_tokens: int) -> int:
    needed, earlier = group.first_needed_block(num_tokens), group.first_needed_block(max(0, num_tokens - 1))
    if group.is_state:
        return needed
    return earlier if earlier < len(table) and table[earlier] != geometry.null_block else needed


def block_key(
    request: HandoffRequest, engine_id: str, hold_name: str, group: CacheGroup, position: int, num_tokens: int
) -> bytes | None:
    """Returns the content key of a full block. For other blocks returns a key for this hold only.

    None if the request does not have all tokens of the hold.
    """
    is_full = (position + 1) * group.block_tokens <= num_tokens
    if is_full and position < request.final_blocks(group):
        return request.key(group, position)
    return request.hold_key(engine_id, hold_name, group, position, num_tokens)
