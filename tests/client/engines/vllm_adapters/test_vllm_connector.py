"""The connector in the scheduler's process: its configuration and its hooks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import FakePool, make_request, make_step
from connector_rig import MakeConnector, server_of
from engine_config import engine_config
from harness.polling import wait_until
from vllm.v1.core.block_pool import BlockPool

from kvtier.client import Credentials, EngineAddress, make_key
from kvtier.client.engines.vllm import KVTierConnector, connector
from kvtier.client.engines.vllm.compat import CacheHitSource
from kvtier.client.engines.vllm.peers import OWN
from kvtier.client.engines.vllm.ranks import Parts
from kvtier.client.engines.vllm.scheduler.scheduler import SchedulerSide
from kvtier.client.engines.vllm.worker.reports import WorkerReport
from kvtier.client.handoff import RemoteRequest

HASHES = [bytes([number]) * 32 for number in range(8)]
KEYS = [make_key(block_hash, 0) for block_hash in HASHES]


def blocks(*block_ids: int) -> Any:
    """Blocks as vLLM passes them at an allocation."""
    return SimpleNamespace(get_block_ids=lambda: [list(block_ids)])


def side_of(made: KVTierConnector) -> SchedulerSide:
    assert made._scheduler is not None
    return made._scheduler


def report(saved: Any = None, **loads: set[str]) -> Any:
    """What vLLM collects from the workers after a step."""
    fields = {"finished_recving": None, "failed_recving": None, **loads}
    return SimpleNamespace(kv_connector_worker_meta=saved, **fields)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda text, *values, **_: texts.append(text % values))  # type: ignore[attr-defined]
    return texts


@pytest.mark.parametrize("lazy", [False, True])
def test_lazy_mode_looks_ahead_by_the_tokens_of_a_step(make: MakeConnector, model: Path, *, lazy: bool) -> None:
    """B4.7 A step of 8 tokens allocates two blocks; two steps are looked ahead."""
    made = make(engine_config(str(model), {"lazy_offload": lazy}, scheduler={"max_num_batched_tokens": 8}))
    server_of(made)
    pool: Any = BlockPool(9, True, 4)
    made.bind_gpu_block_pool(pool)
    cached = pool.get_new_blocks(8)
    pool.cache_full_blocks(SimpleNamespace(block_hashes=HASHES), cached, 0, 8, 4, 0)
    pool.free_blocks(cached[::-1])
    saves = made.build_connector_meta(make_step({})).saves  # type: ignore[attr-defined]
    assert [save.keys for save in saves] == ([KEYS[:3:-1]] if lazy else [])


@pytest.mark.parametrize(("policy", "warned"), [("recompute", False), ("fail", True)])
def test_a_load_that_fails_must_not_fail_its_request(
    make: MakeConnector, model: Path, warnings: list[str], policy: str, *, warned: bool
) -> None:
    """By default vLLM fails the request; the warning names the setting."""
    make(engine_config(str(model), {}, kv_transfer={"kv_load_failure_policy": policy}))
    assert any("set the policy to 'recompute'" in text for text in warnings) is warned


@pytest.mark.parametrize(
    ("extra", "warned"),
    [
        ({"peers": ["10.0.0.7:7070"], "endpoint": "127.0.0.1:7070"}, True),
        ({"peers": ["10.0.0.7:7070"], "endpoint": "127.0.0.1:7070", "advertise": "10.0.0.1:7070"}, False),
        ({"endpoint": "127.0.0.1:7070"}, False),
    ],
    ids=["loopback", "advertised", "no peers"],
)
def test_an_address_that_peers_cannot_reach_is_a_warning(
    make: MakeConnector, model: Path, warnings: list[str], extra: dict[str, Any], *, warned: bool
) -> None:
    make(engine_config(str(model), extra))
    assert any("set `advertise`" in text for text in warnings) is warned


@pytest.mark.parametrize(
    ("served", "name"), [("chat", "chat"), (["chat", "alias"], "chat"), (None, ""), ([], "")], ids=str
)
def test_the_engines_address_is_published_once(make: MakeConnector, model: Path, served: Any, name: str) -> None:
    """The scheduler's client of the own server publishes it, not those of workers and peers."""
    extra = {"engine_address": "10.0.0.1:8000", "peers": ["10.0.0.7:7070"]}
    made = make(engine_config(str(model), extra, model={"served_model_name": served}))
    server = server_of(made)
    assert server.given["published"] == EngineAddress("10.0.0.1:8000", name)
    for rank, endpoint in ((0, None), (None, "10.0.0.7:7070")):
        other: Any = made._connect(server.namespace, rank, None, endpoint)
        assert other.given["published"] is None
    assert server_of(make(engine_config(str(model), {}))).given["published"] is None


