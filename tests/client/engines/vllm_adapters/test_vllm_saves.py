"""The vLLM connector's saves: what is offered, when, and how missing blocks are reported."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from connector_fakes import UNKNOWN_ADAPTER, FakeClient, make_request, make_step, scheduler_side
from harness.polling import stays, wait_until

from kvtier.client import make_key
from kvtier.client.engines.vllm.stats import TransferCounters
from kvtier.client.engines.vllm.worker.reports import WorkerReport


def _counted(counters: TransferCounters, name: str) -> Any:
    stats = counters.take()
    return stats.data.get(name, 0) if stats is not None else 0


def test_reports_of_workers_add_up() -> None:
    """B3.14 vLLM aggregates the workers' reports; a block that one rank missed is not stored."""
    left, right = WorkerReport({1: 0b01, 2: 0b01}, {2: {0}}), WorkerReport({2: 0b10}, {2: {3}, 1: {1}})
    assert left.aggregate(right) == WorkerReport({1: 0b01, 2: 0b11}, {2: {0, 3}, 1: {1}})
    assert left.aggregate(left) == left, "a worker that reports twice counts once"
    assert left == WorkerReport({1: 1, 2: 1}, {2: {0}})


def test_what_was_not_stored_is_counted_and_offered_again() -> None:
    """B3.5 It is counted, and the request offers its blocks again at its end."""
    counters = TransferCounters()
    with scheduler_side(FakeClient(), counters=counters) as (scheduler, _):
        request = make_request(2)
        scheduler.new_request(request)
        (job,) = scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        scheduler.saves_reported(WorkerReport({job.job_id: 1}, {job.job_id: {0, 1}}))
        assert _counted(counters, "save_blocks:not_stored") == 2
        assert _counted(counters, "save_blocks:not_stored") == 0
        request.num_computed_tokens = 8
        scheduler.request_finished(request, [[7, 8]])
        (again,) = scheduler.build_step(make_step({})).saves
        assert again.block_ids == [7, 8]


def test_an_adapter_without_files_is_neither_loaded_nor_saved() -> None:
    """The name of a LoRA adapter does not identify its weights."""
    client = FakeClient({make_key(bytes(32), 0)})
    with scheduler_side(client) as (scheduler, _):
        request = make_request(2, lora_request=UNKNOWN_ADAPTER)
        scheduler.new_request(request)
        assert scheduler.matched_tokens(request, 0) == (0, False)
        assert not scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        request.num_computed_tokens = 8
        scheduler.request_finished(request, [[7, 8]])
        assert not scheduler.build_step(make_step({})).saves
    assert not client.asked


def test_a_request_is_begun_with_its_first_lookup_and_finished_once() -> None:
    """B3.12 Tiers vote before a request's first lookup, and learn of its end once."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(2)})
    with scheduler_side(client) as (scheduler, _):
        request = make_request(3, kv_transfer_params={"tier": "disk"})
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (8, True))
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
        stays(lambda: not client.finished, 0.05)  # its last store is in flight
        scheduler.saves_reported(WorkerReport({save.job_id: 1}))
        wait_until(lambda: client.finished == ["r"])


def test_blocks_of_a_failed_load_are_computed_and_saved() -> None:
    """B4.3 After a failed load the engine computes the blocks, and all of them are saved."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(2)})
    with scheduler_side(client) as (scheduler, _):
        request = make_request(3)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (8, True))
        scheduler.blocks_allocated(request, [[7, 8, 9]], 8)
        scheduler.build_step(make_step({}))
        scheduler.loads_reported({"r"}, {"r"})
        assert scheduler.matched_tokens(request, 0) == (0, False)
        (save,) = scheduler.build_step(make_step({"r": [[7, 8, 9]]}, r=12)).saves
        assert save.block_ids == [7, 8, 9]
        scheduler.saves_reported(WorkerReport({save.job_id: 1}))


def test_a_load_is_sent_although_the_saves_of_its_step_cannot_be_planned() -> None:
    """B4.8 Its request waits for the load. The other blocks are saved in a later step."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(2)})
    with scheduler_side(client) as (scheduler, _):
        loading, running = make_request(3, "loading"), make_request(2, "running", skip_reading_prefix_cache=True)
        for request in (loading, running):
            scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(loading, 0) == (8, True))
        wait_until(lambda: not scheduler._requests["running"].registration.voting)
        scheduler.blocks_allocated(loading, [[7, 8, 9]], 8)
        step = make_step({}, running=8)  # the block table of the running request is missing
        (load,) = scheduler.build_step(step).loads
        assert [(read.indices, read.block_ids) for read in load.reads] == [([0, 1], [7, 8])]
        (save,) = scheduler.build_step(make_step({"running": [[4, 5]]}, running=8)).saves
        assert save.block_ids == [4, 5]
        scheduler.saves_reported(WorkerReport({save.job_id: 1}))


@pytest.mark.parametrize("method", ["preempted", "plan_saves"])
@pytest.mark.parametrize("error", [KeyError, RuntimeError, ValueError, TypeError, AssertionError, AttributeError])
def test_a_load_is_sent_after_each_error_in_the_plan_of_saves(
    monkeypatch: pytest.MonkeyPatch, method: str, error: type[Exception]
) -> None:
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(2)})
    with scheduler_side(client) as (scheduler, _):
        request = make_request(3)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (8, True))
        scheduler.blocks_allocated(request, [[7, 8, 9]], 8)
        monkeypatch.setattr(scheduler._core, method, Mock(side_effect=error("broken")))
        (load,) = scheduler.build_step(make_step({})).loads
        assert load.request_id == "r"


def test_blocks_are_offered_again_to_each_new_run_of_the_server() -> None:
    """B4.15 Not while the connection is lost, and not when the same run is connected again."""
    client = FakeClient()
    with scheduler_side(client) as (scheduler, _):
        scheduler.new_request(make_request(2))
        wait_until(lambda: not scheduler._requests["r"].registration.voting)
        step = make_step({"r": [[7, 8]]}, r=8)
        step.preempted_req_ids = None  # as vLLM has it in a step without preemptions
        runs = ((1, True), (1, False), (None, False), (1, False), (2, True), (2, False), (None, False), (3, True))
        for epoch, is_new in runs:
            client.epoch = epoch
            saves = scheduler.build_step(step).saves
            assert [block_id for save in saves for block_id in save.block_ids] == ([7, 8] if is_new else []), epoch
            scheduler.saves_reported(WorkerReport({save.job_id: 1 for save in saves}))


def test_a_preempted_request_offers_its_blocks_anew() -> None:
    """B4.12 Preempted requests are in the step's output; they recompute into other blocks."""
    with scheduler_side(FakeClient()) as (scheduler, pool):
        request = make_request(2)
        scheduler.new_request(request)
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (0, False))
        scheduler.blocks_allocated(request, [[7, 8]], 0)
        (job,) = scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        pool.free_blocks([pool.blocks[7], pool.blocks[8]])
        preempting = make_step({})
        preempting.preempted_req_ids = {"r"}
        assert not scheduler.build_step(preempting).saves
        assert [pool.blocks[number].ref_cnt for number in (7, 8)] == [1, 1], "in flight, and held for that"
        assert scheduler.has_pending_block_frees()
        scheduler.saves_reported(WorkerReport({job.job_id: 1}))
        (again,) = scheduler.build_step(make_step({"r": [[17, 18]]}, r=8)).saves
        assert again.block_ids == [17, 18]
