"""Hooks of the vLLM connector never raise, and always report what the engine waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, FakeClient, make_request

from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.vllm import KVTierConnector, connector, namespace
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.compat import CacheHitSource, KVConnectorRole, KVConnectorTransferResults
from kvtier.client.engines.vllm.groups import resolve_geometry
from kvtier.client.engines.vllm.ranks import Parts
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker import worker
from kvtier.client.engines.vllm.worker.reports import WorkerReport
from kvtier.client.offload import BlockRead, CacheGeometry, LoadJob, SaveJob
from kvtier.cuda.host.pinning import PinError
from kvtier.cuda.host.region import PAGE_BYTES, HostRegion

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
LIFECYCLE = {"loading_adapter", "requires_kv_delivery", "build_kv_connector_stats", "build_prom_metrics", "log"}
STEP = StepMetadata(
    loads=[LoadJob("r", [BlockRead(1, [0], [0], [2])])],
    saves=[SaveJob(7, "r", [b"k0", b"k1"], [0, 0], [4, 5])],
    namespace_digest="ns",
)

REPORT = SimpleNamespace(kv_connector_worker_meta=WorkerReport({7: 1}), finished_recving={"r"}, failed_recving=None)


class Broken:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: object, **__: object) -> None:
            raise KeyError(name)

        return fail


class Warnings(RateLimitedLog):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def warn(self, kind: str, text: str, *, exc_info: bool = False) -> None:  # type: ignore[override]
        self.kinds.append(kind)


def _config(**extra: Any) -> Any:
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
        is_kv_consumer=True,
        is_kv_producer=True,
        engine_id="e",
    )
    parallel = SimpleNamespace(
        world_size=1, rank=0, pipeline_parallel_size=1, decode_context_parallel_size=1, tensor_parallel_size=1
    )
    cache = SimpleNamespace(enable_prefix_caching=True, prefix_caching_hash_algo="sha256")
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel, cache_config=cache)


def _broken(monkeypatch: pytest.MonkeyPatch, role: Any) -> Any:
    monkeypatch.setattr(KVTierConnector, "_set_up", lambda _: None)
    made: Any = KVTierConnector(_config(), role, SimpleNamespace())
    made.log = Warnings()
    made._scheduler, made._worker = (Broken(), None) if role == SCHEDULER else (None, Broken())
    return made


def _blocks() -> Any:
    return SimpleNamespace(get_block_ids=lambda: [[1]])


WORKER_HOOKS: dict[str, tuple[tuple[Any, ...], Any, str | None]] = {
    "register_kv_caches": (({},), None, "register_kv_caches"),
    "get_handshake_metadata": ((), None, "get_handshake_metadata"),
    "unregister_kv_caches": ((), None, "unregister_kv_caches"),
    "restore_kv_caches": ((), None, "restore_kv_caches"),
    "handle_preemptions": ((STEP,), None, None),
    "start_load_kv": ((None,), None, "_start_loads"),
    "wait_for_layer_load": (("layer",), None, None),
    "save_kv_layer": (("layer", None, None), None, None),
    "wait_for_save": ((), None, "_start_saves"),
    "get_transfer_results": ((set(),), KVConnectorTransferResults(), "get_transfer_results"),
    "build_connector_worker_meta": ((), None, "build_connector_worker_meta"),
    "shutdown": ((), None, "_close_worker"),
}
SCHEDULER_HOOKS: dict[str, tuple[tuple[Any, ...], Any, str | None]] = {
    "bind_gpu_block_pool": ((object(),), None, "bind_gpu_block_pool"),
    "set_xfer_handshake_metadata_pp_aware": (({(0, 0): Parts((), "")},), None, "set_xfer_handshake_metadata_pp_aware"),
    "on_new_request": ((make_request(1),), None, "on_new_request"),
    "get_num_new_matched_tokens": ((make_request(1), 0), (0, False), "get_num_new_matched_tokens"),
    "update_state_after_alloc": ((make_request(1), _blocks(), 4), None, "update_state_after_alloc"),
    "get_external_cache_hit_sources": (
        (make_request(1), 4),
        {CacheHitSource.EXTERNAL_UNSPECIFIED: 4},
        "_hit_sources",
    ),
    "build_connector_meta": ((SimpleNamespace(),), StepMetadata(is_lost=True), "_build_step"),
    "update_connector_output": ((REPORT,), None, "_take_loads"),
    "get_kv_connector_stats": ((), None, "get_kv_connector_stats"),
    "take_events": ((), (), "take_events"),
    "request_finished": ((make_request(1), [1]), (False, None), "request_finished_all_groups"),
    "request_finished_all_groups": ((make_request(1), ([1],)), (False, None), "request_finished_all_groups"),
    "has_pending_push_work": ((), False, "has_pending_push_work"),
    "has_pending_block_frees": ((), False, "has_pending_block_frees"),
    "reset_cache": ((), False, "reset_cache"),
    "weights_named": ((), None, "weights_named"),
    "shutdown": ((), None, "_close_scheduler"),
}


@pytest.mark.parametrize(
    ("role", "hook"), [*((WORKER, hook) for hook in WORKER_HOOKS), *((SCHEDULER, hook) for hook in SCHEDULER_HOOKS)]
)
def test_a_hook_that_fails_answers_with_its_fallback(monkeypatch: pytest.MonkeyPatch, role: Any, hook: str) -> None:
    """If the code behind a hook raises, the engine gets the fallback, and the log a warning."""
    arguments, fallback, warning = (WORKER_HOOKS if role == WORKER else SCHEDULER_HOOKS)[hook]
    made = _broken(monkeypatch, role)
    if hook in {"get_transfer_results", "build_connector_worker_meta"}:
        made._reports = Broken()
    if "handshake" in hook:
        made._geometry = made._kv_cache_config = Broken()
    made._counters = Broken()
    made.bind_connector_metadata(STEP)
    assert getattr(made, hook)(*arguments) == fallback
    assert warning is None or warning in made.log.kinds


def test_every_hook_is_in_these_tests() -> None:
    """New hooks are tested too."""
    ours = [base for base in KVTierConnector.__mro__ if base.__module__.startswith("kvtier.")]
    hooks = {
        name
        for base in ours
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, (property, classmethod)))
    }
    assert hooks - LIFECYCLE == WORKER_HOOKS.keys() | SCHEDULER_HOOKS.keys()


def test_what_is_logged_can_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real log accepts the arguments of `never_raises`."""
    monkeypatch.setattr(KVTierConnector, "_set_up", lambda _: None)
    made: Any = KVTierConnector(_config(), SCHEDULER, SimpleNamespace())
    made._scheduler = Broken()
    assert made.get_num_new_matched_tokens(make_request(1), 0) == (0, False)


