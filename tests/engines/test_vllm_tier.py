"""Real engines with vLLM's own OffloadingConnector and tiering, and kvtier as its tier.

The engines get the configuration of docs/engines.md. On this device vLLM lacks only a copy kernel
(`cpu_tiering`); all the rest is vLLM's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from engine_timeouts import LONG_TIMEOUT_SECONDS
from harness.polling import wait_until
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, server_step, tokens, wait_until_durable
from server_process import ServerProcess

BASE = [tokens(81, 16 * BLOCK), tokens(82, 12 * BLOCK + 1), tokens(83, 9 * BLOCK - 1), tokens(84, 3 * BLOCK + 7)]
HALF = BASE[0][: 8 * BLOCK] + tokens(85, 100)
CROWD = [*BASE, HALF, tokens(86, 300)]
RESET = {"op": "reset"}
RESET_ALL = {"op": "reset", "reset_connector": True}
KILL_AFTER_SECONDS = (0.0, 0.1, 0.3)
"""The server is killed this long after requests have arrived: in lookups, loads or stores."""
KILLED_DURING = [[*CROWD, tokens(90 + number, 700)] for number in range(len(KILL_AFTER_SECONDS))]
NORMAL, LONG = ("cpu_tiering",), ("cpu_tiering", "engine_timeouts")
"""Modules that prepare an engine."""


def _tiering(endpoint: str, **tier: Any) -> dict[str, Any]:
    """Returns the configuration of docs/engines.md for this server, with a small primary tier."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    example = re.search(r"```json\n(.*?)```", page.partition("## Under vLLM's own tiering")[2], re.DOTALL)
    assert example is not None
    config: dict[str, Any] = json.loads(example[1])
    assert config["kv_connector_extra_config"]["spec_name"] == "TieringOffloadingSpec"
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 256 << 20
    config["kv_connector_extra_config"]["secondary_tiers"][0] |= {"endpoint": endpoint, **tier}
    return config


def _assert_all_found(result: dict[str, Any], prompts: list[list[int]]) -> None:
    """All whole blocks are hits, but perhaps the last one of an aligned prompt."""
    assert hit_limit(prompts) <= result["external_hits"] <= sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine) -> dict[str, Any]:
    """Answers of an engine without offloading."""
    during = [generate(f"during {number}", prompts, at_once=True) for number, prompts in enumerate(KILLED_DURING)]
    return run_engine([generate("base", BASE), RESET, generate("crowd", CROWD, at_once=True), RESET, *during])


@pytest.fixture(scope="module")
def first(run_engine: RunEngine, server: ServerProcess) -> dict[str, Any]:
    """An engine with an empty store."""
    server.start()
    config = _tiering(server.endpoint, lookup_timeout_s=LONG_TIMEOUT_SECONDS, transport="shm")
    results = run_engine([generate("base", BASE), RESET_ALL], kv_transfer_config=config, prepare=LONG)
    return results | {"blocks": wait_until_durable(server)}


@pytest.fixture(scope="module")
def second(run_engine: RunEngine, server: ServerProcess, first: dict[str, Any]) -> dict[str, Any]:
    """Another engine, after a server restart; the server then hangs, dies and comes back.

    At last it dies while requests run.
    """
    assert first["blocks"]["lmdb"] > 0
    server.kill()
    server.start()
    config = _tiering(server.endpoint, lookup_timeout_s=10.0, transport="grpc")
    comes_back = [
        server_step(server, "start"),
        server_step(server, "await-session"),
        {"op": "shell", "command": ["sleep", "4"]},  # until the circuit is closed
    ]
    during: list[dict[str, Any]] = []
    for number, seconds in enumerate(KILL_AFTER_SECONDS):
        kill = ["sh", "-c", f"sleep {seconds}; kill -9 $(cat {server.folder / 'pid'})"]
        during += [generate(f"during {number}", KILLED_DURING[number], at_once=True, meanwhile=kill)]
        during += [RESET_ALL, *comes_back]
    return run_engine(
        [
            generate("base", BASE),
            RESET_ALL,
            generate("crowd", CROWD, at_once=True),
            RESET_ALL,
            server_step(server, "hang"),
            generate("hung", BASE),
            RESET_ALL,
            server_step(server, "kill"),
            generate("killed", BASE),
            RESET_ALL,
            *comes_back,
            generate("back", BASE),
            RESET_ALL,
            *during,
        ],
        kv_transfer_config=config,
        prepare=NORMAL,  # with normal timeouts, to time out on a hung server
    )


