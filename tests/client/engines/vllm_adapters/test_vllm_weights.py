"""Weights that change in place: blocks of the old weights are never found again (B4.17)."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from connector_fakes import FakeClient, FakeTransfers, make_request, make_step, scheduler_side
from handoff_engine import BLOCK, FIRST_TURN, NAMESPACE, ToyEngine
from harness.polling import wait_until
from server_process import ServerProcess

from kvtier.client import NotConnected
from kvtier.client.engines.identity import namespace_digest, with_weights_version
from kvtier.client.engines.vllm import compat
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.peers import Peers, ServerLink
from kvtier.client.engines.vllm.worker.reports import WorkerReport

PROMPT = list(range(100, 100 + 4 * BLOCK + 1))
OTHER = list(range(300, 300 + 4 * BLOCK + 1))
LAST = 1  # the engine always computes the last token
MakeEngine = Callable[..., ToyEngine]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, "64MiB")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def make(server: ServerProcess) -> Iterator[MakeEngine]:
    engines: list[ToyEngine] = []

    def make(name: str, weights: str = "", **settings: Any) -> ToyEngine:
        engines.append(ToyEngine(server.endpoint, name, ConnectorConfig(**settings), weights=weights))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def name_weights(engine: ToyEngine, weights: str) -> None:
    """Gives the weights another name; `watch_engine_core` resets the connector then."""
    engine.weights = weights
    engine.scheduler.weights_named()
    engine.reset()


def restart(server: ServerProcess, *engines: ToyEngine) -> None:
    """Restarts the server as soon as the LMDB tier has all blocks."""

    def is_durable() -> bool:
        cpu, lmdb = server.status()["tiers"]
        return not (lmdb["queued_bytes"] or lmdb["jobs"]) and int(lmdb["blocks"]) >= int(cpu["blocks"])

    wait_until(is_durable)
    server.kill()
    server.start()
    for engine in engines:
        for client in (engine.scheduler._client, *engine.worker._clients):
            assert client is not None
            client.wait_until_connected(60)


@pytest.mark.slow
def test_blocks_of_old_weights_are_found_in_no_tier(server: ServerProcess, make: MakeEngine) -> None:
    """After a reset nothing old is found, also after a restart of the server; new blocks are."""
    engine = make("A")
    assert engine.run(PROMPT).computed == len(PROMPT)
    restart(server, engine)
    assert engine.run(PROMPT).computed == LAST, "LMDB has the blocks"
    engine.update("new")
    assert engine.run(PROMPT).computed == len(PROMPT)
    assert engine.run(PROMPT).computed == LAST
    restart(server, engine)
    assert engine.run(PROMPT).computed == LAST, "the engine has kept its version, the server its blocks"
    assert make("A again").run(PROMPT).computed == LAST, "an engine that starts has the weights of the files"


@pytest.mark.slow
def test_without_a_change_of_weights_a_reset_keeps_the_blocks_below(server: ServerProcess, make: MakeEngine) -> None:
    """B3.19: with `weights_change_on_reset` false, only the CPU tier is emptied."""
    engine = make("A", weights_change_on_reset=False)
    engine.run(PROMPT)
    restart(server, engine)
    engine.reset()
    assert engine.run(PROMPT).computed == LAST


def test_an_engine_of_old_weights_shares_nothing_with_one_of_new_weights(make: MakeEngine) -> None:
    """One engine has been updated, the other one not yet: each finds only its own blocks."""
    updated, old = make("A"), make("B")
    updated.update("new")
    for prompt, first, second in ((PROMPT, updated, old), (OTHER, old, updated)):
        assert first.run(prompt).computed == len(prompt)
        assert second.run(prompt).computed == len(prompt)
    assert updated.run(OTHER).computed == old.run(OTHER).computed == LAST
    old.update("new")
    assert old.run(PROMPT).computed == len(PROMPT), "no name says that these are the same weights"


def test_vllm_s_name_of_weights_is_never_a_version(make: MakeEngine) -> None:
    """The name may be that of weights before or after those of the KV: only the setting counts."""
    first, second = make("A", weights_version="1"), make("B", weights_version="1")
    for engine in (first, second):
        engine.scheduler.weights_named()
        engine.update("2")
    assert first.run(PROMPT).computed == second.run(PROMPT).computed == len(PROMPT)
    assert make("C", "1", weights_version="1").run(OTHER).computed == len(OTHER)
    assert second.run(OTHER).computed == len(OTHER)
    assert make("D", "1", weights_version="1").run(OTHER).computed == LAST


def test_a_name_that_arrives_after_requests_of_the_pause_is_a_new_version(make: MakeEngine) -> None:
    """A request that arrived between reset and name does not delay the change by one update."""
    engine = make("A")
    engine.update("between")
    engine.run(PROMPT)
    between = engine.scheduler._weights_version
    name_weights(engine, "new")
    assert engine.scheduler._weights_version != between
    assert engine.run(PROMPT).computed == len(PROMPT), "its KV is of other weights"
    assert engine.run(PROMPT).computed == LAST


def test_a_name_without_a_reset_changes_the_namespace(make: MakeEngine) -> None:
    """Also if the setting says that resets keep the weights."""
    for number, settings in enumerate(({}, {"weights_change_on_reset": False})):
        engine = make(f"engine {number}", **settings)
        prompt = [number, *PROMPT]
        engine.run(prompt)
        name_weights(engine, "new")
        assert engine.run(prompt).computed == len(prompt)


def test_an_update_leaves_blocks_and_holds_of_engines_that_have_the_old_weights(make: MakeEngine) -> None:
    """Engines are updated one after the other; the others go on with what is in the CPU tier."""
    updated, prefill, decode = make("A"), make("P"), make("D")
    updated.run(OTHER)
    params = prefill.run(PROMPT, FIRST_TURN).params
    updated.update("new")
    assert decode.run(OTHER).computed == LAST
    assert decode.run(PROMPT, params).computed <= LAST


def test_a_hold_of_old_weights_is_not_pulled(make: MakeEngine) -> None:
    """P has held blocks of the old weights; D, which has new ones, computes the prompt."""
    prefill, decode = make("P"), make("D")
    params = prefill.run(PROMPT, FIRST_TURN).params
    assert params is not None
    decode.update("new")
    assert decode.run(PROMPT, params).computed == len(PROMPT)
    prefill.update("new")
    assert prefill.run(PROMPT).computed == len(PROMPT)


class Links:
    """Clients per version of the weights, as `KVTierConnector` makes them."""

    def __init__(self, first: FakeClient) -> None:
        self.clients = {"": first}

    def connect(self, version: str) -> ServerLink:
        client: Any = FakeClient()
        client.wait_until_connected = lambda _: None
        self.clients[version] = client
        namespace = with_weights_version(NAMESPACE, version)
        return ServerLink(version, namespace, client, Peers(client, [("unix:/ours", 0)]))


def _retiring_client() -> tuple[Any, list[bool]]:
    client: Any = FakeClient()
    retired: list[bool] = []

    def reset(*, retire: bool) -> int:
        retired.append(retire)
        return 0

    client.reset = reset
    return client, retired


def _settle(scheduler: Any) -> None:
    def has_ended() -> bool:
        scheduler.build_step(make_step({}))
        return not scheduler._resetting

    wait_until(has_ended)


def test_while_blocks_of_old_weights_are_in_use_no_version_is_entered() -> None:
    """A running request and vLLM's own prefix cache may have old KV until a reset is complete."""
    client, _ = _retiring_client()
    links = Links(client)
    with scheduler_side(client, connect=links.connect) as (scheduler, pool):
        running = make_request(2, "running", num_computed_tokens=8, kv_transfer_params={"do_remote_decode": True})
        scheduler.new_request(running)
        pool.touch(pool.blocks[1:3])
        assert not scheduler.reset()
        late = make_request(2, "late", num_computed_tokens=4)
        scheduler.new_request(late)
        step = scheduler.build_step(make_step({"running": [[1, 2]], "late": [[1, 3]]}, running=8, late=8))
        assert not step.saves
        assert scheduler.matched_tokens(late, 0) == (0, False)
        assert scheduler.request_finished(running, [[1, 2]]) is None
        assert list(links.clients) == [""]
        pool.free_blocks(pool.blocks[1:3])
        assert scheduler.reset()
        _settle(scheduler)
        scheduler.new_request(make_request(2, "new"))
        step = scheduler.build_step(make_step({"new": [[3, 4]]}, new=8))
        assert [job.block_ids for job in step.saves] == [[3, 4]]
        namespace = pickle.loads(step.namespace)  # noqa: S301 - our own
        assert namespace == with_weights_version(NAMESPACE, scheduler._weights_version) != NAMESPACE
        assert step.namespace_digest == namespace_digest(namespace)
        scheduler.saves_reported(WorkerReport({step.saves[0].job_id: 1}))