@pytest.mark.parametrize("worker", [Broken(), None])
def test_a_worker_that_cannot_start_its_jobs_reports_them(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    """With a defect, or a disabled worker, loads and saves are still reported."""
    made = _broken(monkeypatch, WORKER)
    made._worker = worker
    made.bind_connector_metadata(STEP)
    made.start_load_kv(None)
    made.wait_for_save()
    results = made.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert made.build_connector_worker_meta() == WorkerReport({7: 1}, {7: {0, 1}})
    assert made.get_transfer_results(set()) == KVConnectorTransferResults()
    assert made.build_connector_worker_meta() is None


class Scheduler:
    """A half that works as the test determines."""

    def __init__(self) -> None:
        self.steps: list[StepMetadata] = []
        self.saves: list[object] = []

    def blocks_allocated(self, request: Any, block_ids: Any, external_tokens: int) -> None:
        if request.request_id == "bad":
            raise KeyError("blocks")

    def build_step(self, scheduler_output: Any, *, is_awaited: bool) -> StepMetadata:
        return self.steps.pop(0)

    def saves_reported(self, report: object) -> None:
        self.saves.append(report)
        raise KeyError("saves")

    def loads_reported(self, finished: Any, failed: Any) -> None:
        self.saves.append((finished, failed))


def test_a_load_that_the_scheduler_lost_is_sent_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at allocation or in the step's plan is one failed load, reported once."""
    made, side = _broken(monkeypatch, SCHEDULER), Scheduler()
    made._scheduler = side
    good = LoadJob("good", [BlockRead(1, [0], [0], [2])])
    for name, external_tokens in (("bad", 4), ("good", 4), ("none", 0)):
        made.update_state_after_alloc(make_request(1, name), _blocks(), external_tokens)
    side.steps = [StepMetadata([good], [], "ns")]
    assert made.build_connector_meta(None).loads == [LoadJob("bad"), good]
    # The next step fails; its loads are not sent in the one that follows.
    made.update_state_after_alloc(make_request(1, "good"), _blocks(), 4)
    assert made.build_connector_meta(None).loads == [LoadJob("good")]
    side.steps = [StepMetadata([good], [], "ns")]
    assert made.build_connector_meta(None).loads == []


def test_a_load_of_several_jobs_is_sent_until_its_last_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a later step fails, an empty job ends the load, and the lost jobs are not sent."""
    made, side = _broken(monkeypatch, SCHEDULER), Scheduler()
    made._scheduler = side
    first, more, last = (LoadJob("r", [BlockRead(1, [n], [0], [2 + n])], is_last=n == 2) for n in range(3))
    for ends in (True, False):
        made.update_state_after_alloc(make_request(1, "r"), _blocks(), 4)
        side.steps = [StepMetadata([first], [], "ns")]
        assert made.build_connector_meta(None).loads == [first]
        if ends:
            side.steps = [StepMetadata([], [], "ns"), StepMetadata([more, last], [], "ns")]
            assert made.build_connector_meta(None).loads == []
            assert made.build_connector_meta(None).loads == [more, last]
        else:
            assert made.build_connector_meta(None).loads == [LoadJob("r")]
        side.steps = [StepMetadata([more, last], [], "ns")]
        assert made.build_connector_meta(None).loads == [], "the load has ended"


def test_a_load_that_waits_for_its_next_job_is_not_ended_by_other_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with jobs of other loads sends none for it."""
    made, side = _broken(monkeypatch, SCHEDULER), Scheduler()
    made._scheduler = side
    first, last = (LoadJob("r", [BlockRead(1, [n], [0], [2 + n])], is_last=n == 1) for n in range(2))
    other = LoadJob("s", [BlockRead(2, [0], [0], [7])])
    for name in "rs":
        made.update_state_after_alloc(make_request(1, name), _blocks(), 4)
        side.steps = [StepMetadata([first if name == "r" else other], [], "ns")]
        assert made.build_connector_meta(None).loads == [first if name == "r" else other]
    side.steps = [StepMetadata([last], [], "ns")]
    assert made.build_connector_meta(None).loads == [last]


def test_reports_of_saves_and_loads_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure with one kind of report does not affect the other."""
    made, side = _broken(monkeypatch, SCHEDULER), Scheduler()
    made._scheduler = side
    made.update_connector_output(
        SimpleNamespace(kv_connector_worker_meta="report", finished_recving={"r"}, failed_recving=None)
    )
    assert side.saves == ["report", ({"r"}, ())]


# ---- the start


def test_a_typo_in_the_endpoint_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only invalid settings may raise."""
    plain = namespace.Namespace("m", "d", ())  # type: ignore[attr-defined]
    monkeypatch.setattr(connector, "resolve_geometry", lambda *_: CacheGeometry((FULL,), 4, 4))
    monkeypatch.setattr(connector, "prepare_namespace", lambda *_: lambda: plain)
    with pytest.raises(ValueError, match="kvtier: "):
        KVTierConnector(_config(endpoint="unix:"), SCHEDULER, SimpleNamespace(num_blocks=8))


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
@pytest.mark.parametrize("error", [KeyError("a defect"), Unsupported("so")])
def test_a_set_up_that_fails_disables_the_connector(
    monkeypatch: pytest.MonkeyPatch, role: Any, error: Exception
) -> None:
    """The engine starts without a cache."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(connector, "resolve_geometry", lambda *_: None)
    monkeypatch.setattr(connector, "prepare_namespace", fail)
    monkeypatch.setattr(connector, "identify_model", fail)
    made: Any = KVTierConnector(_config(), role, SimpleNamespace())
    assert made._scheduler is None
    assert made._worker is None
    assert made.get_num_new_matched_tokens(make_request(1), 0) == (0, False)
    step = made.build_connector_meta(SimpleNamespace())
    assert (step, step.is_lost) == (StepMetadata(), False)
    made.register_kv_caches({})
    made.update_state_after_alloc(make_request(1), SimpleNamespace(get_block_ids=list), 0)
    assert made.request_finished(make_request(1), []) == (False, None)
    assert (made.has_pending_push_work(), made.has_pending_block_frees(), list(made.take_events())) == (
        False,
        False,
        [],
    )
    assert made.reset_cache() is True, "otherwise vLLM repeats the call"
    assert made.get_external_cache_hit_sources(make_request(1), 0) == {}


def test_without_prefix_caching_the_connector_disables_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4.1 One warning, and misses from then on."""
    warnings: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda text, *values, **_: warnings.append(text % values))  # type: ignore[attr-defined]
    config = _config()
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(Unsupported, match="prefix caching is off"):
        resolve_geometry(config, SimpleNamespace())  # type: ignore[arg-type]
    made: Any = KVTierConnector(config, SCHEDULER, SimpleNamespace())
    assert [text for text in warnings if "disabled" in text and "prefix caching" in text]
    assert made.get_num_new_matched_tokens(make_request(1), 0) == (0, False)


