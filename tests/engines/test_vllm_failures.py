"""Whatever happens to the server, engines go on as if nothing were cached."""

from __future__ import annotations

import re
from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, server_step, tokens
from server_process import ServerProcess

PROMPTS = [tokens(71, 12 * BLOCK + 3), tokens(72, 8 * BLOCK + 1)]
OTHERS = [tokens(73, 10 * BLOCK + 5), tokens(74, 6 * BLOCK)]
RESET = {"op": "reset"}
BUDGET_SECONDS = 1.0


@pytest.fixture(scope="module")
def truth(run_engine: RunEngine) -> dict[str, Any]:
    """What an engine without a connector answers."""
    return run_engine([generate("prompts", PROMPTS), generate("others", OTHERS)])


@pytest.fixture(scope="module")
def life(run_engine: RunEngine, server: ServerProcess) -> dict[str, Any]:
    """One engine, during whose life the server is absent, comes, hangs, is killed in the middle, and comes back."""
    return run_engine(
        [
            generate("absent", PROMPTS),
            server_step(server, "start"),
            {"op": "shell", "command": ["sleep", "2"]},
            RESET,
            generate("come", PROMPTS),
            RESET,
            generate("there", PROMPTS),
            RESET,
            server_step(server, "hang"),
            generate("hung", PROMPTS),
            RESET,
            generate("hung others", OTHERS, at_once=True),
            RESET,
            server_step(server, "kill"),
            generate("killed", PROMPTS),
            RESET,
            server_step(server, "start"),
            {"op": "shell", "command": ["sleep", "3"]},
            generate("back", PROMPTS),
        ],
        endpoint=server.endpoint,
        lookup_timeout_s=BUDGET_SECONDS,
    )


@pytest.mark.parametrize("moment", ["absent", "come", "there", "hung", "killed", "back"])
def test_answers_are_the_same_at_every_moment(truth: dict[str, Any], life: dict[str, Any], moment: str) -> None:
    """A server that is absent, hangs or dies is a miss, never a wrong answer or an error."""
    assert_same(truth["prompts"], life[moment])


def test_a_hung_server_disturbs_no_concurrent_requests(truth: dict[str, Any], life: dict[str, Any]) -> None:
    """Saves and lookups that hang do not reach the engine's own work."""
    assert_same(truth["others"], life["hung others"])


def test_hits_come_and_go_with_the_server(life: dict[str, Any]) -> None:
    """The client finds a server that comes later, and again one that was killed; its LMDB tier still has the blocks."""
    hits = {name: result["external_hits"] for name, result in life.items() if isinstance(result, dict)}
    assert hits["there"] == hits["back"] == hit_limit(PROMPTS)
    assert hits["absent"] == hits["come"] == hits["hung"] == hits["killed"] == 0


def test_a_hung_server_costs_bounded_time(life: dict[str, Any]) -> None:
    """One lookup budget, not one per request, on top of computing."""
    assert life["hung"]["seconds"] < life["absent"]["seconds"] + BUDGET_SECONDS + 1.5
    assert life["killed"]["seconds"] < life["absent"]["seconds"] + 1.5


def test_the_log_says_what_happened_once(life: dict[str, Any]) -> None:
    """A missing server is one warning, not one per request or step; no hook of the connector failed."""
    assert 1 <= life["log"].count("no kvtier server is connected") <= 3
    assert not [line for line in life["log"].splitlines() if "background.py" in line and "Traceback" in line]
    assert not re.findall(r"kvtier: \w+ failed: .*", life["log"])
