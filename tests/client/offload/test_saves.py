"""Save planner: which blocks are offered, when, and again after a failure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from stand_ins import FULL, STATE, WINDOW, FakePool, Request

from kvtier.client.offload import BlockTables, CacheGeometry, CacheGroup, SaveJob
from kvtier.client.offload.saves import SavePlanner, SaveProgress

LOST_S = 600.0


class Saves:
    """The planner with a clock set by the test."""

    def __init__(self, pool: FakePool | None = None, world_size: int = 1, held: float = 1.0) -> None:
        self.now = 100.0
        self.planner = SavePlanner(CacheGeometry((FULL,), 4, 4), world_size, held, LOST_S, pool or FakePool())

    def plan(
        self, request: Request, progress: SaveProgress, computed: int, tables: BlockTables, *, last: bool = False
    ) -> SaveJob | None:
        return self.planner.plan(request, progress, computed, lambda: tables, self.now, last=last)

    def report(
        self, ended: Mapping[int, int], not_stored: Mapping[int, Collection[int]] | None = None
    ) -> dict[int, int]:
        """Returns the complete jobs with their number of blocks that were not stored."""
        complete = self.planner.report(ended, not_stored or {}, self.now)
        return {save.job.job_id: len(save.not_stored) for save in complete}


def test_blocks_are_offered_once_and_pinned_until_all_workers_report() -> None:
    """B3.14 B4.5 B5.3: until every worker has ended the job. A worker counts once."""
    pool = FakePool()
    planner, progress = Saves(pool, world_size=2), SaveProgress()
    job = planner.plan(Request(4), progress, 13, [[7, 8, 9, 10]])
    assert job.block_ids == [7, 8, 9]
    assert job.keys == [b"%d.0" % number for number in range(3)]
    assert planner.plan(Request(4), progress, 15, [[7, 8, 9, 10]]) is None
    for _ in range(2):
        planner.report({job.job_id: 0b01})
        assert planner.planner.pending
        assert pool.refs[8] == 2
    planner.report({job.job_id: 0b10})
    assert not planner.planner.pending
    assert [pool.refs[number] for number in (7, 8, 9)] == [1, 1, 1]
    assert pool.released == [9, 8, 7], "a prefix is evicted from its tail"


def test_a_block_in_flight_is_not_stored_twice_but_its_copy_is() -> None:
    """B5.1, B5.2, B5.4, B4.15: by block id, across requests; equal content is another block."""
    planner = Saves()
    first = planner.plan(Request(2), SaveProgress(), 8, [[7, 8]])
    assert planner.plan(Request(2), SaveProgress(), 8, [[7, 8]]) is None
    twin = planner.plan(Request(2), SaveProgress(), 8, [[7, 9]])
    assert twin.block_ids == [9]
    planner.report({first.job_id: 1})
    again = planner.plan(Request(2), SaveProgress(), 8, [[7, 8]])
    # the server reports them as present, or stores them again
    assert again.block_ids == [7, 8]


def test_drafts_null_blocks_and_loaded_blocks_are_not_offered() -> None:
    """B4.6, B4.9: only blocks with a hash; not the null block and not loaded blocks."""
    planner = Saves()
    job = planner.plan(Request(4), SaveProgress(loaded=range(4, 8)), 100, [[7, 8, 0, 10, 11, 12]])
    assert job.block_ids == [7, 10]


def test_blocks_above_the_limit_are_offered_later() -> None:
    """Saves in flight hold at most their share of the engine's blocks."""
    planner, progress = Saves(FakePool(8), held=0.25), SaveProgress()
    job = planner.plan(Request(4), progress, 16, [[1, 2, 3, 4]])
    assert job.block_ids == [1, 2]
    assert planner.plan(Request(4), progress, 16, [[1, 2, 3, 4]]) is None
    planner.report({job.job_id: 1})
    rest = planner.plan(Request(4), progress, 16, [[1, 2, 3, 4]])
    assert rest.block_ids == [3, 4]