# ---- which weights


def _weights_of(**fields: Any) -> str:
    config = SimpleNamespace(_commit_hash=fields.pop("commit", None))
    model = SimpleNamespace(**{"model": "org/name", "revision": None, "hf_config": config} | fields)
    return namespace.identify_model(SimpleNamespace(model_config=model, speculative_config=None))()


def test_the_namespace_knows_the_weights_of_a_hub_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit identifies a model that is not in the local cache; without one it is refused."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert _weights_of(commit="a" * 40) == "commit " + "a" * 40
    assert _weights_of(revision="b" * 40, commit="a" * 40) == "commit " + "b" * 40
    for unknown in ({}, {"revision": "v1"}, {"commit": "a" * 40, "hf_config_path": "elsewhere"}):
        with pytest.raises(Unsupported, match="revision"):
            _weights_of(**unknown)


def test_files_that_the_engine_loads_from_its_own_folder_count(tmp_path: Path) -> None:
    """Setting `download_dir` of vLLM. The default cache of the hub may have other files."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("c" * 40)
    (tmp_path / "models--org--name" / "refs").mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs" / "main").write_text(snapshot.name)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    model = SimpleNamespace(model="org/name", revision=None)
    config = SimpleNamespace(
        model_config=model, speculative_config=None, load_config=SimpleNamespace(download_dir=str(tmp_path))
    )
    found = set()
    for content in (b"1", b"2"):
        (snapshot / "model.safetensors").write_bytes(content)
        found.add(namespace.identify_model(config)())
    assert len(found) == 2


def test_each_part_of_a_model_counts(tmp_path: Path) -> None:
    """Weights can be in another place than the configuration, and a draft model has its own."""
    parts = {}
    for name in ("model", "weights", "draft"):
        (tmp_path / name).mkdir()
        parts[name] = tmp_path / name / "w.bin"
    model = SimpleNamespace(model=str(tmp_path / "model"), revision=None, model_weights=str(tmp_path / "weights"))
    draft = SimpleNamespace(model=str(tmp_path / "draft"), revision=None)
    config = SimpleNamespace(model_config=model, speculative_config=SimpleNamespace(draft_model_config=draft))
    found = {namespace.identify_model(config)()}
    for part in parts.values():
        part.write_bytes(b"1")
        found.add(namespace.identify_model(config)())
    assert len(found) == 4


def test_an_idle_step_calls_neither_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an idle step neither half is called, so an idle connector costs no time."""
    scheduler, worker = _broken(monkeypatch, SCHEDULER), _broken(monkeypatch, WORKER)
    worker.bind_connector_metadata(StepMetadata())
    worker.start_load_kv(None)
    worker.wait_for_save()
    output = SimpleNamespace(
        kv_connector_worker_meta=worker.build_connector_worker_meta(), finished_recving=set(), failed_recving=set()
    )
    scheduler.update_connector_output(output)
    assert worker.log.kinds == scheduler.log.kinds == []


