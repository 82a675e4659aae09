"""A worker during sleep, when its KV tensors have no memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, PAGE, FakeTransfers, close_when_idle

from kvtier.client import InvalidRequest, KVTierError, LimitExceeded
from kvtier.client.engines.vllm import background
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.sleep import EngineAsleep, SleepGate
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker.device_route import StepMark
from kvtier.client.engines.vllm.worker.reports import WorkerReport, WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.offload import BlockRead, LoadJob, SaveJob

LOADS = StepMetadata([LoadJob("r", [BlockRead(1, [0], [0], [2])])], [], "ns")
SAVES = StepMetadata([], [SaveJob(1, "r", [b"k0", b"k1"], [0, 0], [4, 5])], "ns")


def _caches() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(8, PAGE, dtype=torch.uint8) for name in ("a", "b")}


@contextlib.contextmanager
def worker_with(connect: Callable[[Any], Any]) -> Iterator[tuple[WorkerSide, WorkerReports]]:
    """A worker and its reports."""
    reports = WorkerReports()
    side = WorkerSide(connect, [FULL], "ns", 8, reports, RateLimitedLog())
    side.register(_caches())
    yield side, reports
    close_when_idle(side)


@contextlib.contextmanager
def _worker(client: Any) -> Iterator[tuple[WorkerSide, WorkerReports, list[int]]]:
    """A worker, its reports, and the number of clients that it created."""
    made: list[int] = []

    def connect(*_: Any) -> Any:
        made.append(1)
        return client

    with worker_with(connect) as (side, reports):
        yield side, reports, made


class Slow:
    """A copier whose copies end when the test releases them."""

    def __init__(self) -> None:
        self.begun, self.gate, self.done = threading.Event(), threading.Event(), 0

    def mark(self) -> None:
        """Nothing to wait for."""

    def copy_out(self, *_: Any) -> None:
        self.begun.set()
        assert self.gate.wait(60)
        self.done += 1

    copy_in = copy_out


@pytest.mark.parametrize("step", [LOADS, SAVES])
def test_a_sleep_waits_for_copies_that_run_and_lets_none_begin(step: StepMetadata) -> None:
    """A copy into freed memory would end the engine; late copies are reported as not done."""
    with _worker(FakeTransfers()) as (side, reports, _):
        slow: Any = Slow()
        side._copiers = (slow,)
        side.start_loads(step)
        side.start_saves(step)
        assert slow.begun.wait(60)
        sleeping = threading.Thread(target=side.suspend, daemon=True)
        sleeping.start()
        sleeping.join(0.1)
        assert sleeping.is_alive(), "it waits for the copy"
        slow.gate.set()
        sleeping.join(60)
        assert slow.done == 1
        side.start_loads(LOADS)
        side.start_saves(SAVES)
        assert slow.done == 1
    assert reports.take_results(idle=False).failed_recving == {"r"}
    report = reports.take_report()
    assert report.not_stored == {1: {0, 1}}


def test_a_copy_that_was_queued_before_the_sleep_does_not_begin_in_it() -> None:
    """A save whose server answers during the sleep stores nothing; the next one works."""
    client = FakeTransfers()
    with _worker(client) as (side, reports, _):
        slow: Any = Slow()
        side._copiers = (slow,)
        slow.gate.set()
        side._gate.close(1)
        side._save(SAVES.saves[0], (client,), StepMark(None, None, 1), 0.0, float("inf"))
        assert not slow.begun.is_set()
        assert reports.take_report() == WorkerReport({1: 1}, {1: {0, 1}})
        side.resume()
        side._save(SAVES.saves[0], (client,), StepMark(None, None, 1), 0.0, float("inf"))
        assert slow.done == 1
        assert reports.take_report() == WorkerReport({1: 1})


def test_after_waking_up_all_is_as_before() -> None:
    """Hooks may be called twice, or with other tensors: one connection, copies to the new ones."""
    client = FakeTransfers()
    with _worker(client) as (side, reports, made):
        side.suspend()
        side.suspend()
        side.resume()
        side.resume()
        caches = {name: cache + 7 for name, cache in _caches().items()}
        side.register(caches)
        side.start_saves(SAVES)
    assert made == [1]
    assert reports.take_report() == WorkerReport({1: 1})
    assert bytes(client.memory[: 2 * PAGE]) == bytes([7]) * (2 * PAGE)


def test_the_gate_counts_copies() -> None:
    """The event is released when the last job has ended."""
    gate = SleepGate()
    with gate.copying():
        with gate.copying():
            pass
        assert not gate.close(0.01)
        with pytest.raises(EngineAsleep), gate.copying():
            pass
    assert gate.close(0.01)
    gate.open()
    assert gate.is_open


@pytest.mark.parametrize(("error", "again"), [(InvalidRequest("odd"), True), (LimitExceeded("full"), False)])
def test_a_refusal_of_one_save_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, error: KVTierError, *, again: bool
) -> None:
    """A refusal affects one request; a failure opens the circuit for a moment."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    client = FakeTransfers(error)
    with _worker(client) as (side, _, _):
        side._copiers = (SimpleNamespace(mark=lambda: None, copy_out=lambda *_: None),)  # type: ignore[assignment]
        side.start_saves(SAVES)
        side.start_saves(SAVES)
    assert len(client.written) == (2 if again else 1)
