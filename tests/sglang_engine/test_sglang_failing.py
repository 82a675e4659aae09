"""Server failures at any moment: SGLang computes, and later finds what is stored again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import server_process
from scenario import BLOCK, assert_same, generate, tokens
from server_process import ServerProcess
from sglang_scenario import FORGET, RunSglang, kvtier_storage, stored

PROMPT = tokens(71, 20 * BLOCK + 3)
CASES = [
    *(("kill", moment) for moment in ("asking", "between", "loading", "storing")),
    *(("hang", moment) for moment in ("asking", "between", "storing")),
]
NEW = {case: tokens(100 + number, 10 * BLOCK + 5) for number, case in enumerate(CASES)}
"""A new prompt per case, whose pages are to be stored."""
EACH = pytest.mark.parametrize(("deed", "moment"), CASES)


def command(server: ServerProcess, action: str) -> list[str]:
    return [sys.executable, server_process.__file__, str(server.folder), action]


def case_steps(server: ServerProcess, trigger: Path, case: tuple[str, str]) -> list[dict[str, Any]]:
    """Returns the steps of one case: a failure, a restart, and normal operation."""
    deed, moment = case
    name = f"{deed} {moment}"
    return [
        FORGET,
        {"op": "trigger", "file": str(trigger), "moment": moment, "command": command(server, deed)},
        generate(name, [PROMPT, NEW[case]]),
        {"op": "acted", "file": str(trigger)},
        {"op": "shell", "command": command(server, {"kill": "start", "hang": "resume"}[deed])},
        {"op": "shell", "command": command(server, "await-session")},
        FORGET,
        generate(f"{name}, then", [PROMPT, NEW[case]]),
    ]


@pytest.fixture(scope="module")
def reference(run_sglang: RunSglang) -> dict[str, Any]:
    """Answers of an engine without HiCache, by prompt."""
    prompts = [PROMPT, *NEW.values()]
    rows = run_sglang([generate("all", prompts)])["all"]["rows"]
    return {str(prompt): row for prompt, row in zip(prompts, rows, strict=True)}


@pytest.fixture(scope="module")
def life(run_sglang: RunSglang, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine that starts without a server and meets every failure at every moment."""
    folder = tmp_path_factory.mktemp("kvtier")
    server, trigger = ServerProcess(folder), folder / "trigger"
    steps = [
        generate("absent", [PROMPT]),
        {"op": "shell", "command": command(server, "start")},
        {"op": "shell", "command": command(server, "await-session")},
        FORGET,
        generate("come", [PROMPT]),
        stored(server, len(PROMPT) // BLOCK),
        *(step for case in CASES for step in case_steps(server, trigger, case)),
    ]
    try:
        return run_sglang(steps, kvtier_storage(server.endpoint, "acting_storage"), trigger=trigger)
    finally:
        server.kill()


def same(reference: dict[str, Any], result: dict[str, Any]) -> None:
    """Asserts that the answers are right."""
    assert_same({"rows": [reference[str(prompt)] for prompt in result["prompts"]]}, result)


def test_a_server_may_come_later(reference: dict[str, Any], life: dict[str, Any]) -> None:
    """Without a server at the start all is computed."""
    for name in ("absent", "come"):
        same(reference, life[name])
        assert life[name]["rows"][0]["storage"] == 0


@EACH
def test_the_engine_goes_on(reference: dict[str, Any], life: dict[str, Any], deed: str, moment: str) -> None:
    """A server that dies or hangs is a miss: right tokens, and no error."""
    result = life[f"{deed} {moment}"]
    same(reference, result)
    if (deed, moment) in {("kill", "asking"), ("kill", "between"), ("kill", "loading"), ("hang", "asking")}:
        assert result["rows"][0]["storage"] == 0


@EACH
def test_pages_are_found_again(reference: dict[str, Any], life: dict[str, Any], deed: str, moment: str) -> None:
    """After the failure, pages of earlier lives of the server are loaded from its disk."""
    result = life[f"{deed} {moment}, then"]
    same(reference, result)
    assert result["rows"][0]["storage"] == 20 * BLOCK


def test_no_hook_failed(life: dict[str, Any]) -> None:
    """The log has warnings of kvtier, and no traceback."""
    assert "kvtier: cannot open a session: UNAVAILABLE" in life["log"]
    assert "Traceback" not in life["log"].partition("kill_process_tree")[0]
