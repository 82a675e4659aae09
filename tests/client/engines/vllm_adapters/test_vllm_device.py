"""Copies by the server's copy worker, with shared memory in place of a GPU, and a real server."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, PAGE, WINDOW, FakeTransfers
from harness.polling import wait_until

sys.path.append(str(Path(__file__).parents[3] / "cuda"))

from devices.kv import pieces_of
from devices.service import Service

from kvtier.client import Client, Group, KeyStatus, Namespace, Timeouts, make_key
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.layout import build_layouts
from kvtier.client.engines.vllm.stats import TransferCounters
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker.device_route import DeviceRoute, StepMark, cuda_route, describe_layout
from kvtier.client.engines.vllm.worker.reports import WorkerReport, WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.offload import BlockRead, LoadJob, SaveJob
from kvtier.cuda.device.driver_contract import MemoryKind, StreamId
from kvtier.cuda.testing.host_driver import HostDriver

BLOCKS = 8
NAMESPACE = Namespace("vllm on a device", "uint8", (Group(2 * PAGE, 4), Group(2 * PAGE, 4)))
GROUPS = [number % 2 for number in range(4)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server whose copy workers copy within shared memory."""
    with Service(tmp_path_factory.mktemp("vllm"), region=16 << 20) as running:
        yield running


class Worker:
    """A worker whose KV tensors the copy worker can open, and a second client."""

    def __init__(self, service: Service, kind: MemoryKind = MemoryKind.SHAREABLE) -> None:
        self.driver = HostDriver()
        self.stream = self.driver.create_stream()
        nbytes = 4 * BLOCKS * PAGE
        address = self.driver.allocate(nbytes, kind)
        self.whole = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
        self.caches = dict(zip("abcd", self.whole.view(4, BLOCKS, PAGE).unbind(0), strict=True))
        # New content: after a reset, a lookup would promote the lower tier's blocks.
        self.keys = [make_key(os.urandom(32), group) for group in GROUPS]
        self.reports, self.counters, self.log = WorkerReports(), TransferCounters(), RateLimitedLog()
        self.side = WorkerSide(
            lambda *_: self.connect(service, "worker"),
            [FULL, WINDOW],
            "ns",
            BLOCKS,
            self.reports,
            self.log,
            self.counters,
            route_of=lambda layouts, _, log: DeviceRoute(self.driver, layouts, lambda: self.stream, log),
        )
        self.client = self.connect(service, "test")
        self.client.wait_until_connected(60)

    @staticmethod
    def connect(service: Service, name: str) -> Client:
        timeouts = Timeouts(connect=60, call=60, device=60)
        return Client(service.server.endpoint, namespace=NAMESPACE, name=name, engine_id="engine", timeouts=timeouts)

    def fill(self, seed: int) -> torch.Tensor:
        """Fills all tensors with random bytes; returns a copy."""
        self.whole.copy_(torch.randint(0, 255, self.whole.shape, generator=torch.Generator().manual_seed(seed)))
        return self.whole.clone()

    def page(self, whole: torch.Tensor, group: int, block: int) -> bytes:
        layers = whole.view(4, BLOCKS, PAGE)[2 * group : 2 * group + 2, block]
        return bytes(layers.flatten().tolist())

    def save(self, block_ids: list[int], number: int = 1) -> WorkerReport | None:
        """Saves blocks under `keys`; returns the report."""
        self.side.start_saves(StepMetadata([], [SaveJob(number, "r", self.keys, GROUPS, block_ids)], "ns"))
        reports: list[WorkerReport] = []

        def reported() -> bool:
            report = self.reports.take_report()
            reports.extend([report] if report else [])
            return bool(reports)

        wait_until(reported)
        return reports[0]

    def load(self, block_ids: list[int]) -> Any:
        """Loads `keys` into blocks; returns the report."""
        with self.client.lookup(self.keys) as lease:
            read = BlockRead(lease.id, [0, 1, 2, 3], GROUPS, block_ids)
            self.side.start_loads(StepMetadata([LoadJob("l", [read])], [], "ns"))
            results: list[Any] = []

            def reported() -> bool:
                result = self.reports.take_results(idle=True)
                results.extend([result] if result.finished_recving else [])
                return bool(results)

            wait_until(reported)
        return results[0]

    def close(self) -> None:
        self.side.close()
        self.client.reset(wait=5)
        self.client.close()


@pytest.fixture
def worker(service: Service) -> Iterator[Worker]:
    """A worker whose blocks the server has opened."""
    made = Worker(service)
    made.side.register(made.caches)
    wait_until(lambda: made.side._route is not None and made.side._route._client is not None)
    yield made
    made.close()


def test_blocks_go_over_the_mover_and_come_back(service: Service, worker: Worker) -> None:
    """Slots hold the bytes of the engine's own copies, and blocks are restored, for each group."""
    before = worker.fill(1)
    assert worker.save([3, 5, 0, 7]) == WorkerReport({1: 1})
    assert "cuda_ipc" in {session.transport for session in service.server.status().sessions}
    buffers = [bytearray(2 * PAGE) for _ in worker.keys]
    assert worker.client.load(worker.keys, buffers) == 4
    pages = [worker.page(before, group, block) for group, block in zip(GROUPS, [3, 5, 0, 7], strict=True)]
    assert [bytes(buffer) for buffer in buffers] == pages
    worker.fill(2)
    assert not worker.load([4, 4, 6, 1]).failed_recving
    blocks = zip(GROUPS, [4, 4, 6, 1], strict=True)
    assert [worker.page(worker.whole, group, block) for group, block in blocks] == pages
    stats = worker.counters.take()
    assert stats.data["save_bytes"] == stats.data["load_bytes"] == 8 * PAGE


