"""Lookups, saves and the server's CPU tier when the engine resets the connector (B4.13)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from connector_fakes import FakeClient, make_request, make_step, reset_pending, scheduler_side
from harness.polling import wait_until

from kvtier.client import NotConnected, make_key
from kvtier.client.engines.vllm.scheduler import server_calls
from kvtier.client.engines.vllm.worker.reports import WorkerReport

KEYS = [make_key(bytes([number]) * 32, 0) for number in range(3)]
TABLE = [[7, 8, 9]]


def test_a_reset_while_copies_run_keeps_their_blocks() -> None:
    """B5.7, B4.13 A reset says "not yet" until every worker has reported."""
    with scheduler_side(FakeClient(), world_size=2) as (scheduler, pool):
        scheduler.new_request(make_request(2))
        (job,) = scheduler.build_step(make_step({"r": [[7, 8]]}, r=8)).saves
        assert not scheduler.reset()
        assert pool.blocks[7].ref_cnt == 2
        scheduler.new_request(make_request(2, "other"))
        assert not scheduler.build_step(make_step({"other": [[7, 8]]}, other=8)).saves
        scheduler.saves_reported(WorkerReport({job.job_id: 1}))
        assert not scheduler.reset()
        assert scheduler.has_pending_work()
        scheduler.saves_reported(WorkerReport({job.job_id: 0b10}))
        assert scheduler.reset()
        assert not scheduler.has_pending_work()
        assert pool.blocks[7].ref_cnt == 1


class Gate:
    """A server's answer that is delayed until the test releases it."""

    def __init__(self, answer: int = 0) -> None:
        self.entered, self._open, self._answer = threading.Event(), threading.Event(), answer

    def __call__(self) -> int:
        self.entered.set()
        assert self._open.wait(60)
        return self._answer

    def open(self) -> None:
        self._open.set()


def _is_miss(scheduler: Any, request_id: str) -> bool:
    """Whether a new request is a miss at once."""
    request = make_request(3, request_id)
    scheduler.new_request(request)
    return bool(scheduler.matched_tokens(request, 0) == (0, False))


def test_until_the_server_has_emptied_its_cpu_tier_all_is_a_miss() -> None:
    """B4.13 The engine gets its answer at once; requests miss until the server is done."""
    client = FakeClient(set(KEYS))
    gates = [Gate(2), Gate()]
    client.resets = [0, gates[1], gates[0]]
    with scheduler_side(client) as (scheduler, _):
        found = make_request(3, "found")
        scheduler.new_request(found)
        wait_until(lambda: scheduler.matched_tokens(found, 0) == (12, True))
        assert scheduler.reset(), "the server is not waited for"
        wait_until(lambda: client.released == [1])
        for number, gate in enumerate(gates):
            assert gate.entered.wait(60)
            assert scheduler.matched_tokens(found, 0) == (0, False)
            assert _is_miss(scheduler, f"r{number}")
            gate.open()
        wait_until(lambda: not reset_pending(scheduler))
        assert not client.resets
        assert scheduler.matched_tokens(found, 0) == (None, False), "it is looked up again"
        assert client.asked[0] == 3


def test_saves_in_flight_end_before_the_server_is_asked() -> None:
    """B4.13 Their blocks from before the reset are dropped, and nothing new is saved."""
    client, gate = FakeClient(), Gate()
    client.resets = [gate]
    with scheduler_side(client) as (scheduler, _):
        scheduler.new_request(make_request(3))
        (job,) = scheduler.build_step(make_step({"r": TABLE}, r=8)).saves
        assert not scheduler.reset(), "not yet"
        assert not scheduler.build_step(make_step({"r": TABLE}, r=12)).saves
        assert not gate.entered.wait(0.05), "a copy still runs"
        scheduler.saves_reported(WorkerReport({job.job_id: 1}))
        assert gate.entered.wait(60)
        assert not scheduler.build_step(make_step({"r": TABLE}, r=12)).saves
        gate.open()
        wait_until(lambda: not reset_pending(scheduler))
        (again,) = scheduler.build_step(make_step({"r": TABLE}, r=12)).saves
        assert again.block_ids == [7, 8, 9], "B3.19: a request that goes on stores from its start"


def test_a_request_that_ends_during_a_reset_saves_nothing() -> None:
    """B4.13 Its blocks are from before the reset."""
    client, gate = FakeClient(), Gate()
    client.resets = [gate]
    with scheduler_side(client) as (scheduler, _):
        request = make_request(2)
        scheduler.new_request(request)
        assert scheduler.reset()
        request.num_computed_tokens = 8
        scheduler.request_finished(request, TABLE)
        assert not scheduler.build_step(make_step({})).saves
        gate.open()


@pytest.mark.parametrize(
    "error", [NotConnected("gone"), RuntimeError("can't start new thread"), MemoryError(), ValueError()]
)
def test_a_reset_that_fails_is_tried_until_it_works(monkeypatch: Any, error: Exception) -> None:
    """B4.13 Requests miss until the server's CPU tier is empty, however often that fails."""
    monkeypatch.setattr(server_calls, "_RESET_RETRY_S", 0.01)
    client, gate = FakeClient(set(KEYS)), Gate()

    def fail() -> int:
        raise error

    client.resets = [gate, fail, fail]
    with scheduler_side(client) as (scheduler, _):
        assert scheduler.reset()
        assert gate.entered.wait(60)
        assert _is_miss(scheduler, "r")
        gate.open()
        wait_until(lambda: not reset_pending(scheduler))


def test_another_engine_s_reset_is_not_enough() -> None:
    """B4.13 The first "done" may be of an earlier reset, so the server is asked again."""
    client = FakeClient()
    last = Gate()
    client.resets = [last, 0]
    with scheduler_side(client) as (scheduler, _):
        scheduler.reset()
        assert last.entered.wait(60)
        assert reset_pending(scheduler)
        last.open()
        wait_until(lambda: not reset_pending(scheduler))


def test_a_reset_during_a_reset_is_one_more() -> None:
    """B4.13 Blocks that were stored between the two are dropped too."""
    client, first = FakeClient(), Gate()
    client.resets = [0, 0, 0, first]
    with scheduler_side(client) as (scheduler, _):
        scheduler.reset()
        assert first.entered.wait(60)
        scheduler.reset()
        first.open()
        wait_until(lambda: not reset_pending(scheduler))
        assert not client.resets, "two rounds each"
