"""How many tokens of a request another engine has, and how many of these can be used (B2.2 to B2.7, B2.19)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..offload import BlockRead, BlockTables, CacheGeometry, CacheGroup, CacheGroupKind
from ..offload.loads import longest_hit
from .model import EXPIRY_MARGIN_S, ClaimedBlocks, ClaimId, HandoffOptions, HandoffRequest
from .params import RemoteRequest, TransferParams

__all__ = [
    "Claim",
    "HandoffState",
    "TransferState",
    "Usable",
    "apply_threshold",
    "is_expired",
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


def may_pull(params: TransferParams, options: HandoffOptions) -> bool:
    """Whether blocks of another engine are pulled for such a request at all: matching and pulling ask the same (B2.7, B2.9)."""
    if params.holds_nothing:
        return False
    return params.do_remote_prefill or (params.do_remote_decode and options.bidirectional_kv_xfer)


def offered_tokens(params: TransferParams, prompt_tokens: int, computed_tokens: int, options: HandoffOptions) -> int:
    """How many tokens after ``computed_tokens`` a peer has, as far as the parameters say; 0 for none."""
    if params.remote is None or not may_pull(params, options):
        return 0
    if params.do_remote_prefill:
        return max(0, prompt_tokens - computed_tokens)
    return max(0, min(params.num_tokens, prompt_tokens) - computed_tokens) if params.has_blocks else 0


def apply_threshold(count: int, params: TransferParams, options: HandoffOptions) -> int:
    """Returns ``count``, or 0 where it is too little: below the threshold a prefill engine computes it sooner (B2.4)."""
    too_little = not params.do_remote_prefill and count < options.kv_recompute_threshold
    return 0 if count <= 0 or too_little else count


def is_expired(params: TransferParams, wall_time: float) -> bool:
    """Whether what the parameters name is over, or will be before it is read (B2.19)."""
    return params.expiry_time is not None and params.expiry_time - EXPIRY_MARGIN_S <= wall_time


def usable_blocks(
    geometry: CacheGeometry, request: HandoffRequest, remote: RemoteRequest, claimed: ClaimedBlocks
) -> Usable:
    """Which blocks of a claim hold this request's tokens: those whose keys are the names that it would give them itself."""
    usable: Usable = {group.index: {} for group in geometry.groups}
    groups = {group.index: group for group in geometry.groups}
    for block in claimed.blocks:
        group = groups.get(block.group_index)
        if group is None or block.item is None:
            continue
        if block.key == _own_key(request, remote, group, block.position, claimed.num_tokens):
            usable[group.index][block.position] = block.item
    return usable


def usable_tokens(geometry: CacheGeometry, usable: Usable, num_tokens: int, computed_tokens: int) -> int:
    """How far the usable blocks reach, in tokens from the start of the request.

    ``computed_tokens`` the engine has itself: whole steps.
    """
    if all(_is_complete(group, usable[group.index], num_tokens, computed_tokens) for group in geometry.groups):
        return num_tokens
    step = geometry.step_tokens
    present = {index: set(items) for index, items in usable.items()}
    return longest_hit(geometry.groups, present, computed_tokens, num_tokens // step * step, step)


def needs_older_windows(geometry: CacheGeometry, start: int, end: int) -> bool:
    """Whether a pull of [``start``, ``end``) tokens leans on windows before ``start`` that the engine may have lost.

    One with state groups takes for computed what full attention has, though a sliding window lost its blocks there.
    """
    if not any(group.is_state for group in geometry.groups):
        return False
    windows = (group for group in geometry.groups if group.kind is CacheGroupKind.WINDOW)
    return any(group.first_needed_block(end) < start // group.block_tokens for group in windows)


def needs_earlier_context(geometry: CacheGeometry, end: int) -> bool:
    """Whether a hit that is a whole prompt of ``end`` tokens lacks what its last token is computed from.

    An engine computes that one in any case: with a state it would count twice, and a window may reach one block further back.
    """
    return any(g.is_state or g.first_needed_block(end - 1) < g.first_needed_block(end) for g in geometry.groups)


def _is_complete(group: CacheGroup, items: dict[int, int], num_tokens: int, computed_tokens: int) -> bool:
    first = max(group.first_needed_block(num_tokens), computed_tokens // group.block_tokens)
    return all(position in items for position in range(first, -(-num_tokens // group.block_tokens)))


def _own_key(
    request: HandoffRequest, remote: RemoteRequest, group: CacheGroup, position: int, num_tokens: int
) -> bytes | None:
    is_full = (position + 1) * group.block_tokens <= num_tokens
    if is_full and position < request.final_blocks(group):
        return request.key(group, position)
    return request.hold_key(remote.engine_id, remote.request_id, group, position, num_tokens)


def plan_pull(
    geometry: CacheGeometry, usable: Usable, lease_id: int, tables: BlockTables, start: int, end: int
) -> list[BlockRead]:
    """Returns the read that fills all blocks that the engine allocated for [``start``, ``end``) tokens, the last one as a part.

    Nothing when the claim lacks one of them, or ``start`` lies within a block: the engine will take every one for loaded.
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
            read.indices.append(item)
            read.groups.append(group.index)
            read.block_ids.append(block_id)
    return [read] if read.indices else []


class TransferState(Enum):
    """Where the one transfer of a request is (B2.10). It only ever moves down this list.

    NONE: the parameters name nobody to pull from. WANTED: they do, and it was not decided yet. CLAIMED: asked for, or leased.
    PULLING: workers copy. OVER: copied, or not worth it, or not possible; the peer has been told that it is not needed any more.
    """

    NONE = "none"
    WANTED = "wanted"
    CLAIMED = "claimed"
    PULLING = "pulling"
    OVER = "over"


@dataclass
class Claim:
    """A question to a server, from ``computed_tokens`` on; once answered a lease on what is ``usable`` of the request.

    ``answer`` is None for one that was not granted anything. ``reach``: how far the usable blocks go, in tokens.
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
    """One request.

    ``hold_at_end``: it was scheduled, and is to be held at its end (B2.8). ``ended``: only workers use it any more.
    """

    engine: HandoffRequest
    params: TransferParams
    transfer: TransferState
    claim: Claim | None = None
    offered_from: int = 0
    hold_at_end: bool = False
    ended: bool = False
