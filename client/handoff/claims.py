"""Blocks of a hand-off: which of a claim are usable, which are pulled, and which are held (B2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..offload import BlockRead, BlockTables, CacheGeometry, CacheGroup, CacheGroupKind, FreeBlock
from ..offload.loads import longest_hit
from .model import ClaimedBlocks, ClaimId, HandoffOptions, HandoffRequest
from .params import RemoteRequest, TransferParams

__all__ = [
    "Claim",
    "HandoffState",
    "HeldBlocks",
    "TransferState",
    "Usable",
    "apply_threshold",
    "hold_blocks",
    "may_pull",
    "needs_earlier_context",
    "needs_older_windows",
    "offered_tokens",
    "plan_pull",
    "usable_blocks",
    "usable_tokens",
]


Usable = dict[int, dict[int, int]]
"""Per group index and position, the item of the lease that has the block."""


class TransferState(Enum):
    """State of a request's only transfer (B2.10). It changes only to a later one of this list.

    NONE: the parameters name no peer.
    WANTED: they name a peer, and no claim was made yet.
    CLAIMED: a claim was sent or granted.
    PULLING: workers copy the blocks.
    OVER: the transfer has ended or was given up; the peer was told to release its hold.
    """

    NONE = "none"
    WANTED = "wanted"
    CLAIMED = "claimed"
    PULLING = "pulling"
    OVER = "over"


@dataclass
class Claim:
    """A claim of a hold's blocks after ``computed_tokens``.

    ``answer`` is None if nothing was granted. ``usable``: the blocks of the answer that hold this
    request's tokens. ``reach``: how far they go, in tokens from the start of the request.
    """

    number: ClaimId
    computed_tokens: int
    deadline: float
    answered: bool = False
    answered_at: float = 0.0
    answer: ClaimedBlocks | None = None
    usable: Usable | None = None
    reach: int = 0


@dataclass
class HandoffState:
    """State of one request.

    ``hold_at_end``: it was scheduled, and its blocks are held at its end (B2.8).
    ``ended``: it has ended, and only workers still use it.
    """

    engine: HandoffRequest
    params: TransferParams
    transfer: TransferState
    claim: Claim | None = None
    offered_from: int = 0
    hold_at_end: bool = False
    ended: bool = False


# ---- how much to pull


def may_pull(params: TransferParams, options: HandoffOptions) -> bool:
    """Whether parameters and options allow a pull (B2.7, B2.9)."""
    if params.holds_nothing:
        return False
    return params.do_remote_prefill or (params.do_remote_decode and options.bidirectional_kv_xfer)


def offered_tokens(params: TransferParams, prompt_tokens: int, computed_tokens: int, options: HandoffOptions) -> int:
    """How many tokens after ``computed_tokens`` the peer has, according to the parameters."""
    if params.remote is None or not may_pull(params, options):
        return 0
    if params.do_remote_prefill:
        return max(0, prompt_tokens - computed_tokens)
    return max(0, min(params.num_tokens, prompt_tokens) - computed_tokens) if params.has_blocks else 0


def apply_threshold(count: int, params: TransferParams, options: HandoffOptions) -> int:
    """Returns ``count``, or 0 if a prefill engine computes so few tokens faster (B2.4)."""
    too_few = not params.do_remote_prefill and count < options.kv_recompute_threshold
    return 0 if count <= 0 or too_few else count


def usable_blocks(
    geometry: CacheGeometry, request: HandoffRequest, remote: RemoteRequest, claimed: ClaimedBlocks
) -> Usable:
    """Returns the claimed blocks that hold this request's tokens: their keys are its own."""
    usable: Usable = {group.index: {} for group in geometry.groups}
    groups = {group.index: group for group in geometry.groups}
    for block in claimed.blocks:
        group = groups.get(block.group_index)
        if group is None or block.item is None:
            continue
        if block.key == _block_key(
            request, remote.engine_id, remote.request_id, group, block.position, claimed.num_tokens
        ):
            usable[group.index][block.position] = block.item
    return usable