def test_only_a_namespace_of_this_engine_alone_is_retired() -> None:
    """Other engines may have the weights with which this engine started."""
    client, retired = _retiring_client()
    links = Links(client)
    with scheduler_side(client, connect=links.connect) as (scheduler, _):
        scheduler.reset()
        _settle(scheduler)
        assert not retired
        own: Any = scheduler._client
        own.reset = client.reset
        scheduler.reset()
        _settle(scheduler)
        assert retired == [True]


def test_a_renewal_that_a_later_reset_replaces_is_made_by_that_reset() -> None:
    """Resets follow each other before the first one has begun to connect."""
    client, _ = _retiring_client()
    links, blocked = Links(client), threading.Event()
    with scheduler_side(client, connect=links.connect, weights_change_on_reset=False) as (scheduler, pool):
        scheduler._server.resets._threads.submit(blocked.wait)
        scheduler.weights_named()
        assert scheduler.reset()
        pool.touch(pool.blocks[1:2])
        assert not scheduler.reset(), "the second reset is not complete"
        blocked.set()
        passed = threading.Event()
        scheduler._server.resets._threads.submit(passed.set)
        assert passed.wait(60)
        scheduler.build_step(make_step({}))
        assert scheduler._resetting
        pool.free_blocks(pool.blocks[1:2])
        assert scheduler.reset()
        _settle(scheduler)
        assert scheduler._weights_version
        assert scheduler._client is links.clients[scheduler._weights_version]


