"""When the server copies an engine's blocks, and when the engine's worker copies them itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, FakeTransfers, close_when_idle, make_caches

from kvtier.client import AccessDenied, DeviceUnavailable, InvalidRequest, KVTierError, NotConnected, UnsupportedServer
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker import device_route
from kvtier.client.engines.vllm.worker import worker as worker_module
from kvtier.client.engines.vllm.worker.device_route import DeviceRoute, StepMark, cuda_route
from kvtier.client.engines.vllm.worker.reports import WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.offload import SaveJob
from kvtier.cuda.device.device_errors import Cause, DeviceError


class Buffers:
    """The engine's memory as the server sees it. `error`: what `mark` raises."""

    def __init__(self, *_: object) -> None:
        self.error: Exception | None = None
        self.marks: list[object] = []
        self.closed = False

    def mark(self, stream: object) -> Any:
        if self.error is not None:
            raise self.error
        mark = SimpleNamespace(stream=stream, released=0)
        mark.release = lambda: setattr(mark, "released", mark.released + 1)
        self.marks.append(mark)
        return mark

    def close(self) -> None:
        self.closed = True


class DeviceClient:
    """A server that copies between slots and the engine's memory, or raises `error`."""

    def __init__(self, error: KVTierError | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error

    def register_kv_buffers(self, buffers: object) -> None:
        self._call("register")

    def store_from_device(self, keys: Sequence[bytes], blocks: Sequence[int], *, after: Any, request_id: str) -> bytes:
        self._call(f"store {list(blocks)} after {after.stream} for {request_id}")
        return bytes(len(keys))

    def read_to_device(self, lease_id: int, items: Sequence[int], blocks: Sequence[int], *, after: Any) -> None:
        self._call(f"load {lease_id} {list(items)} to {list(blocks)} after {after.stream}")


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(device_route, "KvBuffers", Buffers)
    return DeviceRoute(object(), [], lambda: "stream", RateLimitedLog())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("error", "uses"),
    [
        (None, True),
        (NotConnected("not yet"), True),
        (DeviceUnavailable("no copy worker"), False),
        (InvalidRequest("too many"), False),
    ],
    ids=str,
)
def test_a_server_that_refuses_the_memory_copies_nothing(route: Any, error: KVTierError | None, *, uses: bool) -> None:
    """If no server is connected yet, the client registers the memory when it connects."""
    client = DeviceClient(error)
    assert route.mark() is None, "nothing is registered"
    route.register(client)
    assert (route.mark() is not None) is uses


def test_the_server_copies_behind_the_mark_of_the_step(route: Any) -> None:
    client = DeviceClient()
    route.register(client)
    step = StepMark(None, route.mark(), 2)
    assert route.store(client, [b"k0", b"k1"], [4, 5], step, "r") == bytes(2)
    assert route.load(client, 7, [1, 0], [2, 3], step)
    assert client.calls[1:] == ["store [4, 5] after stream for r", "load 7 [1, 0] to [2, 3] after stream"]
    step.job_ended()
    assert step.mark.released == 0, "a job of the step still runs"
    step.job_ended()
    assert step.mark.released == 1


@pytest.mark.parametrize("case", ["another client", "no mark", "fails", "closed"])
def test_what_the_server_cannot_copy_is_copied_by_the_worker(route: Any, case: str) -> None:
    """Blocks of a peer's server are not in the memory of the own server's copy worker."""
    client = DeviceClient()
    route.register(client)
    step = StepMark(None, None if case == "no mark" else route.mark(), 1)
    client.calls.clear()
    asked = DeviceClient() if case == "another client" else client
    client.error = DeviceUnavailable("gone") if case == "fails" else None
    if case == "closed":
        route.close()
        assert route._buffers.closed
    assert route.store(asked, [b"k0"], [4], step, "r") is None
    assert not route.load(asked, 7, [1], [2], step)
    assert len(client.calls) == (2 if case == "fails" else 0)
    assert case != "another client" or asked.calls == []


def test_a_mark_that_fails_is_none(route: Any) -> None:
    """The worker then copies the blocks of the step itself."""
    route.register(DeviceClient())
    route._buffers.error = DeviceUnavailable("no event")
    assert route.mark() is None
    route._buffers.error = None
    assert route.mark() is not None


@pytest.mark.parametrize("error", [DeviceError(Cause.NO_DRIVER), DeviceUnavailable("no IPC")])
def test_memory_that_cannot_be_shared_has_no_route(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Nor has memory of the CPU."""

    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(device_route, "CudaDriver", fail)
    assert cuda_route([], torch.device("cpu"), RateLimitedLog()) is None
    assert cuda_route([], torch.device("cuda:1"), RateLimitedLog()) is None


# ---- token ids of blocks


@pytest.mark.parametrize(
    ("error", "times"),
    [(None, 2), (InvalidRequest("odd"), 2), (UnsupportedServer("old"), 1), (AccessDenied("no"), 1)],
    ids=str,
)
def test_a_server_that_takes_no_token_ids_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, error: KVTierError | None, times: int
) -> None:
    """The blocks are stored in any case. A refusal of some blocks concerns these only."""
    described: list[list[bytes]] = []

    def describe(_: object, keys: Sequence[bytes], contents: Sequence[object]) -> bool:
        assert len(keys) == len(contents)
        described.append(list(keys))
        if error is not None:
            raise error
        return True

    monkeypatch.setattr(worker_module, "describe_blocks", describe)
    client, reports = FakeTransfers(), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(make_caches(8))
    keys = [b"k0", b"k1"]
    for number in (1, 2):
        job = SaveJob(number, "r", keys, [0, 0], [4, 5], contents=["first", "second"])
        worker.start_saves(StepMetadata([], [job], "ns"))
    close_when_idle(worker)
    assert described == [keys] * times
    assert client.written == [keys] * 2
    report = reports.take_report()
    assert report is not None
    assert report.not_stored == {}


def test_the_server_forgets_tensors_that_are_replaced() -> None:
    """Otherwise it would keep their memory mapped."""
    routes: list[Any] = []

    def route_of(*_: object) -> Any:
        routes.append(SimpleNamespace(closed=0, register=lambda _: None))
        routes[-1].close = lambda route=routes[-1]: setattr(route, "closed", route.closed + 1)
        return routes[-1]

    client: Any = FakeTransfers()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, WorkerReports(), RateLimitedLog(), route_of=route_of)
    for _ in range(2):
        worker.register(make_caches(8))
    assert [route.closed for route in routes] == [1, 0]
    close_when_idle(worker)
