"""Length of a hit, and the reads of its load."""

from __future__ import annotations

import pytest
from stand_ins import FULL, STATE, WINDOW, FakePool

from kvtier.client.offload import BlockPosition, BlockRead, CacheGeometry, CacheGroup, PrefixHit, search_hit
from kvtier.client.offload.loads import lacks_blocks, longest_hit, plan_reads, usable_limit


@pytest.mark.parametrize(("num_tokens", "limit"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_a_token_to_compute(num_tokens: int, limit: int) -> None:
    """B4.2: an aligned prompt loses its last block; with one more token it keeps all."""
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
    """B4.10: full attention needs all blocks, a sliding window only the last ones."""
    assert longest_hit([FULL, WINDOW], {0: full, 1: window}, 0, 16, 4) == hit


def test_blocks_of_the_engine_need_not_be_stored() -> None:
    """Blocks before the start count as present, in the window's group too."""
    assert longest_hit([FULL, WINDOW], {0: {2}, 1: {2}}, 8, 16, 4) == 12


def test_a_partial_load_is_not_possible() -> None:
    """B4.3: the engine may accept fewer tokens than offered, but not part of a block."""
    geometry = CacheGeometry((FULL,), 4, 4)
    found = PrefixHit(8, {0: {0: (9, 0), 1: (9, 1)}})
    reads = [plan_reads(geometry, found, [[5, 6]], 0, end) for end in (8, 4, 6)]
    assert reads == [[BlockRead(9, [0, 1], [0, 0], [5, 6])], [BlockRead(9, [0], [0], [5])], []]


def _hit(geometry: CacheGeometry, limit: int, present: dict[int, set[int]]) -> tuple[int, int]:
    """Returns the end of a hit and the number of queries."""
    queries, asked = search_hit(geometry, 0, limit), 0
    try:
        query = next(queries)
        while True:
            asked += 1
            found: set[BlockPosition] = set()
            for place in query.blocks:
                if place.position in present[place.group.index]:
                    found.add(place)
                elif query.prefix:
                    break
            query = queries.send(found)
    except StopIteration as end:
        return end.value, asked


@pytest.mark.parametrize(
    ("full", "window", "state", "expected"),
    [
        ({0, 1, 2, 3}, {2, 3}, {3}, (16, 2)),
        ({0, 1, 2, 3}, {1, 2, 3}, {0, 2}, (12, 3)),  # a state is of one position
        ({0, 1, 2, 3}, {0, 1}, {1, 3}, (8, 3)),
        ({0, 1, 2, 3}, {0, 1, 2, 3}, set(), (0, 3)),
        ({0, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}, (4, 2)),
        ({2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}, (0, 1)),
    ],
)
def test_full_window_and_state_are_matched_together(
    full: set[int], window: set[int], state: set[int], expected: tuple[int, int]
) -> None:
    """B4.10: the whole prefix, the last window, and the state at the end, with few queries."""
    assert _hit(CacheGeometry((FULL, WINDOW, STATE), 4, 4), 16, {0: full, 1: window, 2: state}) == expected


def test_the_last_block_of_a_hit_may_be_recomputed() -> None:
    """B4.2: with a draft model the hit is a block shorter."""
    assert _hit(CacheGeometry((FULL,), 4, 4, drop_last_block=True), 16, {0: {0, 1, 2, 3}}) == (12, 1)


def test_the_recomputed_block_is_one_of_the_scheduler() -> None:
    """B4.2: the hit is a step shorter, also if the blocks of a group are smaller than a step."""
    geometry = CacheGeometry((FULL, CacheGroup(1, 8, None)), 8, 4, drop_last_block=True)
    assert _hit(geometry, 16, {0: {0, 1, 2, 3}, 1: {0, 1}}) == (8, 2)


def test_a_block_that_was_not_found_makes_the_load_impossible() -> None:
    """B4.10: a shorter load moves the end of the window to a block that was not looked up."""
    geometry = CacheGeometry((FULL, WINDOW), 4, 4)
    full = {position: (9, position) for position in range(4)}
    found = PrefixHit(16, {0: full, 1: {2: (8, 0), 3: (8, 1)}})
    whole = plan_reads(geometry, found, [[1, 2, 3, 4], [0, 0, 7, 8]], 0, 16)
    assert whole == [BlockRead(9, [0, 1, 2, 3], [0] * 4, [1, 2, 3, 4]), BlockRead(8, [0, 1], [1, 1], [7, 8])]
    assert plan_reads(geometry, found, [[1, 2, 3], [0, 6, 7]], 0, 12) == []


def test_a_window_that_was_lost_before_the_start_makes_the_load_impossible() -> None:
    """B4.10: the engine counts tokens whose window block it lost; that block was not looked up."""
    pool, geometry = FakePool(), CacheGeometry((FULL, WINDOW, STATE), 4, 4)
    tables = [[1, 2, 3, 4], [0, 6, 7, 8], [0, 0, 0, 9]]
    pool.names = {1: b"0.0", 2: b"1.0", 3: b"2.0"}
    assert lacks_blocks(geometry, pool, tables, 12, 16)
    pool.names |= {7: b"2.1"}
    assert not lacks_blocks(geometry, pool, tables, 12, 16), (
        "of the window, the third block is the first that the hit needs"
    )


def test_only_the_last_state_is_read() -> None:
    """B4.10: an engine allocates one block for the state of a hit; those before it are null."""
    geometry = CacheGeometry((FULL, STATE), 4, 4)
    found = PrefixHit(8, {0: {0: (9, 0), 1: (9, 1)}, 2: {1: (8, 0)}})
    reads = plan_reads(geometry, found, [[1, 2], [], [0, 5]], 0, 8)
    assert reads == [BlockRead(9, [0, 1], [0, 0], [1, 2]), BlockRead(8, [0], [2], [5])]
    assert plan_reads(geometry, found, [[1], [], [5]], 0, 4) == [], "that state was not looked up"