def test_blocks_that_were_not_stored_are_offered_again_later() -> None:
    """B3.5, B4.15: a full server costs few calls, not one per step, and no block stays missing."""
    planner, progress = Saves(), SaveProgress()
    table = [[7, 8, 9, 10]]
    job = planner.plan(Request(4), progress, 12, table)
    assert planner.report({job.job_id: 1}, {job.job_id: {0, 2}}) == {job.job_id: 2}
    intervals = []
    for _ in range(7):
        asked = planner.now
        while (job := planner.plan(Request(4), progress, 12, table)) is None:
            planner.now += 0.5
            assert planner.now - asked < 60, "not offered again"
        assert job.block_ids == [7, 9]
        assert job.keys == [b"%d.0" % number for number in (0, 2)]
        intervals.append(planner.now - asked)
        planner.report({job.job_id: 1}, {job.job_id: {0, 1}})
    assert intervals == [1, 2, 4, 8, 16, 30, 30]
    planner.now += 30
    job = planner.plan(Request(4), progress, 16, table)
    assert job.block_ids == [7, 9, 10]  # together with what is new
    planner.report({job.job_id: 1})
    planner.now += 1000
    assert planner.plan(Request(4), progress, 16, table) is None


def test_a_successful_store_resets_the_backoff() -> None:
    """B3.5: the intervals start again after a store."""
    planner, progress = Saves(), SaveProgress()
    for tokens, wait in ((4, 1), (4, 2), (8, 1)):
        job = planner.plan(Request(4), progress, tokens, [[7, 8]])
        planner.report({job.job_id: 1}, {job.job_id: {0}})
        planner.now += wait - 0.1
        assert planner.plan(Request(4), progress, tokens, [[7, 8]]) is None
        planner.now += 0.1
        if wait == 2:
            job = planner.plan(Request(4), progress, tokens, [[7, 8]])
            planner.report({job.job_id: 1})


def test_missed_blocks_above_the_limit_are_offered_later() -> None:
    """B3.5, B4.6: an offer for which other saves leave too little room loses no block."""
    planner, progress = Saves(FakePool(4), held=0.5), SaveProgress()
    job = planner.plan(Request(2), progress, 8, [[1, 2]])
    planner.report({job.job_id: 1}, {job.job_id: {0, 1}})
    other = planner.plan(Request(1), SaveProgress(), 4, [[3]])
    planner.now += 60
    part = planner.plan(Request(2), progress, 8, [[1, 2]])
    assert part.block_ids == [1]
    planner.report({other.job_id: 1, part.job_id: 1})
    planner.now += 60
    rest = planner.plan(Request(2), progress, 8, [[1, 2]])
    assert rest.block_ids == [2]


def test_missed_blocks_are_offered_at_the_end_of_a_request() -> None:
    """B3.5: once more, without waiting for the backoff."""
    planner, progress = Saves(), SaveProgress()
    job = planner.plan(Request(2), progress, 8, [[7, 8]])
    planner.report({job.job_id: 1}, {job.job_id: {1}})
    assert planner.plan(Request(2), progress, 8, [[7, 8]]) is None
    again = planner.plan(Request(2), progress, 8, [[7, 8]], last=True)
    assert again.block_ids == [8]


def test_each_request_that_shares_a_block_learns_that_it_was_not_stored() -> None:
    """B3.5, B5.4: a request that found the block in flight offers it later if the save failed."""
    planner, first, second = Saves(), SaveProgress(), SaveProgress()
    job = planner.plan(Request(2), first, 8, [[7, 8]])
    assert planner.plan(Request(2), second, 8, [[7, 8]]) is None
    planner.report({job.job_id: 1}, {job.job_id: {0}})
    planner.now += 1
    again = planner.plan(Request(2), second, 8, [[7, 8]])
    assert again.block_ids == [7]
    assert planner.plan(Request(2), first, 8, [[7, 8]]) is None


def test_a_block_counts_as_stored_when_all_ranks_stored_it() -> None:
    """B5.7, B3.14: if one rank could not store a block, all ranks offer it again."""
    planner, progress = Saves(world_size=2), SaveProgress()
    job = planner.plan(Request(2), progress, 8, [[7, 8]])
    planner.report({job.job_id: 1}, {job.job_id: {1}})
    planner.now += 10
    assert planner.plan(Request(2), progress, 8, [[7, 8]]) is None
    planner.report({job.job_id: 0b10})
    planner.now += 10
    again = planner.plan(Request(2), progress, 8, [[7, 8]])
    assert again.block_ids == [8]


