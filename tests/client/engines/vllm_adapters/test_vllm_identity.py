"""Engines do not wait for the digests of their model's files. Until then every request misses."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from connector_fakes import FULL, PAGE, FakeClient, FakePool, FakeTransfers, await_namespace, make_request, make_step
from engine_config import engine_config
from harness.polling import wait_until
from tier_fixtures import KEYS, ROW, make_config, request_of
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvtier.client import Namespace, make_key
from kvtier.client.engines import identity
from kvtier.client.engines.identity import WEIGHTS, namespace_digest
from kvtier.client.engines.vllm import KVTierConnector, connector
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.compat import KVConnectorRole
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker.reports import WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.engines.vllm_tier import KVTierSecondaryTier, manager
from kvtier.client.engines.vllm_tier.compat import LookupResult
from kvtier.client.offload import BlockRead, LoadJob, SaveJob

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
CACHE = KVCacheConfig(8, [], [KVCacheGroupSpec(["layer.0"], SPEC)])


class Server(FakeClient):
    """A client that is connected at once and finds the blocks 0 and 1."""

    transport = "none"

    def __init__(self, namespace: Namespace) -> None:
        super().__init__({make_key(bytes([number]) * 32, 0) for number in range(2)})
        self.namespace = namespace

    def wait_until_connected(self, _: float) -> None:
        pass


class Files:
    """Digest of the model's files that the test delays, or that fails."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.error: Exception | None = None
        self.reads = 0

    def identify(self, *_: object, **__: object) -> str:
        self.reads += 1
        assert self.known.wait(60)
        if self.error is not None:
            raise self.error
        return "digest"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    files = Files()
    monkeypatch.setattr(identity, "fingerprint_of", files.identify)
    yield files
    files.known.set()


Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Creates a connector of an engine with a model in a folder."""
    made: list[KVTierConnector] = []
    monkeypatch.setattr(connector, "Client", lambda _endpoint, *, namespace, **_: Server(namespace))

    def make(role: Any = SCHEDULER, **extra: Any) -> KVTierConnector:
        made.append(KVTierConnector(engine_config(str(tmp_path), extra), role, CACHE))
        if role is SCHEDULER:
            made[-1].bind_gpu_block_pool(FakePool())
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def step_of(made: Any, tables: dict[str, list[list[int]]] | None = None, **scheduled: int) -> StepMetadata:
    step: StepMetadata = made.build_connector_meta(make_step(tables or {}, **scheduled))
    return step


def test_until_the_digest_is_known_requests_miss(make: Make, files: Files) -> None:
    """The engine starts and computes. When the digest is known, later requests hit."""
    made = make()
    request = make_request(2, "early", num_computed_tokens=0)
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    early = step_of(made, {"early": [[1, 2]]}, early=8)
    assert (early.loads, early.saves, early.namespace, early.namespace_digest) == ([], [], b"", "")
    assert not made.has_pending_push_work(), "the engine need not step until the digest is known"
    files.known.set()
    await_namespace(made)
    late = make_request(3, "late")
    made.on_new_request(late)
    wait_until(lambda: made.get_num_new_matched_tokens(late, 0) == (8, True))
    assert files.reads == 1
    step = step_of(made, {"early": [[1, 2]]}, early=8)
    assert [job.block_ids for job in step.saves] == [[1, 2]], "a running request is saved now"
    namespace = pickle.loads(step.namespace)  # noqa: S301 - our own
    assert step.namespace_digest == namespace_digest(namespace)
    assert namespace.attributes[WEIGHTS] == "digest"


@pytest.mark.usefixtures("files")
def test_requests_that_end_before_the_digest_is_known(make: Make) -> None:
    """Nothing is registered at a server or handed on, and nothing waits."""
    made = make()
    request = make_request(2, "early", num_computed_tokens=8, kv_transfer_params={"do_remote_decode": True})
    made.on_new_request(request)
    step_of(made, {"early": [[1, 2]]}, early=8)
    assert made.request_finished_all_groups(request, ([1, 2],)) == (False, None)
    assert not made.has_pending_push_work()


@pytest.mark.parametrize("error", [PermissionError("config.json"), OSError("w.bin has changed"), KeyError("a defect")])
def test_without_a_digest_every_request_misses(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """There is one warning, which has the cause. A reset of the engine does not change this."""
    warnings: list[str] = []
    monkeypatch.setattr(RateLimitedLog, "warn", lambda _self, _kind, text, **_: warnings.append(text))
    files.error = error
    files.known.set()
    made = make()
    wait_until(lambda: bool(warnings))
    for number in range(2):
        request = make_request(2, f"request {number}")
        made.on_new_request(request)
        assert made.get_num_new_matched_tokens(request, 0) == (0, False)
        assert step_of(made).namespace == b""
        made.reset_cache()
    assert warnings
    assert all("every request is a miss" in text and str(error) in text for text in warnings)
    assert files.reads <= 3, "one read at the start, and at most one per reset"


def test_weights_that_change_before_the_digest_is_known(make: Make, files: Files) -> None:
    """The engine never enters the namespace of the files, because it has other weights by then."""
    made = make()
    assert made.reset_cache()
    files.known.set()
    await_namespace(made)
    namespace = pickle.loads(step_of(made).namespace)  # noqa: S301 - our own
    assert namespace.attributes["weights_version"].startswith("reset ")


def test_a_reset_that_keeps_the_weights(make: Make, files: Files) -> None:
    """There is nothing to empty. The engine then enters the namespace of its files."""
    made = make(weights_change_on_reset=False)
    assert made.reset_cache()
    files.known.set()
    await_namespace(made)
    namespace = pickle.loads(step_of(made).namespace)  # noqa: S301 - our own
    assert "weights_version" not in namespace.attributes


def test_an_engine_that_ends_before_the_digest_is_known(
    make: Make, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of a digest that comes later is closed."""
    clients: list[Server] = []

    def connect(_endpoint: Any, *, namespace: Namespace, **_: Any) -> Server:
        clients.append(Server(namespace))
        return clients[-1]

    monkeypatch.setattr(connector, "Client", connect)
    made = make()
    wait_until(lambda: files.reads == 1)
    made.shutdown()
    files.known.set()
    wait_until(lambda: bool(clients) and not clients[0].connected)


