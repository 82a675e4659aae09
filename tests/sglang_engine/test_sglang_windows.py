"""A hybrid model in SGLang: the pool of the sliding windows has only the ends of prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import BLOCK, assert_same, generate, tokens
from server_process import ServerProcess
from sglang_scenario import FORGET, RunSglang, hits, kvtier_storage, opened, stored
from window_model import WINDOW

PROMPTS = [tokens(11, 1000), tokens(12, 20 * BLOCK + 1)]
LONGER = PROMPTS[0] + tokens(21, 100)
HALF = PROMPTS[0][: 16 * BLOCK] + tokens(22, 100)
QUESTIONS = [generate("base", PROMPTS), FORGET, generate("longer", [LONGER]), FORGET, generate("half", [HALF])]


@pytest.fixture(scope="module")
def reference(run_sglang: RunSglang) -> dict[str, Any]:
    """Answers of an engine without HiCache."""
    return run_sglang(QUESTIONS, model="windows")


@pytest.fixture(scope="module")
def second(run_sglang: RunSglang, server: ServerProcess, reference: dict[str, Any]) -> dict[str, Any]:
    """An engine after another one that has stored the base, and a SIGKILL of the server."""
    server.start()
    blocks = sum(len(prompt) // BLOCK + WINDOW // BLOCK for prompt in PROMPTS)
    first = run_sglang(
        [opened(server), QUESTIONS[0], stored(server, blocks)], kvtier_storage(server.endpoint), model="windows"
    )
    assert_same(reference["base"], first["base"])
    server.kill()
    server.start()
    return run_sglang([opened(server), *QUESTIONS], kvtier_storage(server.endpoint), model="windows")


def test_a_prefix_is_loaded_with_its_window(reference: dict[str, Any], second: dict[str, Any]) -> None:
    """The pages of both pools come from kvtier; the answers are the same."""
    assert "'swa'" in second["log"]
    assert_same(reference["base"], second["base"])
    assert [row["storage"] for row in second["base"]["rows"]] == list(map(hits, PROMPTS))


def test_a_longer_prompt_continues_at_a_window(reference: dict[str, Any], second: dict[str, Any]) -> None:
    """A prefix hits up to the end of the earlier prompt, at which there is a window."""
    assert_same(reference["longer"], second["longer"])
    assert second["longer"]["rows"][0]["storage"] == hits(PROMPTS[0])


def test_a_prefix_without_a_window_is_computed(reference: dict[str, Any], second: dict[str, Any]) -> None:
    """In the middle of an earlier prompt there are pages of the full attention, but no window."""
    assert_same(reference["half"], second["half"])
    assert second["half"]["rows"][0]["storage"] == 0