def test_no_table_is_read_at_the_limit_of_held_blocks() -> None:
    """B4.6: building a table may be slow; the blocks are offered later."""
    planner, progress = Saves(FakePool(4), held=0.5), SaveProgress()
    first = planner.plan(Request(2), progress, 8, [[1, 2]])
    other = SaveProgress()
    assert planner.planner.plan(Request(3), other, 12, lambda: pytest.fail("a table"), planner.now) is None
    planner.report({first.job_id: 1})
    later = planner.plan(Request(3), other, 12, [[3, 2, 1]])
    assert later.block_ids == [3, 2]


def test_the_smallest_block_size_decides_the_next_check() -> None:
    """B4.6, B4.10: with different block sizes each block is offered in the step that fills it."""
    small, large = CacheGroup(0, 4, None), CacheGroup(1, 16, None)
    planner = SavePlanner(CacheGeometry((small, large), 16, 4), 1, 1.0, LOST_S, FakePool())
    progress, offered = SaveProgress(), []
    for tokens in range(1, 18):
        job = planner.plan(Request(4), progress, tokens, lambda: [[1, 2, 3, 4], [5]], 0.0)
        offered += [(tokens, block) for block in job.block_ids] if job is not None else []
    assert sorted(offered) == [(4, 1), (8, 2), (12, 3), (16, 4), (16, 5)]


def test_preemption_frees_no_block_that_is_being_saved() -> None:
    """B4.12: blocks in flight keep a reference; missed ones are stored after recomputation."""
    pool = FakePool()
    planner, progress = Saves(pool), SaveProgress()
    job = planner.plan(Request(3), progress, 12, [[7, 8, 9]])
    pool.release([7, 8, 9])  # preempted
    assert [pool.refs[number] for number in (7, 8, 9)] == [1, 1, 1]
    assert planner.planner.blocks_awaiting_save_only(planner.now)
    planner.planner.sent([job], planner.now)
    assert planner.planner.blocks_awaiting_save_only(planner.now)
    assert not planner.planner.blocks_awaiting_save_only(planner.now + 1.0), "only a short wait is worth it"
    planner.report({job.job_id: 1}, {job.job_id: {0, 2}})
    assert pool.refs[7] == 0
    planner.now += 1
    partly = planner.plan(Request(3), progress, 8, [[20, 21]])  # the recomputed blocks
    assert partly.block_ids == [20]
    planner.now += 10
    rest = planner.plan(Request(3), progress, 12, [[20, 21, 22]])
    assert rest.block_ids == [22]


def test_a_save_of_blocks_that_requests_use_is_no_reason_to_wait() -> None:
    """B4.12: its end frees no block, so the engine preempts a request at once."""
    pool = FakePool()
    planner, progress = Saves(pool), SaveProgress()
    assert not planner.planner.blocks_awaiting_save_only(planner.now)
    job = planner.plan(Request(3), progress, 12, [[7, 8, 9]])
    planner.planner.sent([job], planner.now)
    assert not planner.planner.blocks_awaiting_save_only(planner.now)
    pool.release([8])
    assert planner.planner.blocks_awaiting_save_only(planner.now), "one block suffices"
    planner.report({job.job_id: 1})
    assert not planner.planner.blocks_awaiting_save_only(planner.now), "no save is in flight"


def test_a_job_without_a_report_expires() -> None:
    """B5.6: its blocks are released and offered again, and a late report changes nothing."""
    pool = FakePool()
    planner, progress = Saves(pool), SaveProgress()
    job = planner.plan(Request(2), progress, 8, [[7, 8]])
    planner.now += LOST_S
    assert planner.planner.expire(planner.now) == [], "it was not sent yet"
    planner.planner.sent([job], planner.now)
    planner.now += LOST_S - 1
    assert planner.planner.expire(planner.now) == []
    planner.now += 1
    (lost,) = planner.planner.expire(planner.now)
    assert (lost.job, lost.not_stored) == (job, {0, 1})
    assert (pool.refs[7], planner.planner.pending) == (1, False)
    planner.now += 1
    again = planner.plan(Request(2), progress, 8, [[7, 8]])
    assert again is not None
    assert planner.report({job.job_id: 1}) == {}
    assert pool.refs[7] == 2