def test_clients_of_peers_pin_their_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads from a server of another host use pinned memory in a worker with a GPU."""
    made, pin = _broken(monkeypatch, WORKER), object()
    clients: list[dict[str, Any]] = []
    monkeypatch.setattr(
        connector, "Client", lambda endpoint, **fields: clients.append({"endpoint": endpoint, **fields})
    )
    made._config = replace(made._config, peers=("10.0.0.7:50051",))
    made._peers(FakeClient(), object(), 0, pin).client("10.0.0.7:50051")
    assert [(client["endpoint"], client["pin"]) for client in clients] == [("10.0.0.7:50051", pin)]


def test_a_worker_without_a_driver_shows_why_copies_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client gets the refusal, so that `Client.downgrades` and one warning have the cause."""

    def refuse(_: int) -> None:
        raise PinError("there is no CUDA driver")

    monkeypatch.setattr(worker, "CudaRegistrar", refuse)
    made = _broken(monkeypatch, WORKER)
    made._worker = worker.WorkerSide(lambda *_: FakeClient(), [FULL], "ns", 8, made._reports, RateLimitedLog())
    made._worker.serving = True
    pin = made._worker._pin_for(torch.device("cuda:0"))
    assert pin is not None
    with HostRegion.create(PAGE_BYTES) as region:
        pinning = pin(region)
        with pytest.raises(PinError, match="there is no CUDA driver"):
            pinning.pin(0, PAGE_BYTES)
        pinning.close()


def test_memory_is_pinned_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4.16 Nothing is pinned while graphs are captured; the first step, of any kind, ends that."""
    registered: list[tuple[int, int]] = []
    registrar = SimpleNamespace(register=lambda *span: registered.append(span), unregister=lambda _: None)
    monkeypatch.setattr(worker, "CudaRegistrar", lambda _: registrar)
    made = _broken(monkeypatch, WORKER)
    made._worker = worker.WorkerSide(lambda *_: FakeClient(), [FULL], "ns", 8, made._reports, RateLimitedLog())
    pin = made._worker._pin_for(torch.device("cuda:0"))
    assert pin is not None
    assert made._worker._pin_for(torch.device("cpu")) is None
    with HostRegion.create(PAGE_BYTES) as region:
        pinning = pin(region)
        assert not pinning.pin(0, PAGE_BYTES)
        made.bind_connector_metadata(StepMetadata())
        made.start_load_kv(None)
        assert pinning.pin(0, PAGE_BYTES)
        assert registered == [(region.address, PAGE_BYTES)]
        pinning.close()
