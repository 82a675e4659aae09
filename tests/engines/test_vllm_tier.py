"""Real engines with vLLM's own OffloadingConnector and tiering, and kvtier as its tier.

On this device vLLM offloads only with a test's copier (`cpu_tiering`); all the rest is vLLM's.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from engine_timeouts import LONG_TIMEOUT_SECONDS
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, server_step, tokens, wait_until_durable
from server_process import ServerProcess

BASE = [tokens(81, 16 * BLOCK), tokens(82, 12 * BLOCK + 1), tokens(83, 9 * BLOCK - 1), tokens(84, 3 * BLOCK + 7)]
HALF = BASE[0][: 8 * BLOCK] + tokens(85, 100)
CROWD = [*BASE, HALF, tokens(86, 300)]
RESET = {"op": "reset"}
RESET_ALL = {"op": "reset", "reset_connector": True}


def _tiering(endpoint: str, module: str = "long_timeout_connector", **tier: Any) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": 256 << 20,
            "secondary_tiers": [
                {
                    "type": "KVTierSecondaryTier",
                    "module_path": module,
                    "endpoint": endpoint,
                    **tier,
                }
            ],
        },
    }


def _assert_all_found(result: dict[str, Any], prompts: list[list[int]]) -> None:
    """All whole blocks are hits, but perhaps the last one of an aligned prompt."""
    assert hit_limit(prompts) <= result["external_hits"] <= sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine) -> dict[str, Any]:
    """Answers of an engine without offloading."""
    return run_engine([generate("base", BASE), RESET, generate("crowd", CROWD, at_once=True)])


@pytest.fixture(scope="module")
def first(run_engine: RunEngine, server: ServerProcess) -> dict[str, Any]:
    """An engine with an empty store."""
    server.start()
    config = _tiering(server.endpoint, lookup_timeout_s=LONG_TIMEOUT_SECONDS, transport="shm")
    results = run_engine([generate("base", BASE), RESET_ALL], kv_transfer_config=config)
    return results | {"blocks": wait_until_durable(server)}


@pytest.fixture(scope="module")
def second(run_engine: RunEngine, server: ServerProcess, first: dict[str, Any]) -> dict[str, Any]:
    """Another engine, after a server restart; the server then dies, hangs and comes back."""
    assert first["blocks"]["lmdb"] > 0
    server.kill()
    server.start()
    module = "kvtier.client.engines.vllm_tier"  # with normal timeouts, to time out on a hung server
    config = _tiering(server.endpoint, module, lookup_timeout_s=10.0, transport="grpc")
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
            server_step(server, "start"),
            server_step(server, "await-session"),
            {"op": "shell", "command": ["sleep", "4"]},  # until the circuit is closed
            generate("back", BASE),
        ],
        kv_transfer_config=config,
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
    fills = run_engine([generate("base", BASE), RESET_ALL], model="hybrid", kv_transfer_config=config)
    wait_until_durable(server)
    server.kill()
    server.start()
    finds = run_engine(
        [generate("base", BASE), RESET_ALL, generate("crowd", CROWD, at_once=True), RESET, generate("half", [HALF])],
        model="hybrid",
        kv_transfer_config=config,
    )
    assert fills["base"]["external_hits"] == 0
    assert_same(fills["base"], finds["base"])
    _assert_all_found(finds["base"], BASE)
