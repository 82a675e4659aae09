"""The connector's counts in vLLM's log and metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
import torch
from connector_fakes import (
    FULL,
    PAGE,
    FakeClient,
    FakeTransfers,
    close_when_idle,
    make_request,
    make_step,
    scheduler_side,
    start_lookup,
)
from harness.polling import wait_until

from kvtier.client import KVTierError, NotConnected, make_key
from kvtier.client.engines.vllm import KVTierConnector, background
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.request_settings import RequestSettings
from kvtier.client.engines.vllm.scheduler.prefix_lookups import LookupService
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration
from kvtier.client.engines.vllm.stats import METRICS, ConnectorStats, TransferCounters
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker.reports import WorkerReport, WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.offload import BlockRead, CacheGeometry, LoadJob, SaveJob

KEYS = [make_key(bytes([number]) * 32, 0) for number in range(4)]


def _drain(counters: TransferCounters) -> dict[str, Any]:
    stats = counters.take()
    return stats.data if stats is not None else {}


def test_empty_counters_send_nothing() -> None:
    """A step without counts sends nothing."""
    counters = TransferCounters()
    counters.count("save_bytes", 0)
    assert counters.take() is None
    counters.count("save_bytes", 3)
    counters.count("save_bytes", 4)
    counters.observe("save_seconds", 0.5)
    assert _drain(counters) == {"save_bytes": 7, "save_seconds": [0.5]}
    assert counters.take() is None


def test_counts_of_many_threads_are_all_there() -> None:
    """Copies and lookups end on several threads."""
    counters, total, done = TransferCounters(), 0, threading.Event()
    threads = [
        threading.Thread(target=lambda: [counters.count("load_bytes") for _ in range(5000)], daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while not done.is_set():
        if not any(thread.is_alive() for thread in threads):
            done.set()
        total += _drain(counters).get("load_bytes", 0)
    assert total == 20000


def test_ranks_and_steps_add_up() -> None:
    """B3.14 vLLM sends stats as plain data, adds them over ranks and time, and logs them."""
    first = ConnectorStats({"load_bytes": 5, "load_seconds": [0.25]})
    second = ConnectorStats({"load_bytes": 7, "load_seconds": [0.75], "lookups:hit": 1})
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(first.aggregate(second).to_dict()))
    rebuilt = KVTierConnector.build_kv_connector_stats(sent)
    assert rebuilt.data == {"load_bytes": 12, "load_seconds": [0.25, 0.75], "lookups:hit": 1}
    assert rebuilt.reduce() == {"load_bytes": 12, "load_seconds_mean": 0.5, "load_seconds_max": 0.75, "lookups_hit": 1}
    assert first.data == {"load_bytes": 5, "load_seconds": [0.25]}, "it is left as it was"
    assert (rebuilt.is_empty(), ConnectorStats().is_empty()) == (False, True)
    rebuilt.reset()
    assert rebuilt.is_empty()


def test_counts_become_prometheus_series_of_their_engine() -> None:
    """Each engine has its series from the start; unknown names are ignored."""
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    types = {kind: (lambda kind=kind, **of: kind(**of, registry=registry)) for kind in kinds}
    made = KVTierConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )

    def value(name: str, engine: int, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": str(engine), **labels})

    assert value("vllm:kvtier_lookups_total", 1, outcome="partial") == 0
    made.observe({"lookups:partial": 2, "load_bytes": 9, "load_seconds": [0.1, 3.0], "novelty": 1}, 1)
    assert value("vllm:kvtier_lookups_total", 1, outcome="partial") == 2
    assert value("vllm:kvtier_load_bytes_total", 1) == 9
    assert value("vllm:kvtier_load_bytes_total", 0) == 0
    assert value("vllm:kvtier_load_seconds_count", 1) == 2
    assert value("vllm:kvtier_load_seconds_sum", 1) == pytest.approx(3.1)


# ---- what is counted


@pytest.mark.parametrize("error", [None, NotConnected("gone")])
def test_a_worker_counts_what_it_copied(error: KVTierError | None) -> None:
    """Only bytes that were moved: no blocks that were present, no failed loads."""
    counters, reports = TransferCounters(), WorkerReports()
    worker = WorkerSide(
        lambda *_: FakeTransfers(error),  # type: ignore[arg-type,return-value]
        [FULL],
        "ns",
        8,
        reports,
        RateLimitedLog(),
        counters,
    )
    worker.register({name: torch.zeros(8, PAGE, dtype=torch.uint8) for name in ("a", "b")})
    loads = [LoadJob("r", [BlockRead(1, [0, 1], [0, 0], [2, 3])])]
    worker.start_loads(StepMetadata(loads, [], "ns"))
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", KEYS[:2], [0, 0], [4, 5])], "ns"))
    close_when_idle(worker)
    counted = _drain(counters)
    assert [len(counted.pop(name)) for name in ("load_seconds", "save_seconds")] == [1, 1]
    assert counted == ({} if error else {"load_bytes": 2 * 2 * PAGE, "save_bytes": 2 * PAGE})


def test_the_scheduler_counts_blocks() -> None:
    """Loads and saves are counted by outcome, when all workers have reported them."""
    counters = TransferCounters()
    with scheduler_side(FakeClient(set(KEYS[:2])), counters=counters) as (scheduler, _):
        for name in ("good", "bad"):
            request = make_request(2, name, num_tokens=12)
            scheduler.new_request(request)
            wait_until(lambda request=request: scheduler.matched_tokens(request, 0) == (8, True))  # type: ignore[misc]
            scheduler.blocks_allocated(request, [[7, 8]], 8)
        scheduler.build_step(make_step({}))
        scheduler.loads_reported({"good", "bad"}, {"bad"})
        request = make_request(4, "new")
        scheduler.new_request(request)
        (job,) = scheduler.build_step(make_step({"new": [[1, 2, 3, 4]]}, new=16)).saves
        scheduler.saves_reported(WorkerReport({job.job_id: 1}, {job.job_id: {3}}))
        wait_until(lambda: scheduler.matched_tokens(request, 0) == (8, True))
    counted = _drain(counters)
    assert len(counted.pop("lookup_seconds")) == 3
    assert counted == {
        "lookups:hit": 2,
        "lookups:partial": 1,
        "load_blocks:loaded": 2,
        "load_blocks:failed": 2,
        "save_blocks:stored": 3,
        "save_blocks:not_stored": 1,
    }


def _fail() -> None:
    raise NotConnected("gone")


@pytest.mark.parametrize(
    ("found", "before", "outcome"),
    [(4, None, "hit"), (2, None, "partial"), (0, None, "miss"), (4, _fail, "unavailable")],
)
def test_lookups_are_counted_by_how_they_end(found: int, before: Callable[[], None] | None, outcome: str) -> None:
    """One count and one duration for each."""
    counters, client = TransferCounters(), FakeClient(set(KEYS[:found]), before or (lambda: None))
    service = LookupService(client, CacheGeometry((FULL,), 4, 4), 60.0, RateLimitedLog(), counters)  # type: ignore[arg-type]
    lookup = start_lookup(service, RequestRegistration("r"), {0: [key[:32] for key in KEYS]}, 16)
    assert lookup is not None
    wait_until(lambda: bool(list(service.answers())))
    service.close()
    counted = _drain(counters)
    assert len(counted.pop("lookup_seconds")) == 1
    assert counted == {f"lookups:{outcome}": 1}


@pytest.mark.parametrize(
    ("found", "least", "start", "outcome"),
    [(4, 12, 0, "hit"), (4, 16, 0, "miss"), (3, 8, 0, "partial"), (4, 8, 4, "hit"), (4, 12, 4, "miss")],
)
def test_outcomes_with_a_draft_model(found: int, least: int, start: int, outcome: str) -> None:
    """The last block is never part of a hit. A hit below the minimum of a request is a miss."""
    counters, client = TransferCounters(), FakeClient(set(KEYS[:found]))
    geometry = CacheGeometry((FULL,), 4, 4, drop_last_block=True)
    service = LookupService(client, geometry, 60.0, RateLimitedLog(), counters)  # type: ignore[arg-type]
    registration = RequestRegistration("r", settings=RequestSettings(min_hit_tokens=least))
    start_lookup(service, registration, {0: [key[:32] for key in KEYS]}, 16, start=start)
    wait_until(lambda: bool(list(service.answers())))
    service.close()
    counted = _drain(counters)
    assert len(counted.pop("lookup_seconds")) == 1
    assert counted == {f"lookups:{outcome}": 1}


def test_a_lookup_that_takes_too_long_and_one_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout counts once, also if the answer comes; so does an open circuit."""
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    gate, counters = threading.Event(), TransferCounters()
    client = FakeClient(set(KEYS), lambda: gate.wait(60) and None)
    service = LookupService(client, CacheGeometry((FULL,), 4, 4), 30.0, RateLimitedLog(), counters)  # type: ignore[arg-type]
    hashes = {0: [key[:32] for key in KEYS]}
    lookup = start_lookup(service, RequestRegistration("slow"), hashes, 16)
    wait_until(lambda: lookup.started)
    service.abandon_lookup(lookup.number)
    assert start_lookup(service, RequestRegistration("cooling"), hashes, 16) is None
    client.connected = False
    away = RequestRegistration("away")
    for _ in range(3):
        assert start_lookup(service, away, hashes, 16) is None, (
            "as at every step in which the engine has no room for it"
        )
    gate.set()
    service.close()
    assert _drain(counters) == {"lookups:timeout": 1, "lookup_seconds": [30.0], "lookups:unavailable": 2}


def test_every_count_has_a_metric() -> None:
    """Every counter is published, and every published counter is counted in these tests."""
    counted = {"lookup_seconds", "load_seconds", "save_seconds", "load_bytes", "save_bytes"}
    counted |= {f"lookups:{outcome}" for outcome in ("hit", "partial", "miss", "timeout", "unavailable")}
    counted |= {"load_blocks:loaded", "load_blocks:failed", "save_blocks:stored", "save_blocks:not_stored"}
    # See test_vllm_handoffs.
    counted |= {f"claims:{outcome}" for outcome in ("granted", "empty", "gone", "unavailable")}
    counted |= {"claims:peer_not_listed", "claims:nothing_held"}
    counted |= {f"publications:{outcome}" for outcome in ("published", "no_room", "too_many")}
    counted |= {"claim_seconds", "pull_tokens", "pull_blocks:pulled", "pull_blocks:failed"}
    # See test_vllm_audit.
    counted |= {f"audits:{outcome}" for outcome in ("equal", "close", "different", "unknown", "gone")}
    series = {
        f"{name}:{outcome}" if outcome else name for name, of in METRICS.items() for outcome in of.outcomes or ("",)
    }
    assert series == counted