def test_clients_of_peers_use_tcp(make: MakeConnector, model: Path) -> None:
    """Another host has no shared memory with this engine."""
    made = make(engine_config(str(model), {"transport": "shm", "endpoint": "unix:/here"}))
    server = server_of(made)
    assert (server.endpoint, server.given["transport"]) == ("unix:/here", "shm")
    peer: Any = made._connect(server.namespace, 2, None, "10.0.0.7:7070")
    assert (peer.endpoint, peer.given["transport"], peer.given["rank"]) == ("10.0.0.7:7070", "tcp", 2)


@pytest.mark.parametrize(
    ("enabled", "watch", "streams"), [(True, True, 1), (True, False, 0), (False, True, 0), (None, True, 0)]
)
def test_the_servers_events_are_followed_if_vllm_publishes_events(
    make: MakeConnector, model: Path, monkeypatch: pytest.MonkeyPatch, enabled: Any, *, watch: bool, streams: int
) -> None:
    opened: list[dict[str, Any]] = []

    def stream(client: Any, *_: Any, **options: Any) -> Any:
        opened.append({"client": client, **options})
        return SimpleNamespace(close=lambda _: None)

    monkeypatch.setattr(connector, "EventStream", stream)
    config = engine_config(str(model), {"watch_events": watch, "publish_token_ids": True, "endpoint": "unix:/here"})
    if enabled is not None:
        config.kv_events_config = SimpleNamespace(enable_kv_cache_events=enabled)
    server = server_of(make(config))
    assert len(opened) == streams
    for options in opened:
        assert options["client"] is server
        assert (options["endpoint"], options["with_contents"]) == ("unix:/here", True)


def test_a_hit_has_the_sources_of_its_blocks(make: MakeConnector, model: Path) -> None:
    """Metrics of vLLM tell host memory from disks. Unknown tiers, and no hit, are not an error."""
    made, request = make(engine_config(str(model), {})), make_request(4)
    server = server_of(made)
    server.keys, server.sources = set(KEYS[:4]), ("cpu", "lmdb", "disk", "other")
    made.on_new_request(request)
    wait_until(lambda: made.get_num_new_matched_tokens(request, 0) == (16, True))
    made.update_state_after_alloc(request, blocks(1, 2, 3, 4), 16)
    expected = {CacheHitSource.HOST: 4, CacheHitSource.DISK: 8, CacheHitSource.EXTERNAL_UNSPECIFIED: 4}
    assert made.get_external_cache_hit_sources(request, 16) == expected
    assert made.get_external_cache_hit_sources(request, 12) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 12}
    assert made.get_external_cache_hit_sources(request, 0) == {}


@pytest.mark.parametrize("failed", [False, True])
def test_a_load_from_its_match_to_its_report(make: MakeConnector, model: Path, *, failed: bool) -> None:
    """A request that vLLM did not announce is matched too. A failed load is not repeated."""
    made, request = make(engine_config(str(model), {})), make_request(3)
    made.bind_gpu_block_pool(FakePool())
    server = server_of(made)
    server.keys = set(KEYS[:2])
    wait_until(lambda: made.get_num_new_matched_tokens(request, 0) == (8, True))
    made.update_state_after_alloc(request, blocks(1, 2, 3), 8)
    (load,) = made.build_connector_meta(make_step({})).loads  # type: ignore[attr-defined]
    assert [read.block_ids for read in load.reads] == [[1, 2]]
    assert made.has_pending_push_work()
    reported = {"failed_recving": {"r"}} if failed else {}
    made.update_connector_output(report(finished_recving={"r"}, **reported))
    assert not made.has_pending_push_work()
    wait_until(lambda: server.released == [1])
    if failed:
        assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    request.num_computed_tokens = 12
    assert made.request_finished_all_groups(request, ([1, 2, 3],)) == (False, None)
    (save,) = made.build_connector_meta(make_step({})).saves  # type: ignore[attr-defined]
    assert save.block_ids == ([1, 2, 3] if failed else [3])
    made.update_connector_output(report(WorkerReport({save.job_id: 1})))
    assert not made.has_pending_push_work()


def test_workers_that_disagree_about_their_layers_disable_the_connector(make: MakeConnector, model: Path) -> None:
    """Also if the scheduler's configuration seemed to describe the layers."""
    made = make(engine_config(str(model), {}, parallel={"tensor_parallel_size": 2, "world_size": 2}))
    server_of(made)
    made.set_xfer_handshake_metadata_pp_aware({(0, rank): Parts((256,), f"layers of {rank}") for rank in range(2)})
    assert made._scheduler is None
    assert made.get_num_new_matched_tokens(make_request(2), 0) == (0, False)


@pytest.mark.parametrize("told", [{}, {(0, 0): object()}], ids=["nothing", "of another connector"])
def test_a_handshake_without_parts_changes_nothing(make: MakeConnector, model: Path, told: dict[Any, Any]) -> None:
    """The scheduler's configuration describes the layers, so no worker reports parts."""
    made = make(engine_config(str(model), {}))
    side, server = side_of(made), server_of(made)
    made.set_xfer_handshake_metadata_pp_aware(told)
    assert made._scheduler is side
    assert server.connected


