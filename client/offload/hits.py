"""How far a hit reaches when every KV cache group must be able to serve it (BEHAVIOUR B4.2, B4.10)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from .groups import CacheGeometry, CacheGroup

__all__ = ["Found", "Place", "Question", "longest_hit", "search", "usable_limit"]


class Place(NamedTuple):
    """A block of a request: the n-th of one of its groups."""

    group: CacheGroup
    position: int


@dataclass(frozen=True)
class Question:
    """Which of these blocks does the store have? With ``prefix``, only those before the first that it lacks count."""

    places: Sequence[Place]
    prefix: bool


@dataclass
class Found:
    """What a lookup found: a hit up to ``hit_tokens`` of the request.

    ``items[group.index][position]`` is the (lease id, index in the lease) of each block that hit; ``sources[position]`` the tier
    that had it in the leading group.
    """

    hit_tokens: int
    items: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)


def usable_limit(num_tokens: int, step_tokens: int) -> int:
    """The longest hit a request of ``num_tokens`` may claim: one token is always computed, and hits are whole steps (B4.2)."""
    return max(0, num_tokens - 1) // step_tokens * step_tokens


def search(geometry: CacheGeometry, start: int, limit: int) -> Generator[Question, AbstractSet[Place], int]:
    """Asks what it takes to know how far a hit from ``start`` reaches, at most to ``limit``; returns that.

    Whoever runs it answers each question with the places that the store has. ``start`` and ``limit`` are multiples of
    ``geometry.step_tokens``.
    """
    step = geometry.step_tokens
    for group in (g for g in geometry.groups if g.retained_tokens is None and not g.is_state):
        found = yield Question(_places([group], start, limit), prefix=True)
        limit = min(limit, start + len(found) * group.block_tokens // step * step)
        if limit <= start:
            return start
    if geometry.drop_last_block:
        # A draft model's KV at a block's end was computed with the token after it: the last block is computed anew.
        limit -= step
    partial = [g for g in geometry.groups if g.retained_tokens is not None or g.is_state]
    if not partial or limit <= start:
        return limit
    # Most often the full hit's last windows are all there; only otherwise is it worth looking for shorter ones.
    tails = [
        place for place in _places(partial, start, limit) if place.position >= place.group.first_needed_block(limit)
    ]
    if len((yield Question(tails, prefix=False))) == len(tails):
        return limit
    found = yield Question(_places(partial, start, limit), prefix=False)
    present: dict[int, set[int]] = {}
    for place in found:
        present.setdefault(place.group.index, set()).add(place.position)
    return longest_hit(partial, present, start, limit, step)


def longest_hit(
    groups: Sequence[CacheGroup], present: Mapping[int, AbstractSet[int]], start: int, limit: int, step_tokens: int
) -> int:
    """The longest prefix, in tokens, that all ``groups`` can serve; ``start`` when nothing beyond it can be.

    ``present[group.index]`` holds the block positions that the store has. Tokens before ``start`` are in the engine already, in
    every group: they need not be in the store. ``start`` and ``limit`` are multiples of ``step_tokens``.
    """
    # runs[group][i]: how many blocks in a row, ending with block i, are present (or lie before start).
    runs = {group.index: _runs(group, present.get(group.index, frozenset()), start, limit) for group in groups}
    for hit in range(limit, start, -step_tokens):
        if all(_serves(group, runs[group.index], start, hit) for group in groups):
            return hit
    return start


def _places(groups: Sequence[CacheGroup], start: int, limit: int) -> list[Place]:
    return [
        Place(group, position)
        for group in groups
        for position in range(start // group.block_tokens, limit // group.block_tokens)
    ]


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
