"""The vLLM connector's worker half: jobs, their reports, threads and batches."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import FULL, PAGE, WINDOW, FakeTransfers, close_when_idle, make_caches
from handoff_engine import BLOCK, TOKEN_BYTES, ToyEngine, kv_of
from harness.polling import wait_until
from harness.recorded_calls import record_calls
from harness.server_process import ServerProcess

from kvtier.client import NotConnected, StoreStatus
from kvtier.client.engines.vllm import background
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.peers import OWN, Peers
from kvtier.client.engines.vllm.stats import TransferCounters
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker import worker as worker_module
from kvtier.client.engines.vllm.worker.reports import SAVE_WITHIN_S, WorkerReport, WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.offload import BlockRead, LoadJob, SaveJob


@pytest.mark.parametrize("error", [None, NotConnected("gone"), ValueError("a defect")])
def test_every_job_is_reported_after_a_failure(error: Exception | None) -> None:
    """Failed loads are reported as failed and failed saves as ended, so that the engine goes on."""
    client, caches = FakeTransfers(error), make_caches(8)
    reports = WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(caches)
    step = StepMetadata(
        loads=[LoadJob("good", [BlockRead(1, [0], [0], [2])]), LoadJob("impossible")],
        saves=[SaveJob(1, "r", [b"k0", b"k1"], [0, 0], [4, 5])],
        namespace_digest="ns",
    )
    worker.start_loads(step)
    worker.start_saves(step)
    loaded: set[str] = set()
    failed: set[str] = set()
    ended: dict[int, int] = {}

    def all_reported() -> bool:
        results, report = reports.take_results(idle=True), reports.take_report()
        loaded.update(results.finished_recving)
        failed.update(results.failed_recving)
        ended.update(report.ended_saves if report else {})
        return loaded == {"good", "impossible"} and ended == {1: 1}

    wait_until(all_reported)
    assert failed == ({"good", "impossible"} if error else {"impossible"})
    if error is None:
        assert bytes(client.memory[:PAGE]) == bytes(caches["a"].view(8, PAGE)[5].tolist())
    close_when_idle(worker)


def test_a_load_reads_from_all_of_its_leases() -> None:
    """Blocks of several groups, or of several calls of a lookup, have leases of their own."""
    client, caches, reports, leases = FakeTransfers(), make_caches(8), WorkerReports(), []
    read = client.read
    client.read = lambda lease, items, **slots: leases.append((lease, list(items))) or read(lease, items, **slots)  # type: ignore[method-assign, func-returns-value]
    client.memory[:] = bytes([9]) * len(client.memory)
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(caches)
    reads = [BlockRead(1, [0, 1], [0, 0], [2, 3], slots="slots of 1"), BlockRead(2, [2], [0], [5])]
    worker.start_loads(StepMetadata([LoadJob("r", reads)], [], "ns"))
    wait_until(lambda: reports.take_results(idle=True).finished_recving == {"r"})
    close_when_idle(worker)
    assert leases == [(1, [0, 1]), (2, [2])]
    assert client.slots == ["slots of 1", None]
    filled = [block for block in range(8) if (caches["a"].view(8, PAGE)[block] == 9).all()]
    assert filled == [2, 3, 5]


class Shelf(FakeTransfers):
    """A server of blocks by key: each part lies at an odd place, and it has some keys already."""

    def __init__(self, had: set[bytes], items: list[bytes]) -> None:
        super().__init__(max_keys=4)
        self.had, self.items = had, items
        self.parts: dict[bytes, bytes] = {}

    @contextlib.contextmanager
    def write(self, keys: Sequence[bytes], *, request_id: str) -> Iterator[Any]:
        wanted = [index for index, key in enumerate(keys) if key not in self.had]
        offsets = [2 * PAGE * (3 - number) + 8 for number in range(len(wanted))]
        statuses = bytes(StoreStatus.PRESENT if key in self.had else StoreStatus.GRANTED for key in keys)
        self.written.append(list(keys))
        yield SimpleNamespace(memory=self.memory, wanted=wanted, offsets=offsets, statuses=statuses)
        for index, offset in zip(wanted, offsets, strict=True):
            self.parts[keys[index]] = bytes(self.memory[offset : offset + 2 * PAGE])

    @contextlib.contextmanager
    def read(self, lease_id: int, items: Sequence[int], *, slots: object) -> Iterator[Any]:
        offsets = [2 * PAGE * (3 - number) + 8 for number in range(len(items))]
        for item, offset in zip(items, offsets, strict=True):
            self.memory[offset : offset + 2 * PAGE] = self.parts[self.items[item]]
        yield SimpleNamespace(memory=self.memory, offsets=offsets)


@pytest.mark.parametrize("seed", range(4))
def test_each_block_of_mixed_groups_gets_its_own_bytes(seed: int) -> None:
    """Blocks of two groups in any order, in several batches, of which the server has some."""
    order = random.Random(seed)
    blocks = [(group, block) for group in (0, 1) for block in range(2, 8)]
    order.shuffle(blocks)
    keys = [bytes([group, block]) for group, block in blocks]
    had = set(order.sample(keys, 4))
    client, caches, reports, counters = (
        Shelf(had, order.sample(keys, 12)),
        make_caches(16),
        WorkerReports(),
        TransferCounters(),
    )
    worker = WorkerSide(
        lambda *_: client,  # type: ignore[arg-type,return-value]
        [FULL, WINDOW],
        "ns",
        16,
        reports,
        RateLimitedLog(),
        counters,
    )
    worker.register(caches)

    def bytes_of(group: int, block: int) -> bytes:
        return b"".join(caches[name].view(16, PAGE)[block].numpy().tobytes() for name in ("ab", "cd")[group])

    expected = {key: bytes_of(*place) for key, place in zip(keys, blocks, strict=True)}
    job = SaveJob(1, "r", keys, [group for group, _ in blocks], [block for _, block in blocks])
    worker.start_saves(StepMetadata([], [job], "ns"))
    assert wait_until(reports.take_report) == WorkerReport({1: 1})
    assert client.written == [keys[first : first + 4] for first in range(0, 12, 4)]
    assert client.parts == {key: part for key, part in expected.items() if key not in had}
    places = [(key, client.items.index(key), key[0], key[1] + 8) for key in keys if key not in had]
    read = BlockRead(1, *([place[column] for place in places] for column in (1, 2, 3)))
    worker.start_loads(StepMetadata([LoadJob("r", [read])], [], "ns"))
    wait_until(lambda: reports.take_results(idle=True).finished_recving == {"r"})
    close_when_idle(worker)
    assert {key: bytes_of(group, block) for key, _, group, block in places} == client.parts
    stats = counters.take()
    assert stats is not None
    assert [stats.data[name] for name in ("save_bytes", "load_bytes")] == [8 * 2 * PAGE] * 2


@pytest.mark.parametrize(("last", "failed"), [([BlockRead(1, [0], [0], [2])], False), ([], True)])
def test_a_job_without_blocks_fails_only_as_the_last_of_its_load(last: list[BlockRead], *, failed: bool) -> None:
    """A pull that waits for the blocks of another engine may begin with nothing."""
    reports = WorkerReports()
    worker = WorkerSide(lambda *_: FakeTransfers(), [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))
    worker.start_loads(StepMetadata([LoadJob("r", [], is_last=False)], [], "ns"))
    assert not reports.take_results(idle=False).finished_recving
    worker.start_loads(StepMetadata([LoadJob("r", last)], [], "ns"))
    ended: list[Any] = []
    wait_until(lambda: ended.append(reports.take_results(idle=True)) or bool(ended[-1].finished_recving))
    assert ended[-1].failed_recving == ({"r"} if failed else set())
    close_when_idle(worker)


def test_a_worker_of_another_namespace_moves_nothing() -> None:
    """If scheduler and worker disagree about the namespace, all is a miss."""
    reports = WorkerReports()
    worker = WorkerSide(lambda *_: FakeTransfers(), [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type]
    worker.register(make_caches(8))
    step = StepMetadata(
        [LoadJob("r", [BlockRead(1, [0], [0], [2])])], [SaveJob(1, "r", [b"k"], [0], [3])], namespace_digest="other"
    )
    worker.start_loads(step)
    worker.start_saves(step)
    assert reports.take_results(idle=False).failed_recving == {"r"}
    assert reports.take_report() == WorkerReport({1: 1}, {1: {0}})
    close_when_idle(worker)


def test_a_worker_whose_bytes_another_rank_stores_reports_saves() -> None:
    """B4.5 It stores nothing, but the scheduler waits for the report of each worker."""
    client, reports = FakeTransfers(), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog(), stores=False)  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", [b"k"], [0], [3])], "ns"))
    close_when_idle(worker)
    assert client.written == []
    assert reports.take_report() == WorkerReport({1: 1})


def test_a_worker_says_what_it_did_not_store() -> None:
    """B3.5 Blocks without room, or of another writer, do not count as stored."""
    client, reports = FakeTransfers(max_keys=4), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))
    keys = [bytes([number]) * 8 for number in range(6)]
    job = SaveJob(1, "r", keys, [0] * 6, [1, 2, 3, 4, 5, 6])
    worker.start_saves(StepMetadata(saves=[job], namespace_digest="ns"))
    close_when_idle(worker)
    assert client.written == [keys[:4], keys[4:]]
    assert reports.take_report() == WorkerReport({1: 1}, {1: {2, 3}})


def test_one_event_per_step_and_kind_taken_when_the_compute_was_submitted() -> None:
    """B4.4, B4.11 A step's loads wait for one event, and its saves for another."""
    client, reports, copied = FakeTransfers(), WorkerReports(), []
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))
    marks = iter(("loads 1", "saves 1", "saves 2"))
    worker._copiers = (
        SimpleNamespace(  # type: ignore[assignment]
            mark=lambda: next(marks),
            copy_in=lambda _group, ids, _memory, _offsets, after: copied.append((ids, after)),
            copy_out=lambda _group, ids, _memory, _offsets, after: copied.append((ids, after)),
        ),
    )
    loads = [LoadJob(name, [BlockRead(1, [0], [0], [block])]) for name, block in (("r", 2), ("s", 3))]
    saves = [SaveJob(number, "t", [b"k0", b"k1"], [0, 0], [4, 4 + number]) for number in (1, 2)]
    worker.start_loads(StepMetadata(loads, [], "ns"))
    worker.start_saves(StepMetadata([], saves, "ns"))
    worker.start_saves(StepMetadata([], [SaveJob(3, "t", [b"k0", b"k1"], [0, 0], [4, 7])], "ns"))
    close_when_idle(worker)
    expected = [([2], "loads 1"), ([3], "loads 1"), ([5], "saves 1"), ([6], "saves 1"), ([7], "saves 2")]
    assert sorted(copied) == expected