def test_each_client_has_the_credentials_and_the_address_of_the_settings(
    make: MakeConnector, model: Path, tmp_path: Path
) -> None:
    """Other engines reach the server at `advertise`; this engine at `endpoint`."""
    (tmp_path / "token").write_text("secret")
    extra = {"token_file": str(tmp_path / "token"), "endpoint": "unix:/here", "advertise": "10.0.0.1:7070"}
    made = make(engine_config(str(model), extra))
    server = server_of(made)
    clients: list[Any] = [server, *(made._connect(server.namespace, 0, None, to) for to in (None, "10.0.0.7:7070"))]
    expected = Credentials.from_environment(token_file=str(tmp_path / "token"))
    assert [client.given["credentials"] for client in clients] == [expected] * 3
    assert expected != Credentials.from_environment()
    assert side_of(made)._handoffs._core._identity.host == "10.0.0.1"
    for address in (("10.0.0.1", 7070), ("unix:/here", 0)):
        assert made._peers(server, server.namespace, None).endpoint_of(RemoteRequest("P", "p", *address)) == OWN


def test_a_step_without_block_tables_saves_nothing(make: MakeConnector, model: Path) -> None:
    """The tables are missing if no request is computed."""
    made, request = make(engine_config(str(model), {})), make_request(2)
    server_of(made)
    made.bind_gpu_block_pool(FakePool())
    made.on_new_request(request)
    wait_until(lambda: made.get_num_new_matched_tokens(request, 0) == (0, False))
    made.update_state_after_alloc(request, blocks(1, 2), 0)
    wait_until(lambda: not side_of(made)._requests["r"].registration.voting)
    step = make_step({"r": [[1, 2]]}, r=8)
    step.kv_connector_block_state = None
    assert not made.build_connector_meta(step).saves  # type: ignore[attr-defined]
    (save,) = made.build_connector_meta(make_step({"r": [[1, 2]]}, r=8)).saves  # type: ignore[attr-defined]
    assert save.block_ids == [1, 2]
    made.update_connector_output(report(WorkerReport({save.job_id: 1})))


def test_blocks_are_saved_after_the_workers_have_told_their_parts(make: MakeConnector, model: Path) -> None:
    """VLLM gives the block pool to the connector before the handshake with the workers."""
    config = engine_config(str(model), {}, parallel={"pipeline_parallel_size": 2, "world_size": 2})
    made, request = make(config), make_request(2)
    made.bind_gpu_block_pool(FakePool())
    made.set_xfer_handshake_metadata_pp_aware({(stage, 0): Parts((256,), "layers") for stage in range(2)})
    server_of(made)
    made.on_new_request(request)
    wait_until(lambda: made.get_num_new_matched_tokens(request, 0) == (0, False))
    made.update_state_after_alloc(request, blocks(1, 2), 0)
    (save,) = made.build_connector_meta(make_step({"r": [[1, 2]]}, r=8)).saves  # type: ignore[attr-defined]
    assert save.block_ids == [1, 2]
    made.update_connector_output(report(WorkerReport({save.job_id: 0b11})))
    assert not made.has_pending_push_work()


@pytest.mark.usefixtures("digests_are_awaited")
@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_an_adapter_is_identified_if_its_load_succeeds(
    make: MakeConnector, model: Path, error: Exception | None
) -> None:
    """The error of a load reaches vLLM, which then refuses the adapter."""
    made = make(engine_config(str(model), {}))
    (model / "adapter_config.json").write_text("{}")
    adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(model))
    with nullcontext() if error is None else pytest.raises(RuntimeError), made.loading_adapter(adapter):
        if error is not None:
            raise error
    assert (side_of(made).adapters.tag_of(adapter) is None) is (error is not None)


def test_a_reset_waits_for_loads(make: MakeConnector, model: Path) -> None:
    """B4.13 vLLM repeats the call until no transfer is in flight."""
    made, request = make(engine_config(str(model), {"weights_change_on_reset": False})), make_request(3)
    server = server_of(made)
    server.keys = set(KEYS[:2])
    made.on_new_request(request)
    wait_until(lambda: made.get_num_new_matched_tokens(request, 0) == (8, True))
    made.update_state_after_alloc(request, blocks(1, 2, 3), 8)
    made.build_connector_meta(make_step({}))
    assert made.reset_cache() is False
    made.update_connector_output(report(finished_recving={"r"}))
    assert made.reset_cache() is True


def test_a_dropped_save_is_only_a_miss(make: MakeConnector, model: Path) -> None:
    """Otherwise vLLM would keep blocks until they are stored."""
    assert not make(engine_config(str(model), {})).requires_kv_delivery