def test_a_block_that_fails_after_a_preemption_is_offered_once() -> None:
    """B4.12: the cursor reaches it again, so it is not recorded as missed too."""
    planner, progress = Saves(), SaveProgress()
    job = planner.plan(Request(3), progress, 12, [[7, 8, 9]])
    progress.restart()
    planner.report({job.job_id: 1}, {job.job_id: {0, 1, 2}})
    planner.now += 60
    again = planner.plan(Request(3), progress, 8, [[17, 18]])
    assert again.block_ids == [17, 18]
    assert not progress.missed


def test_window_groups_are_offered_before_full_attention() -> None:
    """B4.10, B4.15: at the limit, full attention's blocks are still there in the next step."""
    planner = SavePlanner(CacheGeometry((FULL, WINDOW), 4, 4), 1, 0.2, LOST_S, FakePool(10))
    job = planner.plan(Request(2), SaveProgress(), 8, lambda: [[1, 2], [3, 4]], 0.0)
    assert (job.groups, job.block_ids) == ([1, 1], [3, 4])


class Watched(Request):
    """Counts the calls of `final_blocks`."""

    asked = 0

    def final_blocks(self, group: CacheGroup) -> int:
        self.asked += 1
        return super().final_blocks(group)


def test_steps_without_a_full_block_do_no_work() -> None:
    """The next full block and missed blocks are offered at once."""
    planner, progress, request = Saves(), SaveProgress(), Watched(3)
    job = planner.plan(request, progress, 5, [[7, 8, 9]])
    planner.plan(request, progress, 6, [[7, 8, 9]])
    asked = request.asked
    assert planner.plan(request, progress, 7, [[7, 8, 9]]) is None
    assert request.asked == asked
    planner.report({job.job_id: 1}, {job.job_id: {0}})
    planner.now += 60
    again = planner.plan(request, progress, 7, [[7, 8, 9]])
    assert again.block_ids == [7]
    full = planner.plan(request, progress, 8, [[7, 8, 9]])
    assert full.block_ids == [8]


def test_a_block_is_offered_as_soon_as_it_has_a_key() -> None:
    """B4.6: a full block that ends with a draft has no key; each step checks it."""
    planner, progress = Saves(), SaveProgress()
    assert planner.plan(Request(0), progress, 4, [[7]]) is None
    assert planner.plan(Request(0), progress, 4, [[7]]) is None
    job = planner.plan(Request(1), progress, 4, [[7]])
    assert job.block_ids == [7]


def test_a_state_is_stored_if_the_engine_caches_it() -> None:
    """B4.10: the table does not show whether a block holds the running state or that of its end."""
    pool = FakePool()
    pool.names = {8: b"1.2", 10: b"2.2"}
    planner = SavePlanner(CacheGeometry((STATE,), 4, 4), 1, 1.0, LOST_S, pool)
    job = planner.plan(Request(4), SaveProgress(), 16, lambda: [[], [], [0, 8, 9, 10]], 100.0)
    assert (job.keys, job.block_ids) == ([b"1.2"], [8]), "the third has no key, the fourth has the third's state"


def test_a_state_is_stored_if_a_step_ended_there() -> None:
    """B4.10 B4.12: engines cache few of their states; after a preemption the blocks are others."""
    planner, progress = SavePlanner(CacheGeometry((STATE,), 4, 4), 1, 1.0, LOST_S, FakePool()), SaveProgress()
    for end in (4, 7, 8, 12):
        planner.step_ends(progress, end)
    assert progress.ends == {8, 12}, "older blocks may have been reused"
    job = planner.plan(Request(4), progress, 16, lambda: [[], [], [7, 8, 9, 10]], 100.0)
    assert (job.keys, job.block_ids) == ([b"1.2", b"2.2"], [8, 9])
    planner.report({job.job_id: 1}, {}, 100.0)
    progress.restart()
    assert planner.plan(Request(4), progress, 16, lambda: [[], [], [7, 8, 9, 10]], 100.0) is None
