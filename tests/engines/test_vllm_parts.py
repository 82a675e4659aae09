"""The vLLM connector's parts, one by one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.client import KeyStatus, NotConnected, make_key
from kvtier.client.engines.vllm.background import LimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.copies import make_copier
from kvtier.client.engines.vllm.groups import CacheGeometry, CacheGroup, Unsupported
from kvtier.client.engines.vllm.hits import longest_hit, usable_limit
from kvtier.client.engines.vllm.layout import build_layouts
from kvtier.client.engines.vllm.lookup import LookupService, LookupState
from kvtier.client.engines.vllm.metadata import BlockRead, LoadJob, SaveJob, StepMetadata, WorkerReport
from kvtier.client.engines.vllm.saves import SavePlanner, SaveProgress
from kvtier.client.engines.vllm.worker import WorkerSide

PAGE = 64
FULL = CacheGroup(0, 4, None, ("a", "b"), (PAGE, PAGE))
WINDOW = CacheGroup(1, 4, 7, ("c", "d"), (PAGE, PAGE))


# ---- how far a hit reaches


@pytest.mark.parametrize(("num_tokens", "limit"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_a_token_to_compute(num_tokens: int, limit: int) -> None:
    """B4.2 An exactly aligned prompt loses its last block, one token more keeps all."""
    assert usable_limit(num_tokens, 4) == limit


@pytest.mark.parametrize(
    ("full", "window", "hit"),
    [
        ({0, 1, 2, 3}, {2, 3}, 16),
        ({0, 1, 2, 3}, {3}, 0),  # the window needs two blocks
        ({0, 1, 2, 3}, {0, 1, 3}, 8),
        ({0, 1, 2, 3}, {0}, 4),  # near the start the window is short
        ({0, 1}, {2, 3}, 0),
        ({0, 1}, {0, 1, 2, 3}, 8),
        (set(), {0, 1, 2, 3}, 0),
    ],
)
def test_a_hit_is_one_that_all_groups_can_serve(full: set[int], window: set[int], hit: int) -> None:
    """B4.10 Full attention needs all blocks, a sliding window only the last ones."""
    assert longest_hit([FULL, WINDOW], {0: full, 1: window}, 0, 16, 4) == hit


def test_what_the_engine_has_itself_need_not_be_in_the_store() -> None:
    """Blocks before the start count as present, in the window's group too."""
    assert longest_hit([FULL, WINDOW], {0: {2}, 1: {2}}, 8, 16, 4) == 12


# ---- bytes


def _caches(num_blocks: int) -> dict[str, torch.Tensor]:
    """Four layers carved out of one allocation, as vLLM does it; kernel blocks are half a block."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 255, (4, num_blocks * 2, PAGE // 2), generator=generator, dtype=torch.uint8)
    return dict(zip("abcd", whole.unbind(0), strict=True))


def test_evenly_spaced_layers_move_in_one_copy() -> None:
    """Layers of one allocation are one segment; layers of two allocations are two."""
    caches = _caches(8)
    (layout,) = build_layouts([FULL], caches, 8)
    assert len(layout.segments) == 1
    caches["b"] = caches["b"].clone()
    (layout,) = build_layouts([FULL], caches, 8)
    assert [segment.slot_offset for segment in layout.segments] == [0, PAGE]


@pytest.mark.parametrize("split", [False, True])
def test_blocks_come_back_as_they_went(split: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A block's slot holds its layers' pages in order; copying in puts them where they were, and nowhere else."""
    caches = _caches(8)
    if split:
        caches["b"] = caches["b"].clone()
    copier = make_copier(build_layouts([FULL, WINDOW], caches, 8))
    memory = memoryview(bytearray(1024))
    copier.copy_out(0, [3, 5], memory, [512, 0], copier.mark())
    page = caches["b"].view(8, PAGE)[3]
    assert bytes(memory[512 + PAGE : 512 + 2 * PAGE]) == bytes(page.tolist())
    before = {name: cache.clone() for name, cache in caches.items()}
    copier.copy_in(0, [1, 2], memory, [512, 0], copier.mark())
    for name in "ab":
        blocks, old = caches[name].view(8, PAGE), before[name].view(8, PAGE)
        assert torch.equal(blocks[1], old[3])
        assert torch.equal(blocks[2], old[5])
        assert torch.equal(blocks[3:], old[3:])
    assert all(torch.equal(caches[name], before[name]) for name in "cd")


