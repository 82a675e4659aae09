"""The vLLM connector's saves: what is offered, when, and what becomes of what was not stored."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from connector_fakes import FULL, FakeClient, FakePool, make_request, make_step, scheduler_side, wait_for

from kvtier.client import make_key
from kvtier.client.engines.vllm import KVTierConnector, saves
from kvtier.client.engines.vllm.groups import CacheGeometry
from kvtier.client.engines.vllm.metadata import WorkerReport
from kvtier.client.engines.vllm.saves import SavePlanner, SaveProgress
from kvtier.client.engines.vllm.stats import SaveStats


def _planner(pool: FakePool, world_size: int = 1, held: float = 1.0) -> SavePlanner:
    planner = SavePlanner(CacheGeometry((FULL,), 4, 4), world_size, held)
    planner.bind_pool(pool)
    return planner


def test_blocks_are_offered_once_and_pinned_until_all_workers_report() -> None:
    """B4.5, B5.3 Blocks carry a reference until every worker has ended the job."""
    pool = FakePool()
    planner, progress = _planner(pool, world_size=2), SaveProgress()
    job = planner.plan(make_request(4), progress, 13, lambda: [[7, 8, 9, 10]])
    assert job is not None
    assert job.block_ids == [7, 8, 9]
    assert job.keys == [make_key(bytes([number]) * 32, 0) for number in range(3)]
    assert planner.plan(make_request(4), progress, 15, lambda: [[7, 8, 9, 10]]) is None
    planner.report({job.job_id: 1})
    assert planner.pending
    assert pool.blocks[8].ref_cnt == 2
    planner.report({job.job_id: 1})
    assert not planner.pending
    assert [pool.blocks[number].ref_cnt for number in (7, 8, 9)] == [1, 1, 1]


def test_a_block_in_flight_is_not_stored_twice_but_its_twin_is() -> None:
    """B5.1, B5.2, B5.4, B4.15 By block id and across requests; equal content in another block is another block."""
    planner = _planner(FakePool())
    first = planner.plan(make_request(2), SaveProgress(), 8, lambda: [[7, 8]])
    assert first is not None
    assert planner.plan(make_request(2), SaveProgress(), 8, lambda: [[7, 8]]) is None
    twin = planner.plan(make_request(2), SaveProgress(), 8, lambda: [[7, 9]])
    assert twin is not None
    assert twin.block_ids == [9]
    planner.report({first.job_id: 1})
    again = planner.plan(make_request(2), SaveProgress(), 8, lambda: [[7, 8]])
    assert again is not None
    assert again.block_ids == [7, 8]  # the server says that it has them, or stores what it has lost since


def test_drafts_null_blocks_and_loaded_blocks_are_not_offered() -> None:
    """B4.6, B4.9 Only blocks with a hash, never the null block, never what just came from the server."""
    planner = _planner(FakePool())
    job = planner.plan(make_request(4), SaveProgress(loaded=range(4, 8)), 100, lambda: [[7, 8, 0, 10, 11, 12]])
    assert job is not None
    assert job.block_ids == [7, 10]


def test_holding_too_much_puts_the_rest_off() -> None:
    """Saves in flight hold at most their share of the engine's blocks; the rest follows later."""
    planner, progress = _planner(FakePool(8), held=0.25), SaveProgress()
    job = planner.plan(make_request(4), progress, 16, lambda: [[1, 2, 3, 4]])
    assert job is not None
    assert job.block_ids == [1, 2]
    assert planner.plan(make_request(4), progress, 16, lambda: [[1, 2, 3, 4]]) is None
    planner.report({job.job_id: 1})
    rest = planner.plan(make_request(4), progress, 16, lambda: [[1, 2, 3, 4]])
    assert rest is not None
    assert rest.block_ids == [3, 4]


def test_reports_of_workers_add_up() -> None:
    """B3.14 vLLM aggregates what the workers of one step report; a block that one rank did not store is not stored."""
    left, right = WorkerReport({1: 1, 2: 1}, {2: {0}}), WorkerReport({2: 1}, {2: {3}, 1: {1}})
    assert left.aggregate(right) == WorkerReport({1: 1, 2: 2}, {2: {0, 3}, 1: {1}})
    assert left == WorkerReport({1: 1, 2: 1}, {2: {0}})


