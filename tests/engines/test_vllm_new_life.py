"""Detection of a restarted server (B4.15)."""

from __future__ import annotations

from connector_fakes import FakeClient, make_request, make_step, scheduler_side
from harness.polling import wait_until

from kvtier.client.engines.vllm.scheduler.scheduler import SchedulerSide
from kvtier.client.engines.vllm.worker.reports import WorkerReport
from kvtier.client.offload import SaveJob

TABLES = {"r": [[1, 2, 3, 4]]}


def test_a_running_request_is_offered_to_the_new_server() -> None:
    """B4.15 Detected once a session is open; unknown without a session."""
    client = FakeClient()
    with scheduler_side(client) as (side, _):
        side.new_request(make_request(4))
        side.blocks_allocated(make_request(4), TABLES["r"], 0)
        (job,) = side.build_step(make_step(TABLES, r=16)).saves
        side.saves_reported(WorkerReport({job.job_id: 1}))
        for epoch in (1, None, 1):
            client.epoch = epoch
            assert not side.build_step(make_step(TABLES, r=16)).saves, epoch
        client.epoch = 2
        (again,) = side.build_step(make_step(TABLES, r=16)).saves
        assert again.block_ids == job.block_ids
        side.saves_reported(WorkerReport({again.job_id: 1}))
        assert not side.build_step(make_step(TABLES, r=16)).saves


def test_a_waiting_request_is_looked_up_in_the_new_server() -> None:
    """B4.3 Lookups of the old life are released, and not offered to the engine."""
    client = FakeClient()
    with scheduler_side(client) as (side, _):
        client.keys = {key for job in _offered(side) for key in job.keys}
        request = make_request(4, "later")
        side.new_request(request)
        wait_until(lambda: side.matched_tokens(request, 0)[0] == 16)
        client.epoch, client.keys = 2, set()
        assert side.matched_tokens(request, 0) == (None, False)
        wait_until(lambda: side.matched_tokens(request, 0) == (0, False))
        wait_until(lambda: len(client.released) > 0)


def _offered(side: SchedulerSide) -> list[SaveJob]:
    side.new_request(make_request(4))
    side.blocks_allocated(make_request(4), TABLES["r"], 0)
    return side.build_step(make_step(TABLES, r=16)).saves
