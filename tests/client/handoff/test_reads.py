"""Reads of a pull: which item of the lease goes to which block."""

from __future__ import annotations

from peers import BLOCK, FULL, WINDOW

from kvtier.client.handoff.claims import plan_pull

TABLES = [[11, 12, 13, 14], [21, 22, 23, 24]]
USABLE = {0: {0: 0, 1: 1, 2: 2}, 1: {1: 3, 2: 4}}


def test_every_block_is_filled_that_the_engine_allocated() -> None:
    """Group by group, the last block in part; null blocks of a window are skipped."""
    tables = [TABLES[0], [WINDOW.null_block, *TABLES[1][1:]]]
    (read,) = plan_pull(WINDOW, USABLE, 77, tables, 0, 2 * BLOCK + 5)
    assert (read.lease_id, read.indices) == (77, [0, 1, 2, 3, 4])
    assert (read.groups, read.block_ids) == ([0, 0, 0, 1, 1], [11, 12, 13, 22, 23])


def test_only_what_comes_after_the_engines_own_tokens_is_read() -> None:
    """Its own blocks may be shared with other requests."""
    (read,) = plan_pull(FULL, USABLE, 77, TABLES, BLOCK, 3 * BLOCK)
    assert (read.indices, read.block_ids) == ([1, 2], [12, 13])


def test_a_partial_load_is_not_possible() -> None:
    """The engine treats every block as loaded, so without one of them the load fails."""
    assert plan_pull(WINDOW, USABLE, 77, TABLES, 0, 3 * BLOCK) == []
    assert plan_pull(FULL, {0: {0: 0, 2: 2}}, 77, TABLES, 0, 3 * BLOCK) == []


def test_nothing_is_read_if_no_block_is_needed() -> None:
    """There is no read without blocks."""
    assert plan_pull(FULL, USABLE, 77, [[FULL.null_block] * 4], 0, 3 * BLOCK) == []


def test_no_read_starts_inside_a_block() -> None:
    """That block has the engine's own tokens."""
    assert plan_pull(FULL, USABLE, 77, TABLES, 8, 3 * BLOCK) == []