def test_memory_of_every_client_of_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4.16 The server's region and the staging buffers for all servers are pinned."""
    pin, given = object(), list[object]()

    def connect(_piece: int, pin: object) -> FakeTransfers:
        given.append(pin)
        return FakeTransfers()

    def peers_of(_piece: int, own: Any, pin: object) -> Peers:
        given.append(pin)
        return Peers(own)

    monkeypatch.setattr(WorkerSide, "_pin_for", lambda *_: pin)
    worker = WorkerSide(connect, [FULL], "ns", 8, WorkerReports(), RateLimitedLog(), peers_of=peers_of)  # type: ignore[arg-type]
    worker.register(make_caches(8))
    close_when_idle(worker)
    assert given == [pin, pin]


@pytest.mark.parametrize("late", [False, True])
def test_a_save_that_is_old_is_not_begun(*, late: bool) -> None:
    """B5.6 A worker that was stopped for long reads no block that its scheduler has released."""
    client, reports = FakeTransfers(), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))
    sent_at = time.time() - (SAVE_WITHIN_S if late else 0)
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", [b"k0", b"k1"], [0, 0], [4, 5])], "ns", sent_at=sent_at))
    close_when_idle(worker)
    assert client.written == ([] if late else [[b"k0", b"k1"]])
    assert reports.take_report() == WorkerReport({1: 1}, {1: {0, 1}} if late else {})


