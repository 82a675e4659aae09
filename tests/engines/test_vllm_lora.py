"""LoRA adapters: an adapter's blocks are found by requests with this adapter only."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens, wait_until_durable
from server_process import ServerProcess
from tiny_models import make_adapter

PROMPTS = [tokens(81, 6 * BLOCK), tokens(82, 4 * BLOCK + 3)]
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
FORGET = {"op": "reset"}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Two adapters, as the fields of their requests."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        make_adapter(folder / name, seed)
    return {
        name: {"lora_name": name, "lora_int_id": number, "lora_path": str(folder / name)}
        for number, name in enumerate("ab", 1)
    }


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine, adapters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Answers of an engine without a connector, without adapter and with each."""
    steps = [generate("base", PROMPTS)]
    steps += [generate(name, PROMPTS, adapter=adapter) for name, adapter in adapters.items()]
    return run_engine(steps, **LORA)


@pytest.fixture(scope="module", params=["eager", "lazy"])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of the connector. In lazy mode a small pool makes the engine evict blocks."""
    small = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    return {} if request.param == "eager" else {"extra": {"lazy_offload": True}, **small}


def test_an_adapter_finds_its_own_blocks_only(
    run_engine: RunEngine,
    server: ServerProcess,
    adapters: dict[str, dict[str, Any]],
    reference: dict[str, Any],
    mode: dict[str, Any],
) -> None:
    """A second process finds A's blocks for A only. Answers are those without the cache."""
    server.kill()
    server.start()
    server.evict_all()
    pushed_out = [generate("other", [tokens(90 + number, 7 * BLOCK)]) for number in range(3)]
    first = run_engine(
        [generate("a", PROMPTS, adapter=adapters["a"]), *pushed_out], endpoint=server.endpoint, **LORA, **mode
    )
    assert_same(reference["a"], first["a"])
    wait_until_durable(server)
    server.kill()
    server.start()
    steps = [generate("base", PROMPTS)]
    for name in ("b", "a"):
        steps += [FORGET, generate(name, PROMPTS, adapter=adapters[name])]
    second = run_engine(steps, endpoint=server.endpoint, **LORA, **mode)
    for name in ("base", "b", "a"):
        assert_same(reference[name], second[name])
    hits = {name: second[name]["external_hits"] for name in ("base", "b", "a")}
    assert hits == {"base": 0, "b": 0, "a": hit_limit(PROMPTS)}
    differ = {str(reference[name]["rows"]) for name in ("base", "a", "b")}
    assert len(differ) == 3, "the adapters change the answers"