def test_storing_changes_no_answer(reference: dict[str, Any], first: dict[str, Any]) -> None:
    """An engine with an empty store answers like one without a connector, and finds nothing."""
    assert "kvtier: namespace" in first["log"]
    assert_same(reference["base"], first["base"])
    assert first["base"]["external_hits"] == 0


def test_another_engine_finds_all_after_a_sigkill_of_the_server(
    reference: dict[str, Any], second: dict[str, Any]
) -> None:
    """B3.15, B3.16 One engine's chunks are loaded by another, through the other transport."""
    assert_same(reference["base"], second["base"])
    _assert_all_found(second["base"], BASE)


def test_many_at_once_after_a_reset(reference: dict[str, Any], second: dict[str, Any]) -> None:
    """B3.19 A reset of vLLM's caches keeps kvtier's chunks, also under concurrent work."""
    assert_same(reference["crowd"], second["crowd"])
    assert second["crowd"]["external_hits"] >= hit_limit(BASE) // 2


@pytest.mark.parametrize("moment", ["hung", "killed", "back"])
def test_server_failures_are_misses(reference: dict[str, Any], second: dict[str, Any], moment: str) -> None:
    """A server that hangs or dies is a miss; its LMDB tier serves again afterwards."""
    assert_same(reference["base"], second[moment])
    if moment == "back":
        _assert_all_found(second[moment], BASE)
    else:
        assert second[moment]["external_hits"] == 0


@pytest.mark.parametrize("number", range(len(KILL_AFTER_SECONDS)))
def test_a_server_killed_while_requests_run_changes_no_answer(
    reference: dict[str, Any], second: dict[str, Any], number: int
) -> None:
    """B3.18 What the dead server was asked to find, load or store is computed."""
    assert_same(reference[f"during {number}"], second[f"during {number}"])


def test_a_server_was_killed_while_requests_ran(second: dict[str, Any]) -> None:
    """On a fast machine the requests can end before a late kill, so one kill is enough."""
    assert any(second[f"during {number}"]["meanwhile"] == 0 for number in range(len(KILL_AFTER_SECONDS)))


def test_the_policy_is_the_server_s_from_the_first_request_on(run_engine: RunEngine, tmp_path: Path) -> None:
    """B3.1, B3.6 Chunks that vLLM has already are stored if a rule of the server asks for it."""
    prompt = [tokens(87, 8 * BLOCK + 5)]
    rules = 'rules = [{policy = "request_level", kv_transfer_params = {gold = true}}]'
    (tmp_path / "kvtier.toml").write_text(f'[[tiers]]\ntype = "lmdb"\nsize = "64MiB"\n{rules}\n')
    server = ServerProcess(tmp_path, flags=["--config", str(tmp_path / "kvtier.toml")], long_timeout=True)
    server.start()
    try:
        steps = [
            generate("private", prompt, settings={"skip_save": True}),
            generate("plain", prompt),
            server_step(server, "status") | {"name": "before"},
            generate("gold", prompt, transfers=[{"gold": True}]),
        ]
        config = _tiering(server.endpoint, lookup_timeout_s=LONG_TIMEOUT_SECONDS)
        results = run_engine(steps, kv_transfer_config=config, prepare=LONG)
        assert json.loads(results["before"]["stdout"])["tiers"][0]["blocks"] == 0
        wait_until(lambda: server.status()["tiers"][0]["blocks"] == 8)
        assert_same(results["private"], results["plain"] | {"name": "plain"})
        assert_same(results["private"], results["gold"])
    finally:
        server.kill()