# ---- what was not stored


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that the planner sees."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(saves.time, "monotonic", lambda: now.seconds)
    return now


def test_blocks_that_were_not_stored_are_offered_again_later(clock: SimpleNamespace) -> None:
    """B3.5, B4.15 A full server costs a call now and then, not one per step, and leaves no hole."""
    planner, progress = _planner(FakePool()), SaveProgress()
    table = [[7, 8, 9, 10]]
    job = planner.plan(make_request(4), progress, 12, lambda: table)
    assert job is not None
    assert planner.report({job.job_id: 1}, {job.job_id: {0, 2}}) == {job.job_id: 2}
    intervals = []
    for _ in range(7):
        asked = clock.seconds
        while (job := planner.plan(make_request(4), progress, 12, lambda: table)) is None:
            clock.seconds += 0.5
            assert clock.seconds - asked < 60, "not offered again"
        assert job.block_ids == [7, 9]
        assert job.keys == [make_key(bytes([number]) * 32, 0) for number in (0, 2)]
        intervals.append(clock.seconds - asked)
        planner.report({job.job_id: 1}, {job.job_id: {0, 1}})
    assert intervals == [1, 2, 4, 8, 16, 30, 30]
    clock.seconds += 30
    job = planner.plan(make_request(4), progress, 16, lambda: table)
    assert job is not None
    assert job.block_ids == [7, 9, 10]  # together with what is new
    planner.report({job.job_id: 1})
    clock.seconds += 1000
    assert planner.plan(make_request(4), progress, 16, lambda: table) is None


@pytest.mark.usefixtures("clock")
def test_the_end_of_a_request_is_the_last_time_to_offer() -> None:
    """B3.5 What was missed is offered once more when the request ends, without waiting."""
    planner, progress = _planner(FakePool()), SaveProgress()
    job = planner.plan(make_request(2), progress, 8, lambda: [[7, 8]])
    assert job is not None
    planner.report({job.job_id: 1}, {job.job_id: {1}})
    assert planner.plan(make_request(2), progress, 8, lambda: [[7, 8]]) is None
    again = planner.plan(make_request(2), progress, 8, lambda: [[7, 8]], last=True)
    assert again is not None
    assert again.block_ids == [8]


def test_who_shares_a_block_learns_that_it_was_not_stored(clock: SimpleNamespace) -> None:
    """B3.5, B5.4 A request that found the block in flight offers it itself later, if it came to nothing."""
    planner, first, second = _planner(FakePool()), SaveProgress(), SaveProgress()
    job = planner.plan(make_request(2), first, 8, lambda: [[7, 8]])
    assert job is not None
    assert planner.plan(make_request(2), second, 8, lambda: [[7, 8]]) is None
    planner.report({job.job_id: 1}, {job.job_id: {0}})
    clock.seconds += 1
    again = planner.plan(make_request(2), second, 8, lambda: [[7, 8]])
    assert again is not None
    assert again.block_ids == [7]
    assert planner.plan(make_request(2), first, 8, lambda: [[7, 8]]) is None


def test_a_block_counts_as_stored_when_all_ranks_stored_it(clock: SimpleNamespace) -> None:
    """B5.7, B3.14 One rank that could not store a block is enough to offer it again, by all of them."""
    planner, progress = _planner(FakePool(), world_size=2), SaveProgress()
    job = planner.plan(make_request(2), progress, 8, lambda: [[7, 8]])
    assert job is not None
    planner.report({job.job_id: 1}, {job.job_id: {1}})
    clock.seconds += 10
    assert planner.plan(make_request(2), progress, 8, lambda: [[7, 8]]) is None
    planner.report({job.job_id: 1})
    clock.seconds += 10
    again = planner.plan(make_request(2), progress, 8, lambda: [[7, 8]])
    assert again is not None
    assert again.block_ids == [8]