def test_a_block_that_is_not_one_run_of_bytes_is_refused() -> None:
    """A layout with heads outside of blocks is refused, not copied wrongly."""
    heads_outside = torch.zeros(2, 8, PAGE // 2, dtype=torch.uint8).transpose(0, 1)
    with pytest.raises(Unsupported, match="not one run"):
        build_layouts([CacheGroup(0, 4, None, ("a",), (PAGE,))], {"a": heads_outside}, 8)


# ---- settings


def test_an_unknown_setting_is_a_warning_that_names_the_nearest() -> None:
    """A typo is pointed out."""
    warnings: list[str] = []
    ConnectorConfig.parse({"endpont": "unix:/x"}, warnings.append)
    assert "did you mean 'endpoint'" in warnings[0]


@pytest.mark.parametrize(
    "extra", [{"lookup_timeout_s": "1"}, {"lookup_timeout_s": -1}, {"transport": "rdma"}, {"endpoint": 5}]
)
def test_a_wrong_setting_stops_the_start(extra: dict[str, Any]) -> None:
    """What cannot be meant is said at start, not ignored."""
    with pytest.raises(ValueError, match="kvtier: "):
        ConnectorConfig.parse(extra, lambda _: None)


# ---- saves


class FakePool:
    """References of blocks, like vLLM's block pool."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=1) for number in range(num_blocks)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1


def _request(count: int) -> Any:
    return SimpleNamespace(request_id="r", block_hashes=[bytes([number]) * 32 for number in range(count)])


def _planner(pool: FakePool, world_size: int = 1, held: float = 1.0) -> SavePlanner:
    planner = SavePlanner(CacheGeometry((FULL,), 4, 4), world_size, held)
    planner.bind_pool(pool)
    return planner


def test_blocks_are_offered_once_and_pinned_until_all_workers_report() -> None:
    """B4.5, B5.3 Blocks carry a reference until every worker has ended the job."""
    pool = FakePool()
    planner, progress = _planner(pool, world_size=2), SaveProgress()
    job = planner.plan(_request(4), progress, 13, lambda: [[7, 8, 9, 10]])
    assert job is not None
    assert job.block_ids == [7, 8, 9]
    assert job.keys == [make_key(bytes([number]) * 32, 0) for number in range(3)]
    assert planner.plan(_request(4), progress, 15, lambda: [[7, 8, 9, 10]]) is None
    planner.report({job.job_id: 1})
    assert planner.pending
    assert pool.blocks[8].ref_cnt == 2
    planner.report({job.job_id: 1})
    assert not planner.pending
    assert [pool.blocks[number].ref_cnt for number in (7, 8, 9)] == [1, 1, 1]


def test_a_block_in_flight_is_not_stored_twice_but_its_twin_is() -> None:
    """B5.1, B5.2, B5.4 By block id and across requests; equal content in another block is another block."""
    planner = _planner(FakePool())
    first = planner.plan(_request(2), SaveProgress(), 8, lambda: [[7, 8]])
    assert first is not None
    assert planner.plan(_request(2), SaveProgress(), 8, lambda: [[7, 8]]) is None
    twin = planner.plan(_request(2), SaveProgress(), 8, lambda: [[7, 9]])
    assert twin is not None
    assert twin.block_ids == [9]
    planner.report({first.job_id: 1})
    again = planner.plan(_request(2), SaveProgress(), 8, lambda: [[7, 8]])
    assert again is not None
    assert again.block_ids == [7, 8]  # the server says that it has them


def test_drafts_null_blocks_and_loaded_blocks_are_not_offered() -> None:
    """B4.6, B4.9 Only blocks with a hash, never the null block, never what just came from the server."""
    planner = _planner(FakePool())
    job = planner.plan(_request(4), SaveProgress(loaded=range(4, 8)), 100, lambda: [[7, 8, 0, 10, 11, 12]])
    assert job is not None
    assert job.block_ids == [7, 10]


def test_holding_too_much_puts_the_rest_off() -> None:
    """Saves in flight hold at most their share of the engine's blocks; the rest follows later."""
    planner, progress = _planner(FakePool(8), held=0.25), SaveProgress()
    job = planner.plan(_request(4), progress, 16, lambda: [[1, 2, 3, 4]])
    assert job is not None
    assert job.block_ids == [1, 2]
    assert planner.plan(_request(4), progress, 16, lambda: [[1, 2, 3, 4]]) is None
    planner.report({job.job_id: 1})
    rest = planner.plan(_request(4), progress, 16, lambda: [[1, 2, 3, 4]])
    assert rest is not None
    assert rest.block_ids == [3, 4]


def test_reports_of_workers_add_up() -> None:
    """B3.14 vLLM aggregates what the workers of one step report."""
    assert WorkerReport({1: 1, 2: 1}).aggregate(WorkerReport({2: 1})).ended_saves == {1: 1, 2: 2}


# ---- lookups


class FakeClient:
    """Answers lookups from a set of keys, through hooks that tests replace."""

    def __init__(self, keys: set[bytes] | None = None, before: Callable[[], None] = lambda: None) -> None:
        self.connected = True
        self.keys = keys or set()
        self.before = before
        self.asked: list[int] = []
        self.released: list[int] = []

    def lookup(self, keys: Sequence[bytes], *, request_id: str, wait: float, prefix: bool) -> Any:
        self.before()
        self.asked.append(len(keys))
        number = len(self.asked)
        return SimpleNamespace(
            id=number,
            statuses=bytes(KeyStatus.HIT if key in self.keys else KeyStatus.MISS for key in keys),
            sources=("cpu",) * len(keys),
            release=lambda: self.released.append(number),
        )

    def finish_request(self, request_id: str) -> None:
        pass


def _hashes(*counts: int) -> dict[int, list[bytes]]:
    return {group: [bytes([number]) * 32 for number in range(count)] for group, count in enumerate(counts)}


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def _lookups(client: FakeClient, geometry: CacheGeometry, timeout_s: float = 1.0) -> Iterator[LookupService]:
    service = LookupService(client, geometry, timeout_s, LimitedLog())  # type: ignore[arg-type]
    yield service
    service.close()


def test_only_the_windows_at_the_end_of_the_full_hit_are_asked_for() -> None:
    """B4.10 One call for the full group, one for the last blocks of the sliding windows."""
    client = FakeClient({make_key(bytes([number]) * 32, group) for number in range(3) for group in (0, 1)})
    with _lookups(client, CacheGeometry((FULL, WINDOW), 4, 4)) as service:
        lookup = service.start("r", _hashes(4, 4), 0, 16)
        assert lookup is not None
        _wait_for(lambda: lookup.state is LookupState.DONE)
        assert lookup.hit_tokens == 12
        assert client.asked == [4, 2]
        assert set(lookup.items[1]) == {1, 2}
        service.drop(lookup)
        _wait_for(lambda: sorted(client.released) == [1, 2])


def test_a_lookup_that_nobody_waits_for_gives_its_lease_back() -> None:
    """B4.3 A lookup dropped while it runs releases what it finds."""
    started, gate = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait(5)

    client = FakeClient({make_key(bytes(32), 0)}, before=hang)
    with _lookups(client, CacheGeometry((FULL,), 4, 4), 0.5) as service:
        lookup = service.start("r", _hashes(1), 0, 4)
        assert lookup is not None
        assert started.wait(5)
        service.timed_out(lookup)
        assert service.start("s", _hashes(1), 0, 4) is None  # left in peace for a moment
        gate.set()
        _wait_for(lambda: client.released == [1])


def test_a_server_that_is_not_there_is_a_miss_at_once() -> None:
    """No lookup is begun without a connection; one that fails is a miss."""
    client = FakeClient()
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        client.connected = False
        assert service.start("r", _hashes(1), 0, 4) is None
        client.connected = True

        def fail() -> None:
            raise NotConnected("gone")

        client.before = fail
        lookup = service.start("r", _hashes(1), 0, 4)
        assert lookup is not None
        _wait_for(lambda: lookup.state is LookupState.DONE)
        assert lookup.hit_tokens == 0


# ---- the worker


class FakeTransfers:
    """A client whose reads and writes end as the test says."""

    connected = True

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.memory = memoryview(bytearray(1024))

    @contextlib.contextmanager
    def read(self, lease_id: int, items: Sequence[int]) -> Iterator[Any]:
        yield SimpleNamespace(memory=self.memory, offsets=[2 * PAGE * item for item in items])
        if self.error:
            raise self.error

    @contextlib.contextmanager
    def write(self, keys: Sequence[bytes], *, request_id: str) -> Iterator[Any]:
        yield SimpleNamespace(memory=self.memory, wanted=[1], offsets=[0])
        if self.error:
            raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [None, NotConnected("gone"), ValueError("a defect")])