def test_saves_and_loads_wait_for_the_compute(worker: Worker) -> None:
    """B4.11 The server reads nothing before the step's compute is over."""
    over = threading.Event()
    worker.driver._streams[worker.stream].submit(lambda: over.wait(60) and None)
    worker.fill(3)
    worker.side.start_saves(StepMetadata([], [SaveJob(1, "r", worker.keys, GROUPS, [0, 1, 2, 3])], "ns"))
    wait_until(lambda: KeyStatus.HIT_PENDING in worker.client.lookup(worker.keys, prefix=False).statuses)
    after = worker.fill(4)
    over.set()
    wait_until(lambda: worker.reports.take_report() is not None)
    buffers = [bytearray(2 * PAGE) for _ in worker.keys]
    assert worker.client.load(worker.keys, buffers) == 4
    assert bytes(buffers[0]) == worker.page(after, 0, 0)
    wait_until(lambda: worker.side._route is not None and len(worker.side._route._buffers._free) == 64)


def test_loads_of_nothing_take_no_mark(worker: Worker) -> None:
    """B4.4 A step whose loads have nothing to read reports failures and keeps no events."""
    worker.side.start_loads(StepMetadata([LoadJob("l", [])], [], "ns"))
    assert worker.reports.take_results(idle=True).failed_recving == {"l"}
    assert len(worker.side._route._buffers._free) == 64


def test_a_mover_that_is_killed_costs_nothing(service: Service, worker: Worker) -> None:
    """The engine copies itself while the server cannot, and the server copies again later."""
    before = worker.fill(5)
    for number in range(4):
        for pid in service.copy_workers:
            os.kill(pid, signal.SIGKILL)
        assert worker.save([0, 1, 2, 3], number) == WorkerReport({number: 1})
        assert not worker.load([4, 5, 6, 7]).failed_recving
        assert worker.page(worker.whole, 0, 4) == worker.page(before, 0, 0)
        worker.client.reset(wait=5)
    wait_until(lambda: worker.save([0, 1, 2, 3], 9) is not None and bool(service.copy_workers))


def test_a_server_without_devices(tmp_path: Path) -> None:
    """Works as without the device route."""
    with Service(tmp_path, driver="off") as plain:
        made = Worker(plain)
        made.side.register(made.caches)
        before = made.fill(6)
        assert made.save([0, 1, 2, 3]) == WorkerReport({1: 1})
        assert not made.load([4, 5, 6, 7]).failed_recving
        assert made.page(made.whole, 1, 5) == made.page(before, 1, 1)
        assert made.side._route.mark() is None
        made.close()


def test_tensors_that_come_anew(worker: Worker) -> None:
    """Replaced KV tensors are registered instead of the old ones."""
    earlier = worker.side._route
    worker.side.register(worker.caches)
    wait_until(lambda: worker.side._route is not None and worker.side._route._client is not None)
    assert worker.side._route is not earlier
    before = worker.fill(7)
    worker.save([0, 1, 2, 3])
    worker.load([4, 5, 6, 7])
    assert worker.page(worker.whole, 0, 6) == worker.page(before, 0, 2)


def test_on_the_cpu_there_is_no_such_way() -> None:
    """CUDA is not used, and jobs have no mark."""
    caches = {name: torch.zeros(BLOCKS, PAGE, dtype=torch.uint8) for name in "ab"}
    assert cuda_route(build_layouts([FULL], caches, BLOCKS), torch.device("cpu"), RateLimitedLog()) is None
    worker = WorkerSide(lambda *_: FakeTransfers(), [FULL], "ns", BLOCKS, WorkerReports(), RateLimitedLog())  # type: ignore[arg-type]
    worker.register(caches)
    assert worker._mark(1).mark is None
    worker.close()


def test_blocks_of_a_peer_do_not_go_over_the_own_server(worker: Worker) -> None:
    """The copy worker of the own server cannot read leases of other servers."""
    route, released = worker.side._route, list[str]()
    assert route is not None
    mark: Any = SimpleNamespace(release=lambda: released.append("released"))
    after = StepMark(None, mark, 2)
    assert not route.load(worker.client, 1, [0], [0], after)
    assert route.store(worker.client, worker.keys, [0, 1, 2, 3], after, "r") is None
    after.job_ended()
    assert not released, "another job of the step waits for the event"
    after.job_ended()
    assert released == ["released"]


def test_layers_of_one_allocation_are_one_run() -> None:
    """A block of many layers is few runs, at the addresses of its tensors."""
    whole = torch.zeros(4, BLOCKS, PAGE, dtype=torch.uint8)
    layout, addresses = describe_layout(
        build_layouts([FULL], dict(zip("ab", whole[1:3].unbind(0), strict=True)), BLOCKS)[0]
    )
    assert (layout.num_blocks, layout.part_bytes, len(layout.runs)) == (BLOCKS, 2 * PAGE, 1)
    assert addresses == [whole[1].data_ptr()]
    assert [piece.offset for piece in pieces_of(layout, 2)] == [2 * PAGE, 2 * PAGE + BLOCKS * PAGE]


def test_the_connector_takes_the_setting() -> None:
    """`transport` may be cuda_ipc."""
    assert ConnectorConfig.parse({"transport": "cuda_ipc"}, pytest.fail).transport == "cuda_ipc"
    assert StreamId(0) == 0