def test_a_slow_peer_delays_no_load_from_the_own_server() -> None:
    """Loads of each server have a thread, and loads do not wait for saves."""
    gate, reports, caches = threading.Event(), WorkerReports(), make_caches(8)

    class Slow(FakeTransfers):
        @contextlib.contextmanager
        def read(self, lease_id: int, items: Any, *, slots: object = None) -> Iterator[Any]:
            assert gate.wait(60)
            with super().read(lease_id, items, slots=slots) as batch:
                yield batch

        write = read  # type: ignore[assignment]

    own, slow = FakeTransfers(), Slow()
    saves = Slow()
    saves.read = own.read  # type: ignore[method-assign]
    peers = Peers(saves, connect=lambda _: slow, allowed=["peer:1"])  # type: ignore[arg-type, return-value]
    worker = WorkerSide(
        lambda *_: saves,
        [FULL],
        "ns",
        8,
        reports,
        RateLimitedLog(),
        peers_of=lambda *_: peers,  # type: ignore[arg-type]
    )
    worker.register(caches)
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", [b"k0"], [0], [4])], "ns"))
    for name, endpoint in (("far", "peer:1"), ("near", OWN)):
        read = BlockRead(1, [0], [0], [2], endpoint=endpoint)
        worker.start_loads(StepMetadata([LoadJob(name, [read])], [], "ns"))
    wait_until(lambda: reports.take_results(idle=True).finished_recving == {"near"})
    gate.set()
    wait_until(lambda: reports.take_results(idle=True).finished_recving == {"far"})
    close_when_idle(worker)
    (of_peer,) = worker._peer_load_threads.values()
    assert not any(thread.is_alive() for thread in of_peer._threads)