# ---- workers


def namespace_of(make: Make) -> Namespace:
    made = make()
    await_namespace(made)
    namespace: Namespace = pickle.loads(step_of(made).namespace)  # noqa: S301 - our own
    return namespace


def adopt(worker: Any, namespace: Namespace) -> None:
    worker._worker.register({"layer.0": torch.zeros(8, 256, dtype=torch.uint8)})
    step = StepMetadata(namespace=pickle.dumps(namespace), namespace_digest=namespace_digest(namespace))
    worker.bind_connector_metadata(pickle.loads(pickle.dumps(step)))  # noqa: S301 - our own
    worker.start_load_kv(None)


def test_a_worker_enters_the_namespace_of_its_scheduler(make: Make, tmp_path: Path) -> None:
    """Without a computation of its own, so scheduler and workers always agree."""
    (tmp_path / "config.json").write_text("{}")
    worker, namespace = make(WORKER), namespace_of(make)
    adopt(worker, namespace)
    assert [client.namespace for client in worker._worker._clients] == [namespace]
    assert worker._has_model(60.0)


def test_a_worker_that_could_not_enter_the_namespace_tries_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its next step, and only until it has succeeded."""
    (tmp_path / "config.json").write_text("{}")
    worker, namespace = make(WORKER), namespace_of(make)
    attempts: list[Namespace] = []

    def connect(_endpoint: Any, *, namespace: Namespace, **_: Any) -> Server:
        attempts.append(namespace)
        if len(attempts) == 1:
            raise RuntimeError("can't start new thread")
        return Server(namespace)

    monkeypatch.setattr(connector, "Client", connect)
    adopt(worker, namespace)
    assert worker._worker._clients == ()
    for _ in range(2):
        worker.start_load_kv(None)
    assert [client.namespace for client in worker._worker._clients] == [namespace]
    assert len(attempts) == 2


def test_a_worker_with_other_files_transfers_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example on another host, on which the model was not updated."""
    warnings: list[str] = []
    monkeypatch.setattr(RateLimitedLog, "warn", lambda _self, _kind, text, **_: warnings.append(text))
    (tmp_path / "model.safetensors").write_bytes(b"1")
    worker = make(WORKER)
    assert worker._model.wait(60.0)
    (tmp_path / "model.safetensors").write_bytes(b"2")
    adopt(worker, namespace_of(make))
    assert not worker._has_model(60.0)
    assert set(warnings) == {"the model's files on this worker's host are not those of the scheduler's host"}


