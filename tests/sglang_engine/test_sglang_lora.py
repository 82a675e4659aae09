"""LoRA adapters in SGLang: a retraining in place makes earlier pages unreachable."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import BLOCK, assert_same, generate, tokens
from server_process import ServerProcess
from sglang_scenario import RunSglang, kvtier_storage, opened, stored
from tiny_models import make_adapter

PAGES = 12
PROMPTS = [tokens(81, PAGES * BLOCK + 1)]
STEPS = [generate("base", PROMPTS), generate("adapter", PROMPTS, lora_path="a")]


@pytest.fixture(scope="module")
def lives(run_sglang: RunSglang, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of three engines. The adapter is retrained before the last one starts."""
    folder = tmp_path_factory.mktemp("adapters") / "a"
    engine = {"lora_paths": [f"a={folder}"], "lora_backend": "torch_native", "max_loras_per_batch": 2}
    server.start()
    results = {}
    for name, seed in (("first", 0), ("second", 0), ("retrained", 1)):
        make_adapter(folder, seed)
        steps = [opened(server), *STEPS, *([stored(server, 2 * PAGES)] if name == "first" else [])]
        results[name] = run_sglang(steps, kvtier_storage(server.endpoint), **engine)
    return results


def test_another_engine_finds_pages_of_the_adapter(lives: dict[str, Any]) -> None:
    """SGLang's id of an adapter is equal in all engines that have it under this name and path."""
    for name in ("base", "adapter"):
        assert_same(lives["first"][name], lives["second"][name])
        assert lives["second"][name]["rows"][0]["storage"] == PAGES * BLOCK


def test_a_retrained_adapter_finds_nothing(lives: dict[str, Any]) -> None:
    """Name, path and id are as before, but not the content of the files."""
    before, after = (lives[name]["adapter"]["rows"][0] for name in ("first", "retrained"))
    assert after["storage"] == 0
    assert after["tokens"] != before["tokens"]