def test_saves_pause_after_a_failure_and_then_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server hangs, saves do not hold blocks. Loads are tried in any case."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, time=time.time)
    monkeypatch.setattr(worker_module, "time", clock)
    monkeypatch.setattr(background, "time", clock)
    client, reports = FakeTransfers(NotConnected("gone")), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))

    def save(number: int) -> WorkerReport:
        worker.start_saves(StepMetadata([], [SaveJob(number, "r", [b"k0", b"k1"], [0, 0], [4, 5])], "ns"))
        return wait_until(reports.take_report)

    assert save(1) == WorkerReport({1: 1}, {1: {0, 1}})
    client.error = None
    assert save(2) == WorkerReport({2: 1}, {2: {0, 1}})
    assert len(client.written) == 1
    clock.now += background._CIRCUIT_OPEN_S
    assert save(3) == WorkerReport({3: 1}, {})
    assert len(client.written) == 2
    close_when_idle(worker)


def test_a_save_to_the_old_namespace_that_fails_pauses_no_save_to_the_new_one() -> None:
    """B4.17 The client of the old weights is closed, so its last saves fail."""
    begun, gate, reports = threading.Event(), threading.Event(), WorkerReports()

    class Slow(FakeTransfers):
        @contextlib.contextmanager
        def write(self, keys: Any, *, request_id: str) -> Iterator[Any]:
            begun.set()
            assert gate.wait(60)
            with super().write(keys, request_id=request_id) as batch:
                yield batch

    old, new = Slow(NotConnected("closed")), FakeTransfers()
    clients = iter((old, new))
    worker = WorkerSide(lambda *_: next(clients), [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", [b"k0", b"k1"], [0, 0], [4, 5])], "ns"))
    assert begun.wait(60)
    worker.reconnect("new")
    gate.set()
    assert wait_until(reports.take_report) == WorkerReport({1: 1}, {1: {0, 1}})
    worker.start_saves(StepMetadata([], [SaveJob(2, "r", [b"k0", b"k1"], [0, 0], [4, 5])], "new"))
    assert wait_until(reports.take_report) == WorkerReport({2: 1})
    assert new.written == [[b"k0", b"k1"]]
    close_when_idle(worker)


def test_a_large_save_is_made_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch holds slots of the server until it is copied. A block may be larger than a batch."""
    for batch_bytes, batches in ((4 * PAGE, [2, 1]), (1, [1, 1, 1])):
        monkeypatch.setattr(worker_module, "_BATCH_BYTES", batch_bytes)
        client: Any = FakeTransfers()
        client.write = functools.partial(_write_present, client)
        reports = WorkerReports()
        worker = WorkerSide(lambda *_, client=client: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[misc]
        worker.register(make_caches(8))
        worker.start_saves(StepMetadata([], [SaveJob(1, "r", [b"0", b"1", b"2"], [0] * 3, [4, 5, 6])], "ns"))
        close_when_idle(worker)
        assert [len(keys) for keys in client.written] == batches
        assert reports.take_report() == WorkerReport({1: 1})


@contextlib.contextmanager
def _write_present(client: FakeTransfers, keys: list[bytes], **_: Any) -> Iterator[Any]:
    client.written.append(keys)
    yield SimpleNamespace(
        memory=client.memory, wanted=[], offsets=[], statuses=bytes([StoreStatus.PRESENT] * len(keys))
    )


def test_a_stored_prefix_takes_two_calls_before_the_first_token(tmp_path: Path) -> None:
    """The workers get the slots from the scheduler, and call the server only after the copy."""
    prompt = list(range(100, 100 + 4 * BLOCK + 1))
    with ServerProcess(tmp_path).start() as server:
        engine = ToyEngine(server.endpoint, "a")
        try:
            engine.run(prompt)
            calls = record_calls(engine.scheduler._client, *engine.worker._clients)
            request, table = engine.arrive(prompt), [1, 2, 3, 4, 5]
            hit = engine.match(request)
            assert hit == 4 * BLOCK
            assert engine._load(request, table, hit)
            in_background = {"CacheService/ReleaseLease", "CacheService/FinishRequest"}
            before_first_token = [call for call in calls if call not in in_background]
            assert before_first_token == ["CacheService/BeginRequest", "CacheService/CompleteLoad"]
            assert engine._read(table)[: hit * TOKEN_BYTES] == kv_of(prompt[:hit])
            engine.end(request, table, "FINISHED_STOPPED")
            engine.settle()
        finally:
            engine.close()
