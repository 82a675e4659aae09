"""How far a hit reaches when every KV cache group must be able to serve it (BEHAVIOUR B4.2, B4.10). No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from .groups import CacheGroup

__all__ = ["longest_hit", "usable_limit"]


def usable_limit(num_tokens: int, step_tokens: int) -> int:
    """The longest hit a request of ``num_tokens`` may claim: one token is always computed, and hits are whole steps (B4.2)."""
    return max(0, num_tokens - 1) // step_tokens * step_tokens


def longest_hit(
    groups: Sequence[CacheGroup], present: Mapping[int, AbstractSet[int]], start: int, limit: int, step_tokens: int
) -> int:
    """The longest prefix, in tokens, that all ``groups`` can serve; ``start`` when nothing beyond it can be.

    ``present[group.index]`` holds the block positions that the store has. Tokens before ``start`` are in the engine already, in
    every group: they need not be in the store. ``start`` and ``limit`` are multiples of ``step_tokens``.
    """
    # reach[i] for a group: how many blocks in a row, ending with block i, are present (or lie before start).
    runs = {group.index: _runs(group, present.get(group.index, frozenset()), start, limit) for group in groups}
    for hit in range(limit, start, -step_tokens):
        if all(_serves(group, runs[group.index], start, hit) for group in groups):
            return hit
    return start


def _runs(group: CacheGroup, present: AbstractSet[int], start: int, limit: int) -> list[int]:
    """Lengths of the runs of present blocks ending at each position from ``start`` on (position 0 = the block at ``start``)."""
    runs, length = [], 0
    for position in range(start // group.block_tokens, limit // group.block_tokens):
        length = length + 1 if position in present else 0
        runs.append(length)
    return runs


def _serves(group: CacheGroup, runs: Sequence[int], start: int, hit: int) -> bool:
    first = max(group.first_needed_block(hit), start // group.block_tokens)
    needed = hit // group.block_tokens - first
    return needed <= 0 or runs[hit // group.block_tokens - start // group.block_tokens - 1] >= needed
