"""Blocks of a hand-off: usable blocks of a claim, blocks to pull and blocks to hold (B2)."""

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
"""``usable[group index][position]`` is the index of the block in the lease."""


class TransferState(Enum):
    """State of a request's transfer; a request has at most one (B2.10).

    The state changes only to a later state of this list.

    NONE: the request pulls nothing from a peer.
    WANTED: the request may pull, and no claim was sent yet.
    CLAIMED: a claim was sent or granted.
    PULLING: workers copy the blocks.
    OVER: the transfer has ended or was given up; the core has released the peer's hold.
    """

    NONE = "none"
    WANTED = "wanted"
    CLAIMED = "claimed"
    PULLING = "pulling"
    OVER = "over"


@dataclass
class Claim:
    """A claim of a hold's blocks after ``computed_tokens``.

    ``answer``: the granted blocks; None if the claim is not answered yet or was refused.
    ``usable``: the blocks of the answer that have this request's tokens.
    ``reach``: number of leading tokens that the engine has after it has pulled the usable blocks.
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
    """Hand-off state of one request.

    ``offered_from``: number of computed tokens when ``match`` last offered tokens.
    ``hold_at_end``: the request was scheduled, and its blocks are held when it ends (B2.8).
    ``ended``: the request has ended, but workers still write into its blocks.
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
    """Number of tokens after ``computed_tokens`` that the peer has according to ``params``."""
    if params.remote is None or not may_pull(params, options):
        return 0
    if params.do_remote_prefill:
        return max(0, prompt_tokens - computed_tokens)
    return max(0, min(params.num_tokens, prompt_tokens) - computed_tokens) if params.has_blocks else 0


def apply_threshold(count: int, params: TransferParams, options: HandoffOptions) -> int:
    """Returns ``count``, or 0 if ``count`` is below the threshold of a prefill engine (B2.4)."""
    too_few = not params.do_remote_prefill and count < options.kv_recompute_threshold
    return 0 if count <= 0 or too_few else count


def usable_blocks(
    geometry: CacheGeometry, request: HandoffRequest, remote: RemoteRequest, claimed: ClaimedBlocks
) -> Usable:
    """Returns the claimed blocks whose keys, and so tokens, equal those of this request."""
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
    """Number of leading tokens that the engine has after a pull of usable blocks.

    ``computed_tokens``: tokens that the engine has before the pull; a multiple of ``step_tokens``.
    """
    if all(_is_complete(group, usable[group.index], num_tokens, computed_tokens) for group in geometry.groups):
        return num_tokens
    step = geometry.step_tokens
    present = {index: set(items) for index, items in usable.items()}
    return longest_hit(geometry.groups, present, computed_tokens, num_tokens // step * step, step)


def needs_older_windows(geometry: CacheGeometry, start: int, end: int) -> bool:
    """Whether a pull of [``start``, ``end``) needs window blocks that the engine may have evicted.

    An engine with state groups counts tokens before ``start`` as computed if it has their
    full-attention blocks, even if it evicted their sliding-window blocks.
    """
    if not any(group.is_state for group in geometry.groups):
        return False
    windows = (group for group in geometry.groups if group.kind is CacheGroupKind.WINDOW)
    return any(group.first_needed_block(end) < start // group.block_tokens for group in windows)


def needs_earlier_context(geometry: CacheGeometry, end: int) -> bool:
    """Whether the engine cannot compute the last prompt token after a pull of all ``end`` tokens.

    The engine always computes the last token of a prompt, from the context before this token. A
    pulled state already contains this token, so it is unusable. A sliding window may need an
    earlier block, which this pull lacks.
    """
    return any(g.is_state or g.first_needed_block(end - 1) < g.first_needed_block(end) for g in geometry.groups)


def plan_pull(
    geometry: CacheGeometry, usable: Usable, lease_id: int, tables: BlockTables, start: int, end: int
) -> list[BlockRead]:
    """Returns the read that fills all blocks allocated for [``start``, ``end``).

    The engine treats every allocated block as loaded. So the result is empty if the claim lacks one
    of these blocks, or if ``start`` is inside a block.
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

    ``positions``: positions of the blocks per group. ``blocks``: all blocks, with their keys.
    """

    num_tokens: int
    positions: list[list[int]] = field(default_factory=list)
    blocks: list[FreeBlock] = field(default_factory=list)


def hold_blocks(
    geometry: CacheGeometry, engine_id: str, request: HandoffRequest, tables: BlockTables, confirmed_tokens: int
) -> HeldBlocks:
    """Returns the blocks to hold: none if the engine lacks one of them (B2.17, B2.18).

    In a window group these are the blocks of the last window. A peer whose prompt has exactly these
    tokens computes the last token again, and needs the window of the token before it. If that
    window begins one block earlier and the engine still has this block, the block is held too.

    If the model has state groups, nothing is held, because engines free the needed state before the
    request ends. The peer then looks up the stored blocks, as for other requests.
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
    """Returns the content key of a full block. For other blocks returns a key for this hold only.

    None if the request does not have all tokens of the hold.
    """
    is_full = (position + 1) * group.block_tokens <= num_tokens
    if is_full and position < request.final_blocks(group):
        return request.key(group, position)
    return request.hold_key(engine_id, hold_name, group, position, num_tokens)
