"""KV events for programs that track the engine's caches."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from connector_fakes import FULL, FakeClient, make_request, make_step, reset_pending, scheduler_side
from harness.polling import wait_until
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.client import make_hold_key, make_key
from kvtier.client.engines.vllm.scheduler.kv_events import KVEvents
from kvtier.client.engines.vllm.worker.reports import SAVE_LOST_AFTER_S, WorkerReport
from kvtier.client.events import HeldChange
from kvtier.client.offload import EndedSave, SaveJob

TABLE = [[7, 8, 9]]


def _save(scheduler: Any, request_id: str = "r") -> Any:
    request = make_request(3, request_id)
    scheduler.new_request(request)
    (job,) = scheduler.build_step(make_step({request_id: TABLE}, **{request_id: 12})).saves
    return job


def test_a_block_is_announced_when_every_worker_has_stored_it() -> None:
    """B4.5 One event per block that all ranks have stored, with the engine's own hash."""
    with scheduler_side(FakeClient(), world_size=2, events=True) as (scheduler, _):
        job = _save(scheduler)
        scheduler.saves_reported(WorkerReport({job.job_id: 1}))
        assert not list(scheduler.take_events())
        scheduler.saves_reported(WorkerReport({job.job_id: 0b10}, {job.job_id: {1}}))
        events: list[Any] = list(scheduler.take_events())
        assert not list(scheduler.take_events()), "each is taken once"
    assert all(isinstance(event, BlockStored) for event in events)
    hashes = [maybe_convert_block_hash(BlockHash(bytes([number]) * 32)) for number in (0, 2)]
    assert [event.block_hashes for event in events] == [[block_hash] for block_hash in hashes]
    assert {(event.medium, event.group_idx, event.block_size, len(event.token_ids)) for event in events} == {
        ("CPU", 0, 4, 0)
    }


def test_a_save_across_a_restart_of_the_server_is_not_announced() -> None:
    """B4.15 The new run may lack the blocks, although the workers have stored them."""
    client = FakeClient()
    with scheduler_side(client, events=True) as (scheduler, _):
        job = _save(scheduler)
        client.epoch = 2
        scheduler.build_step(make_step({}))
        scheduler.saves_reported(WorkerReport({job.job_id: 1}))
        assert not list(scheduler.take_events())


def test_no_events_without_a_publisher() -> None:
    """Without a reader the list would only grow."""
    with scheduler_side(FakeClient()) as (scheduler, _):
        job = _save(scheduler)
        scheduler.saves_reported(WorkerReport({job.job_id: 1}))
        scheduler.reset()
        assert not list(scheduler.take_events())


def test_a_reset_clears_and_what_was_in_flight_is_not_announced() -> None:
    """B4.13 Saves from before a reset have no event; later ones have."""
    with scheduler_side(FakeClient(), events=True) as (scheduler, _):
        flying = _save(scheduler)
        assert not scheduler.reset()
        assert [type(event) for event in scheduler.take_events()] == [AllBlocksCleared]
        scheduler.saves_reported(WorkerReport({flying.job_id: 1}))
        assert not list(scheduler.take_events())
        wait_until(lambda: not reset_pending(scheduler))
        (again,) = scheduler.build_step(make_step({"r": TABLE}, r=12)).saves
        scheduler.saves_reported(WorkerReport({again.job_id: 1}))
        assert [type(event) for event in scheduler.take_events()] == [BlockStored] * 3


def test_changes_that_the_server_told_before_a_reset_are_not_announced() -> None:
    """They may arrive after the reset, and would follow `AllBlocksCleared`."""
    tell: list[Any] = []

    def open_stream(_client: Any, on_changes: Any) -> Any:
        tell.append(on_changes)
        return SimpleNamespace(close=lambda _: None)

    events, client = KVEvents([FULL], open_stream, enabled=True), FakeClient()
    change = [HeldChange(stored=True, medium="CPU", keys=[make_key(bytes(32), 0)])]
    events.follow(client)  # type: ignore[arg-type]
    tell[0](change)
    events.cleared()
    tell[0](change)
    assert [type(event) for event in events.take()] == [AllBlocksCleared]
    events.follow(client)  # type: ignore[arg-type]
    for each in tell:
        each(change)
    assert [type(event) for event in events.take()] == [BlockStored]


def test_a_save_of_which_nothing_is_heard_is_not_announced(monkeypatch: Any) -> None:
    """B5.6 It is released, and counts as not stored."""
    with scheduler_side(FakeClient(), events=True) as (scheduler, _):
        _save(scheduler)
        later = time.monotonic() + 2 * SAVE_LOST_AFTER_S
        monkeypatch.setattr("kvtier.client.engines.vllm.scheduler.scheduler.time.monotonic", lambda: later)
        scheduler.build_step(make_step({}))
        assert not list(scheduler.take_events())
        assert scheduler._counters.take().data["save_blocks:not_stored"] == 3  # type: ignore[union-attr]


def test_a_block_with_the_key_of_a_hold_is_not_announced() -> None:
    """It has no content hash, so a router could not compare it with a prompt."""
    events, job = KVEvents([FULL], None, enabled=True), SaveJob(1, "r")
    job.add(make_hold_key("engine", "r", 0, 1, b"partial"), 0, 8)
    job.add(make_key(bytes(32), 0), 0, 7)
    events.stored(EndedSave(job, frozenset()))
    (event,) = events.take()
    assert event.block_hashes == [maybe_convert_block_hash(BlockHash(bytes(32)))]  # type: ignore[attr-defined]
