"""Weights that change in place: blocks of the old weights are never found again (B4.17)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from connector_fakes import FakeClient, FakeTransfers, make_request, make_step, scheduler_side
from handoff_engine import BLOCK, FIRST_TURN, ToyEngine
from harness.polling import wait_until
from server_process import ServerProcess

from kvtier.client import NotConnected
from kvtier.client.engines.vllm import compat
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.namespace import WeightsVersion
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


def restart(server: ServerProcess, *engines: ToyEngine) -> None:
    """Restarts the server as soon as the LMDB tier has all blocks."""

    def is_durable() -> bool:
        cpu, lmdb = server.status()["tiers"]
        return not (lmdb["queued_bytes"] or lmdb["jobs"]) and int(lmdb["blocks"]) >= int(cpu["blocks"])

    wait_until(is_durable)
    server.kill()
    server.start()
    for engine in engines:
        for client in (engine.scheduler._client, engine.worker._client):
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


def test_engines_share_the_blocks_of_weights_with_one_name(make: MakeEngine) -> None:
    """The name counts if it was given before the reset, after it, or as a setting."""
    before, after, started = make("A"), make("B"), make("C", "new", weights_version="7")
    before.run(OTHER)
    before.scheduler.weights_named("7")
    before.update("new")
    after.run(OTHER)
    after.update("new")
    after.scheduler.weights_named("7")
    after.finish_reset()
    assert before.run(PROMPT).computed == len(PROMPT)
    assert after.run(PROMPT).computed == started.run(PROMPT).computed == LAST


def test_a_name_that_arrives_after_requests_waits_for_the_next_reset(make: MakeEngine) -> None:
    """The engine may still have KV of the old weights, which must not get the new name."""
    engine, other = make("A"), make("B", "new", weights_version="7")
    engine.update("between")
    engine.run(OTHER)
    engine.scheduler.weights_named("7")
    engine.run(PROMPT)
    assert other.run(PROMPT).computed == len(PROMPT)
    engine.update("new")
    assert engine.run(PROMPT).computed == LAST
    engine.update("newer")
    assert engine.run(PROMPT).computed == len(PROMPT), "a name counts once"


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
        return ServerLink(version, f"ns of {version}", client, Peers(client, [("unix:/ours", 0)]))


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


def test_requests_that_run_during_a_reset_are_neither_saved_nor_held() -> None:
    """Their KV is of the old weights; requests that had computed nothing are saved again."""
    client, retired = _retiring_client()
    weights = WeightsVersion("", changes_on_reset=True)
    with scheduler_side(client, weights=weights, connect=Links(client).connect) as (scheduler, _):
        running, waiting = make_request(2, "running", num_computed_tokens=8), make_request(2, "waiting")
        held = make_request(2, "held", num_computed_tokens=8, kv_transfer_params={"do_remote_decode": True})
        for request in (running, waiting, held):
            scheduler.new_request(request)
        assert scheduler.reset()
        _settle(scheduler)
        assert retired == [True]
        tables = {"running": [[1, 2]], "waiting": [[3, 4]], "held": [[5, 6]]}
        step = scheduler.build_step(make_step(tables, running=8, waiting=8, held=8))
        assert [job.block_ids for job in step.saves] == [[3, 4]]
        assert step.namespace_digest == f"ns of {weights.current}"
        scheduler.saves_reported(WorkerReport({step.saves[0].job_id: 1}))
        assert scheduler.request_finished(held, [[5, 6]]) is None
        assert not scheduler.build_step(make_step({})).saves


def test_a_lost_server_does_not_delay_a_change_of_weights() -> None:
    """The version is in the namespace, so that the reset needs no answer of the server."""
    client: Any = FakeClient()

    def gone(**_: Any) -> int:
        raise NotConnected("gone")

    client.reset = gone
    weights = WeightsVersion("", changes_on_reset=True)
    links = Links(client)
    with scheduler_side(client, weights=weights, connect=links.connect) as (scheduler, _):
        scheduler.new_request(make_request(1))
        assert scheduler.reset()
        _settle(scheduler)
        assert scheduler._server._client is links.clients[weights.current]
        wait_until(lambda: not client.connected, otherwise="the old client is closed")


def test_only_the_last_of_repeated_resets_counts() -> None:
    """Users repeat a reset until it succeeds; clients of earlier attempts are closed."""
    client, _ = _retiring_client()
    weights = WeightsVersion("", changes_on_reset=True)
    links = Links(client)
    with scheduler_side(client, weights=weights, connect=links.connect) as (scheduler, _):
        scheduler.new_request(make_request(1))
        for _ in range(20):
            scheduler.reset()
        _settle(scheduler)
        wait_until(lambda: [version for version, each in links.clients.items() if each.connected] == [weights.current])


def test_a_job_of_old_weights_never_uses_the_new_namespace() -> None:
    """A worker's save that begins after the change stores nothing, under no weights."""
    from test_vllm_sleep import SAVES, Slow, worker_with

    made: list[FakeTransfers] = []

    def connect(_: Any) -> Any:
        made.append(FakeTransfers())
        return made[-1]

    with worker_with(connect) as (side, reports):
        slow: Any = Slow()
        side._copier = slow
        side.start_saves(SAVES)  # its copy runs
        assert slow.begun.wait(60)
        side.start_saves(SAVES)  # queued behind it
        side.reconnect("new ns")
        wait_until(lambda: not made[0].connected)
        slow.gate.set()
        wait_until(lambda: reports.take_report() is not None)
    assert len(made) == 2
    assert made[1].written == []


def test_a_name_of_an_incomplete_reset_is_kept() -> None:
    """Blocks in use may be of the old weights, so the version is unique until a complete reset."""
    weights = WeightsVersion("1", changes_on_reset=True)
    weights.name("2")
    first, second = weights.advance(complete=False), weights.advance(complete=False)
    assert first != second
    assert not {"1", "2"} & {first, second}
    assert weights.advance(complete=True) == "2"
    weights.name("2")
    assert weights.advance(complete=True) is None, "the same weights"
    assert weights.advance(complete=True) not in (None, "1", "2")


def test_the_name_that_vllm_was_given_reaches_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the connector of that engine; and an engine without the method starts too."""

    class EngineCore:
        scheduler: Any = None

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

    class Connector:
        def __init__(self) -> None:
            self.names: list[str] = []

        def weights_named(self, version: str) -> None:
            self.names.append(version)

    module: Any = ModuleType("vllm.v1.engine.core")
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    ours, part, other = Connector(), Connector(), Connector()
    compat.watch_weight_version(ours)
    module.EngineCore = EngineCore
    for connector in (ours, part, other):
        compat.watch_weight_version(connector)
    engine: Any = EngineCore()
    for own in (ours, SimpleNamespace(_connectors=[part]), None):
        engine.scheduler = SimpleNamespace(connector=own)
        engine.set_weight_version("7")
    assert engine.version == "7"
    assert (ours.names, part.names, other.names) == (["7"], ["7"], [])


@pytest.mark.parametrize("wrong", [{"weights_version": 7}, {"weights_change_on_reset": "yes"}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="weights"):
        ConnectorConfig.parse(wrong, lambda _: None)