def test_chunks_that_an_engine_has_itself_stay_longest(run_engine: RunEngine, tmp_path: Path) -> None:
    """B4.9 A request whose chunks the engine has already marks them as used at the server."""
    hot, cold, other = ([tokens(seed, 16 * BLOCK + 5)] for seed in (88, 89, 90))
    (tmp_path / "kvtier.toml").write_text('tiers = []\n[cpu]\neviction = "lru"\n')
    flags = ["--config", str(tmp_path / "kvtier.toml")]
    server = ServerProcess(tmp_path, region="6MiB", flags=flags, long_timeout=True)  # 48 chunks
    server.start()
    try:
        steps = [generate("hot", hot), generate("cold", cold), generate("hot again", hot), generate("other", other)]
        steps += [generate("more", [tokens(91, 8 * BLOCK)]), RESET_ALL]
        steps += [generate(f"{name} later", prompts) for name, prompts in (("hot", hot), ("cold", cold))]
        config = _tiering(server.endpoint, lookup_timeout_s=LONG_TIMEOUT_SECONDS)
        results = run_engine(steps, kv_transfer_config=config, prepare=LONG)
        assert results["hot again"]["external_hits"] == 0, "vLLM has asked kvtier"
        assert results["hot later"]["external_hits"] == 16 * BLOCK
        assert results["cold later"]["external_hits"] < 16 * BLOCK
    finally:
        server.kill()


def test_no_hook_failed(first: dict[str, Any], second: dict[str, Any]) -> None:
    """No hook failed."""
    for life in (first, second):
        assert "the tier is disabled" not in life["log"]
        assert not [line for line in life["log"].splitlines() if "background.py" in line and "Traceback" in line]
        assert not re.findall(r"kvtier: _?\w+ failed: .*", life["log"])


def test_a_hybrid_model(run_engine: RunEngine, server: ServerProcess, second: dict[str, Any]) -> None:
    """B4.10 Windows and full attention: hits are what all groups can serve."""
    assert second["back"]["external_hits"]
    config = _tiering(server.endpoint, lookup_timeout_s=LONG_TIMEOUT_SECONDS, transport="shm")
    fills = run_engine([generate("base", BASE), RESET_ALL], model="hybrid", kv_transfer_config=config, prepare=LONG)
    wait_until_durable(server)
    server.kill()
    server.start()
    finds = run_engine(
        [generate("base", BASE), RESET_ALL, generate("crowd", CROWD, at_once=True), RESET, generate("half", [HALF])],
        model="hybrid",
        kv_transfer_config=config,
        prepare=LONG,
    )
    assert fills["base"]["external_hits"] == 0
    assert_same(fills["base"], finds["base"])
    _assert_all_found(finds["base"], BASE)


def test_two_ranks(run_engine: RunEngine, server: ServerProcess, reference: dict[str, Any]) -> None:
    """B3.14 A row has the bytes of all ranks; another engine with two ranks finds it.

    Workers of vLLM poll each other. If the cores also have other work, Linux can then run nothing
    else for a minute. An engine that loses its session meanwhile stores or finds less.
    """
    server.kill()
    server.start()
    config = _tiering(server.endpoint, lookup_timeout_s=LONG_TIMEOUT_SECONDS)
    ranks = {"tensor_parallel_size": 2, "bind": "0|1", "prepare": LONG, "kv_transfer_config": config}
    fills = run_engine([generate("base", BASE), RESET_ALL], **ranks)
    wait_until_durable(server)
    finds = run_engine([generate("base", BASE), RESET_ALL, generate("crowd", CROWD, at_once=True)], **ranks)
    assert fills["base"]["external_hits"] == 0
    for life in (fills, finds):
        assert_same(reference["base"], life["base"])
    assert_same(reference["crowd"], finds["crowd"])
    if not any("session lost" in life["log"] for life in (fills, finds)):
        _assert_all_found(finds["base"], BASE)