def test_a_lost_server_does_not_delay_a_change_of_weights() -> None:
    """The version is in the namespace, so that the reset needs no answer of the server."""
    client: Any = FakeClient()

    def gone(**_: Any) -> int:
        raise NotConnected("gone")

    client.reset = gone
    links = Links(client)
    with scheduler_side(client, connect=links.connect) as (scheduler, _):
        scheduler.new_request(make_request(1))
        assert scheduler.reset()
        _settle(scheduler)
        assert scheduler._server._client is links.clients[scheduler._weights_version]
        wait_until(lambda: not client.connected, otherwise="the old client is closed")


def test_only_the_last_of_repeated_resets_counts() -> None:
    """Users repeat a reset until it succeeds; clients of earlier attempts are closed."""
    client, _ = _retiring_client()
    links = Links(client)
    with scheduler_side(client, connect=links.connect) as (scheduler, _):
        scheduler.new_request(make_request(1))
        for _ in range(20):
            scheduler.reset()
        _settle(scheduler)
        wait_until(
            lambda: (
                [version for version, each in links.clients.items() if each.connected] == [scheduler._weights_version]
            )
        )


def test_a_job_of_old_weights_never_uses_the_new_namespace() -> None:
    """A worker's save that begins after the change stores nothing, under no weights."""
    from test_vllm_sleep import SAVES, Slow, worker_with

    made: list[FakeTransfers] = []

    def connect(*_: Any) -> Any:
        made.append(FakeTransfers())
        return made[-1]

    with worker_with(connect) as (side, reports):
        slow: Any = Slow()
        side._copiers = (slow,)
        side.start_saves(SAVES)  # its copy runs
        assert slow.begun.wait(60)
        side.start_saves(SAVES)  # queued behind it
        side.reconnect("new ns")
        wait_until(lambda: not made[0].connected)
        slow.gate.set()
        wait_until(lambda: reports.take_report() is not None)
    assert len(made) == 2
    assert made[1].written == []


def test_vllm_s_engine_core_reports_names_and_loads_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only to the connectors of that engine. An engine without the methods starts too."""
    calls: list[Any] = []

    class EngineCore:
        scheduler: Any = None

        def set_weight_version(self, weight_version: str) -> None:
            self._weight_version = weight_version

        def reset_prefix_cache(self, *, reset_connector: bool) -> None:
            calls.append(("reset", reset_connector))

        def add_lora(self, lora_request: str) -> bool:
            calls.append(f"load {lora_request}")
            return True

    class Connector:
        def weights_named(self) -> None:
            calls.append("named")

        @contextlib.contextmanager
        def loading_adapter(self, adapter: str) -> Iterator[None]:
            calls.append(f"before {adapter}")
            yield
            calls.append(f"after {adapter}")

    module: Any = ModuleType("vllm.v1.engine.core")
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    ours, part, other = Connector(), Connector(), Connector()
    compat.watch_engine_core(ours)
    module.EngineCore = EngineCore
    for connector in (ours, part, other):
        compat.watch_engine_core(connector)
    engine: Any = EngineCore()
    for number, own in enumerate((ours, SimpleNamespace(_connectors=[part]), None)):
        engine.scheduler = SimpleNamespace(connector=own)
        for _ in range(2):
            engine.set_weight_version(f"{number}")
        assert engine._weight_version == f"{number}"
        assert engine.add_lora("a")
        heard = ["named", ("reset", True), "before a", "load a", "after a"]
        assert calls == (heard if own is not None else ["load a"]), "a repeated name is the same weights"
        calls.clear()


@pytest.mark.parametrize("wrong", [{"weights_version": 7}, {"weights_change_on_reset": "yes"}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="weights"):
        ConnectorConfig.parse(wrong, lambda _: None)