def test_a_worker_with_other_layers_transfers_nothing(make: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    worker, namespace = make(WORKER), namespace_of(make)
    worker._own_parts = SimpleNamespace(digest="other")
    adopt(worker, namespace)
    assert worker._worker._clients == ()
    assert not worker._worker._usable(StepMetadata(namespace_digest=namespace_digest(namespace)))


def test_jobs_of_a_worker_without_the_model_end() -> None:
    """Loads fail, saves store nothing, and each is reported. Later jobs succeed."""
    client, reports, has_model = FakeTransfers(), WorkerReports(), [False]
    worker = WorkerSide(
        lambda *_: client,  # type: ignore[arg-type,return-value]
        [FULL],
        "",
        8,
        reports,
        RateLimitedLog(),
        has_model=lambda _: has_model[0],
    )
    caches = torch.zeros(2, 8, PAGE, dtype=torch.uint8)
    worker.register(dict(zip("ab", caches.unbind(0), strict=True)))
    worker.reconnect("ns")
    for number in (1, 2):
        load = LoadJob(f"r{number}", [BlockRead(1, [0], [0], [2])])
        save = SaveJob(number, "r", [b"k0", b"k1"], [0, 0], [4, 5])
        step = StepMetadata([load], [save], "ns")
        worker.start_loads(step)
        worker.start_saves(step)
        ended: list[Any] = []
        reported: list[Any] = []

        def all_ended(ended: list[Any] = ended, reported: list[Any] = reported) -> bool:
            results, report = reports.take_results(idle=True), reports.take_report()
            ended += [results] if results.finished_recving else []
            reported += [report] if report is not None else []
            return bool(ended and reported)

        wait_until(all_ended)
        assert bool(ended[0].failed_recving) is (number == 1)
        assert (number in reported[0].not_stored) is (number == 1)
        assert len(client.written) == number - 1
        has_model[0] = True
    worker.close()


# ---- the tier


def test_a_tier_does_not_wait_for_the_digest(monkeypatch: pytest.MonkeyPatch, files: Files, tmp_path: Path) -> None:
    """Lookups miss and jobs fail at once. When the digest is known, the tier has a client."""
    monkeypatch.setattr(manager, "Client", lambda _endpoint, *, namespace, **_: Server(namespace))
    monkeypatch.setattr(manager.TierLookups, "ask_policies", lambda _: None)  # type: ignore[attr-defined]
    engine = engine_config(str(tmp_path), {}, lora_config=None)
    monkeypatch.setattr(manager.compat, "find_engine_config", lambda _: engine)  # type: ignore[attr-defined]
    view = memoryview(np.zeros((4, ROW), np.int8))
    tier = KVTierSecondaryTier(SimpleNamespace(config=make_config({})), view, "kvtier")
    context = request_of("early", KEYS)
    tier.on_new_request(context)
    assert tier.lookup(KEYS[0], context) is LookupResult.MISS
    tier.on_schedule_end(SimpleNamespace(new_req_ids=["early"], preempted_req_ids=[]))
    assert list(tier.get_finished_jobs()) == []
    assert tier._client is None
    files.known.set()
    wait_until(lambda: tier._transfers is not None)
    tier.on_request_finished(context)
    late = request_of("late", KEYS)
    tier.on_new_request(late)
    assert tier.lookup(KEYS[0], late) is LookupResult.RETRY
    tier.shutdown()


def test_a_tier_that_ends_before_the_digest_is_known(
    monkeypatch: pytest.MonkeyPatch, files: Files, tmp_path: Path
) -> None:
    """The client of a digest that comes later is closed."""
    clients: list[Server] = []

    def connect(_endpoint: Any, *, namespace: Namespace, **_: Any) -> Server:
        clients.append(Server(namespace))
        return clients[-1]

    monkeypatch.setattr(manager, "Client", connect)
    monkeypatch.setattr(manager.TierLookups, "ask_policies", lambda _: None)  # type: ignore[attr-defined]
    engine = engine_config(str(tmp_path), {}, lora_config=None)
    monkeypatch.setattr(manager.compat, "find_engine_config", lambda _: engine)  # type: ignore[attr-defined]
    view = memoryview(np.zeros((4, ROW), np.int8))
    tier = KVTierSecondaryTier(SimpleNamespace(config=make_config({})), view, "kvtier")
    wait_until(lambda: files.reads == 1)
    tier.shutdown()
    files.known.set()
    wait_until(lambda: bool(clients) and not clients[0].connected)


def test_a_tier_without_a_digest_misses(
    monkeypatch: pytest.MonkeyPatch, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning has the cause."""
    files.error = PermissionError("config.json")
    files.known.set()
    engine = engine_config(str(tmp_path), {}, lora_config=None)
    monkeypatch.setattr(manager.compat, "find_engine_config", lambda _: engine)  # type: ignore[attr-defined]
    view = memoryview(np.zeros((4, ROW), np.int8))
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        tier = KVTierSecondaryTier(SimpleNamespace(config=make_config({})), view, "kvtier")
        wait_until(lambda: "the tier is disabled, every request is a miss: config.json" in caplog.text)
    assert tier.lookup(KEYS[0], request_of("r", KEYS)) is LookupResult.MISS
    assert caplog.text.count("the tier is disabled") == 1
    tier.shutdown()