def test_preemption_frees_no_block_that_is_being_saved(clock: SimpleNamespace) -> None:
    """B4.12 Blocks in flight keep a reference, and what was not stored is taken from the blocks of the recomputation."""
    pool = FakePool()
    planner, progress = _planner(pool), SaveProgress()
    job = planner.plan(make_request(3), progress, 12, lambda: [[7, 8, 9]])
    assert job is not None
    pool.free_blocks([pool.blocks[number] for number in (7, 8, 9)])  # preempted
    assert [pool.blocks[number].ref_cnt for number in (7, 8, 9)] == [1, 1, 1]
    assert planner.holds_only_reference()
    planner.report({job.job_id: 1}, {job.job_id: {0, 2}})
    assert pool.blocks[7].ref_cnt == 0
    clock.seconds += 1
    partly = planner.plan(make_request(3), progress, 8, lambda: [[20, 21]])  # as far as it is recomputed
    assert partly is not None
    assert partly.block_ids == [20]
    clock.seconds += 10
    rest = planner.plan(make_request(3), progress, 12, lambda: [[20, 21, 22]])
    assert rest is not None
    assert rest.block_ids == [22]


# ---- the scheduler's half


def test_what_was_not_stored_is_counted_and_offered_again() -> None:
    """B3.5 The counter rises, and the request offers its blocks at its end."""
    with scheduler_side(FakeClient()) as (scheduler, _):
        request = make_request(2)
        scheduler.new_request(request)
        (job,) = scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        scheduler.saves_reported(WorkerReport({job.job_id: 1}, {job.job_id: {0, 1}}))
        assert scheduler.take_not_stored() == 2
        assert scheduler.take_not_stored() == 0
        request.num_computed_tokens = 8
        scheduler.request_finished(request, [[7, 8]])
        (again,) = scheduler.build_step(make_step({})).saves
        assert again.block_ids == [7, 8]


def test_adapters_are_neither_loaded_nor_saved() -> None:
    """The name of a LoRA adapter does not say which weights it has."""
    client = FakeClient({make_key(bytes(32), 0)})
    with scheduler_side(client) as (scheduler, _):
        request = make_request(2, lora_request=object())
        scheduler.new_request(request)
        assert scheduler.matched_tokens(request, 0) == (0, False)
        assert not scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        request.num_computed_tokens = 8
        scheduler.request_finished(request, [[7, 8]])
        assert not scheduler.build_step(make_step({})).saves
    assert not client.asked


def test_a_request_is_begun_with_its_first_lookup_and_finished_once() -> None:
    """B3.12 The tiers vote on a request before its first lookup, with its transfer parameters, and hear once of its end."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(2)})
    with scheduler_side(client) as (scheduler, _):
        request = make_request(3, kv_transfer_params={"tier": "disk"})
        scheduler.new_request(request)
        wait_for(lambda: scheduler.matched_tokens(request, 0) == (8, True))
        assert client.begun == {"r": (13, {"tier": "disk"})}
        assert client.asked == [3]
        scheduler.blocks_allocated(request, [[7, 8, 9]], 8)
        (load,) = scheduler.build_step(make_step({})).loads
        assert [(read.indices, read.block_ids) for read in load.reads] == [([0, 1], [7, 8])]
        scheduler.loads_reported(["r"], [])
        request.num_computed_tokens = 12
        scheduler.request_finished(request, [[7, 8, 9]])
        (save,) = scheduler.build_step(make_step({})).saves
        assert save.block_ids == [9]  # the others came from the server
        time.sleep(0.05)
        assert not client.finished  # its last store is still under way
        scheduler.saves_reported(WorkerReport({save.job_id: 1}))
        wait_for(lambda: client.finished == ["r"])


def test_the_counter_survives_the_way_to_the_log() -> None:
    """B3.5 vLLM sends stats as plain data, adds up an interval's, and logs them."""
    one, two = SaveStats.of(2), SaveStats.of(3)
    rebuilt = KVTierConnector.build_kv_connector_stats(one.to_dict())
    assert rebuilt is not None
    assert rebuilt.aggregate(two).reduce() == {"not_stored_blocks": 5}
    assert (one.is_empty(), SaveStats().is_empty()) == (False, True)
