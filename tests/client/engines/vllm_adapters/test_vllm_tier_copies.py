"""Ownership of the primary tier's rows: a copy keeps them until it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness.polling import wait_until
from tier_fixtures import KEYS, ROW, TierParts, make_tier_parts

from kvtier.client.engines.vllm_tier import transfers
from kvtier.client.engines.vllm_tier.tier_lookups import Answer, Pin

LONG_TIMEOUT_SECONDS = 30.0


@pytest.fixture
def room() -> Iterator[TierParts]:
    """Transfers and lookups over a fake client."""
    with make_tier_parts() as made:
        yield made


class HeldCopy:
    """A fake copy that begins, and continues when the test releases it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self._copy = transfers.copy_batch  # type: ignore[attr-defined]
        patch.setattr(transfers, "copy_batch", self)

    def __call__(self, *batch: Any) -> None:
        self.begun.set()
        assert self.may_go_on.wait(LONG_TIMEOUT_SECONDS)
        self._copy(*batch)


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch) -> HeldCopy:
    """Every copy waits in its middle."""
    return HeldCopy(monkeypatch)


@pytest.mark.parametrize("leases", [None, [1, 1, 1, 1]])
def test_a_job_that_is_late_while_it_copies_is_reported_when_the_copy_has_ended(
    room: TierParts, copy: HeldCopy, monkeypatch: pytest.MonkeyPatch, leases: list[int] | None
) -> None:
    """B3.18 Rows are released at the end of a copy; an abandoned copy does not count as done."""
    monkeypatch.setattr(transfers, "_JOB_SECONDS", 0.0)
    room.transfers.submit(room.job(1, room.lookups.begin("r", None), leases))
    assert copy.begun.wait(LONG_TIMEOUT_SECONDS)
    assert room.transfers.take_finished() == []
    assert room.transfers.take_finished() == []
    copy.may_go_on.set()
    assert room.finished() == {1: frozenset()}
    assert (room.rows[:, 0] == (1 if leases is None else 7)).all()
    for threads in (room.transfers._loads, room.transfers._stores):
        threads.close(LONG_TIMEOUT_SECONDS)
    assert room.transfers.take_finished() == []


@pytest.mark.parametrize("leases", [None, [1, 1, 1, 1]])
def test_a_job_that_has_copied_and_hangs_again_is_reported_at_once(
    room: TierParts, monkeypatch: pytest.MonkeyPatch, leases: list[int] | None
) -> None:
    """B3.18 A job between its batches can be abandoned, with what it has done."""
    monkeypatch.setattr(transfers, "_BATCH_BYTES", ROW)
    hung, may_go_on, calls = threading.Event(), threading.Event(), iter((False, True, False, False))

    def hand_out() -> None:
        if next(calls):
            hung.set()
            may_go_on.wait(2 * LONG_TIMEOUT_SECONDS)

    room.client.hand_out = hand_out
    room.transfers.submit(room.job(1, room.lookups.begin("r", None), leases))
    assert hung.wait(LONG_TIMEOUT_SECONDS)
    monkeypatch.setattr(transfers, "_JOB_SECONDS", 0.0)
    assert [(job.number, job.done) for job in room.transfers.take_finished()] == [(1, frozenset(KEYS[:1]))]
    may_go_on.set()


def test_each_batch_of_a_job_has_its_own_rows(room: TierParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_BATCH_BYTES", 2 * ROW)
    stored: list[int] = []
    room.rows[:] = [[1], [2], [3], [4]]
    room.client.confirm = lambda _: stored.extend(room.client.memory[:2, 0].tolist())
    room.transfers.submit(room.job(1, room.lookups.begin("r", None)))
    assert room.finished() == {1: frozenset(KEYS)}
    assert stored == [1, 2, 3, 4]
    room.client.confirm = str
    room.client.memory[:4] = [[5], [6], [7], [8]]
    job = room.job(2, room.lookups.begin("s", None))
    job.pins = [Pin(SimpleNamespace(id=1), item, 1e9) for item in range(4)]  # type: ignore[arg-type]
    room.transfers.submit(job)
    assert room.finished() == {2: frozenset(KEYS)}
    assert room.rows[:, 0].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("leases", [None, [1, 1, 1, 1]])
def test_a_drain_waits_for_the_copy_that_is_under_way(
    room: TierParts, copy: HeldCopy, leases: list[int] | None
) -> None:
    """B3.19 Emptying the primary tier waits for a running copy, and for nothing else."""
    confirmed = threading.Event()
    room.client.confirm = lambda _: confirmed.wait(2 * LONG_TIMEOUT_SECONDS)
    room.transfers.submit(room.job(1, room.lookups.begin("r", None), leases))
    assert copy.begun.wait(LONG_TIMEOUT_SECONDS)
    drained, running = threading.Event(), room.transfers._running
    drain = threading.Thread(target=lambda: (room.transfers.drain(0.0), drained.set()))
    drain.start()
    # Abandoned by the drain, which then waits or ends at once.
    wait_until(lambda: not running or all(job.ended for job in running.values()))
    assert not drained.wait(0.2)
    assert list(running) == [1]
    copy.may_go_on.set()
    drain.join(LONG_TIMEOUT_SECONDS)
    assert drained.is_set()
    confirmed.set()
    assert {job.number: job.done for job in room.transfers.take_finished()} == {1: frozenset()}


@pytest.mark.parametrize("leases", [None, [1, 1, 1, 1]])
def test_slots_of_another_size_than_a_row_are_not_touched(room: TierParts, leases: list[int] | None) -> None:
    """A server that returns other sizes fails the job before any byte is copied."""
    whole = room.client._batch

    def shrunk(items: Any) -> Any:
        batch = whole(items)
        batch.sizes = [*batch.sizes[:-1], batch.sizes[-1] - 1]
        return batch

    room.client._batch = shrunk  # type: ignore[method-assign]
    room.transfers.submit(room.job(1, room.lookups.begin("r", None), leases))
    assert room.finished() == {1: frozenset()}
    assert (room.rows == 1).all()
    assert (room.client.memory == 7).all()


def test_leases_are_released_after_the_load(room: TierParts, copy: HeldCopy) -> None:
    """B4.3 A request that runs during its load keeps its leases until the load has ended."""
    room.client.keys = set(KEYS)
    request = room.lookups.begin("r", None)
    room.lookups.answer(request, KEYS[0], 16)
    room.lookups.send(request)
    wait_until(lambda: room.lookups.answer(request, KEYS[0], 16) is Answer.HIT)
    (lease,) = request.leases
    job = room.job(1, request, [1] * 4)
    job.pins = [Pin(SimpleNamespace(id=lease.id), 0, 1e9)] * 4  # type: ignore[arg-type]
    room.transfers.submit(job)
    request.loading += 1
    assert copy.begun.wait(LONG_TIMEOUT_SECONDS)
    room.lookups.mark_scheduled(request)
    said_by_now = threading.Event()
    room.lookups._control_thread.submit(said_by_now.set)
    assert said_by_now.wait(LONG_TIMEOUT_SECONDS)
    assert (room.client.released, request.leases) == ([], [lease])
    copy.may_go_on.set()
    assert room.finished() == {1: set(KEYS)}
    room.lookups.loads_ended(request)
    wait_until(lambda: room.client.released == [lease.id])