def test_every_job_is_reported_whatever_happens(error: Exception | None) -> None:
    """Loads that fail are reported as failed, saves as ended: the engine waits for neither for ever."""
    client, caches = FakeTransfers(error), _caches(8)
    worker = WorkerSide(lambda: client, [FULL], "ns", 8, LimitedLog())  # type: ignore[arg-type,return-value]
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
        results, report = worker.results(idle=True), worker.report()
        loaded.update(results.finished_recving)
        failed.update(results.failed_recving)
        ended.update(report.ended_saves if report else {})
        return loaded == {"good", "impossible"} and ended == {1: 1}

    _wait_for(all_reported)
    assert failed == ({"good", "impossible"} if error else {"impossible"})
    if error is None:
        assert bytes(client.memory[:PAGE]) == bytes(caches["a"].view(8, PAGE)[5].tolist())
    worker.close()


def test_a_worker_of_another_namespace_moves_nothing() -> None:
    """Scheduler and worker that disagree about the namespace are a miss, never wrong bytes."""
    worker = WorkerSide(FakeTransfers, [FULL], "ns", 8, LimitedLog())  # type: ignore[arg-type]
    worker.register(_caches(8))
    step = StepMetadata([LoadJob("r", [BlockRead(1, [0], [0], [2])])], [SaveJob(1, "r")], namespace_digest="other")
    worker.start_loads(step)
    worker.start_saves(step)
    assert worker.results(idle=False).failed_recving == {"r"}
    assert worker.report() == WorkerReport({1: 1})
    worker.close()
