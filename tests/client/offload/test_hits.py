"""How far a hit reaches, and what is read for it."""

from __future__ import annotations

import pytest
from stand_ins import FULL, WINDOW

from kvtier.client.offload import BlockRead, CacheGeometry, Found
from kvtier.client.offload.hits import longest_hit, usable_limit
from kvtier.client.offload.reads import plan_reads


@pytest.mark.parametrize(("num_tokens", "limit"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_a_token_to_compute(num_tokens: int, limit: int) -> None:
    """B4.2 An exactly aligned prompt loses its last block, one token more keeps all."""
    assert usable_limit(num_tokens, 4) == limit


@pytest.mark.parametrize(
    ("full", "window", "hit"),
    [
        ({0, 1, 2, 3}, {2, 3}, 16),
        ({0, 1, 2, 3}, {3}, 0),  # the window needs two blocks
        ({0, 1, 2, 3}, {0, 1, 3}, 8),
        ({0, 1, 2, 3}, {0}, 4),  # near the start the window is short
        ({0, 1}, {2, 3}, 0),
        ({0, 1}, {0, 1, 2, 3}, 8),
        (set(), {0, 1, 2, 3}, 0),
    ],
)
def test_a_hit_is_one_that_all_groups_can_serve(full: set[int], window: set[int], hit: int) -> None:
    """B4.10 Full attention needs all blocks, a sliding window only the last ones."""
    assert longest_hit([FULL, WINDOW], {0: full, 1: window}, 0, 16, 4) == hit


def test_what_the_engine_has_itself_need_not_be_in_the_store() -> None:
    """Blocks before the start count as present, in the window's group too."""
    assert longest_hit([FULL, WINDOW], {0: {2}, 1: {2}}, 8, 16, 4) == 12


def test_half_a_load_is_none() -> None:
    """B4.3 The engine may accept fewer tokens than offered, but not part of a block."""
    geometry = CacheGeometry((FULL,), 4, 4)
    found = Found(8, {0: {0: (9, 0), 1: (9, 1)}})
    reads = [plan_reads(geometry, found, [[5, 6]], 0, end) for end in (8, 4, 6)]
    assert reads == [[BlockRead(9, [0, 1], [0, 0], [5, 6])], [BlockRead(9, [0], [0], [5])], []]