def usable_tokens(geometry: CacheGeometry, usable: Usable, num_tokens: int, computed_tokens: int) -> int:
    """How far usable blocks reach after ``computed_tokens`` (whole steps), in tokens from 0."""
    if all(_is_complete(group, usable[group.index], num_tokens, computed_tokens) for group in geometry.groups):
        return num_tokens
    step = geometry.step_tokens
    present = {index: set(items) for index, items in usable.items()}
    return longest_hit(geometry.groups, present, computed_tokens, num_tokens // step * step, step)


def needs_older_windows(geometry: CacheGeometry, start: int, end: int) -> bool:
    """Whether a pull of [``start``, ``end``) needs window blocks before ``start`` that may be lost.

    An engine with state groups counts the tokens of full attention as computed, even if a sliding
    window lost their blocks.
    """
    if not any(group.is_state for group in geometry.groups):
        return False
    windows = (group for group in geometry.groups if group.kind is CacheGroupKind.WINDOW)
    return any(group.first_needed_block(end) < start // group.block_tokens for group in windows)


def needs_earlier_context(geometry: CacheGeometry, end: int) -> bool:
    """Whether a hit on a whole prompt of ``end`` tokens lacks the context of its last token.

    The engine always computes that token. A state would count it twice, and a window may reach one
    block further back.
    """
    return any(g.is_state or g.first_needed_block(end - 1) < g.first_needed_block(end) for g in geometry.groups)


def plan_pull(
    geometry: CacheGeometry, usable: Usable, lease_id: int, tables: BlockTables, start: int, end: int
) -> list[BlockRead]:
    """Returns the read that fills all blocks allocated for [``start``, ``end``).

    Returns none if the claim lacks a block or ``start`` is inside a block, because the engine
    treats every allocated block as loaded.
    """
    read = BlockRead(lease_id)
    for group in geometry.groups:
        if start % group.block_tokens:
            return []
        for position in range(start // group.block_tokens, -(-end // group.block_tokens)):
            block_id = tables[group.index][position]
            if block_id == geometry.null_block:
                continue
            item = usable[group.index].get(position)
            if item is None:
                return []
            read.add(item, group.index, block_id)
    return [read] if read.indices else []


def _is_complete(group: CacheGroup, items: dict[int, int], num_tokens: int, computed_tokens: int) -> bool:
    first = max(group.first_needed_block(num_tokens), computed_tokens // group.block_tokens)
    return all(position in items for position in range(first, -(-num_tokens // group.block_tokens)))


# ---- what to hold


@dataclass
class HeldBlocks:
    """Blocks of a request that another engine needs to continue from ``num_tokens``.

    ``positions``: per group. ``blocks``: all of them, each with the key of the hold.
    """

    num_tokens: int
    positions: list[list[int]] = field(default_factory=list)
    blocks: list[FreeBlock] = field(default_factory=list)


def hold_blocks(
    geometry: CacheGeometry, engine_id: str, request: HandoffRequest, tables: BlockTables, confirmed_tokens: int
) -> HeldBlocks:
    """Returns the blocks to hold; none, of 0 tokens, if a needed block is missing (B2.17, B2.18).

    A window group holds the blocks that its window reaches, and that of the token before if it is
    still there: if the prompt ends here, its last token is computed again. With state groups
    nothing is held: engines free the needed state before the request ends. The peer then uses the
    blocks that were stored as usual.
    """
    nothing = HeldBlocks(0, positions=[[] for _ in geometry.groups])
    if any(group.is_state for group in geometry.groups):
        return nothing
    num_tokens = confirmed_tokens
    if geometry.drop_last_block:
        num_tokens -= num_tokens % geometry.step_tokens
    held = HeldBlocks(num_tokens)
    for group in geometry.groups:
        end, table = -(-num_tokens // group.block_tokens), tables[group.index]
        positions = range(_first_held(geometry, group, table, num_tokens), end)
        for position in positions:
            if position >= len(table) or table[position] == geometry.null_block:
                return nothing
            key = _block_key(request, engine_id, request.hold_name, group, position, num_tokens)
            if key is None:
                return nothing
            held.blocks.append(FreeBlock(table[position], group.index, key))
        held.positions.append(list(positions))
    return held


def _first_held(geometry: CacheGeometry, group: CacheGroup, table: Sequence[int], num_tokens: int) -> int:
    needed, earlier = group.first_needed_block(num_tokens), group.first_needed_block(max(0, num_tokens - 1))
    return earlier if earlier < len(table) and table[earlier] != geometry.null_block else needed


def _block_key(
    request: HandoffRequest, engine_id: str, hold_name: str, group: CacheGroup, position: int, num_tokens: int
) -> bytes | None:
    """The content key of a full block, or the key of a block that only the hold has."""
    is_full = (position + 1) * group.block_tokens <= num_tokens
    if is_full and position < request.final_blocks(group):
        return request.key(group, position)
    return request.hold_key(engine_id, hold_name, group, position, num_tokens)
