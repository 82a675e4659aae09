"""How many tokens of a request another engine has, and how many of these can be used (B2.2 to B2.7, B2.19)."""

from __future__ import annotations

from ..offload import CacheGeometry, CacheGroup, GroupKind
from ..offload.hits import longest_hit
from .engine import Claimed, HandoffRequest
from .options import EXPIRY_MARGIN_S, HandoffOptions
from .params import RemoteRequest, TransferParams

__all__ = [
    "Usable",
    "is_expired",
    "may_pull",
    "needs_earlier_context",
    "needs_older_windows",
    "offered_tokens",
    "usable_blocks",
    "usable_tokens",
    "worth",
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


def worth(count: int, params: TransferParams, options: HandoffOptions) -> int:
    """Returns ``count``, or 0 where it is too little: below the threshold a prefill engine computes it sooner (B2.4)."""
    too_little = not params.do_remote_prefill and count < options.kv_recompute_threshold
    return 0 if count <= 0 or too_little else count


def is_expired(params: TransferParams, wall_time: float) -> bool:
    """Whether what the parameters name is over, or will be before it is read (B2.19)."""
    return params.expiry_time is not None and params.expiry_time - EXPIRY_MARGIN_S <= wall_time


def usable_blocks(geometry: CacheGeometry, request: HandoffRequest, remote: RemoteRequest, claimed: Claimed) -> Usable:
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
    windows = (group for group in geometry.groups if group.kind is GroupKind.WINDOW)
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
