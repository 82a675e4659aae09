"""A model with several KV cache groups: sliding windows beside full attention."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens
from server_process import ServerProcess

BASE = [tokens(51, 16 * BLOCK), tokens(52, 20 * BLOCK + 9), tokens(53, 3 * BLOCK + 1)]
HALF = BASE[1][: 9 * BLOCK] + tokens(61, 70)
STEPS = [
    generate("base", BASE),
    {"op": "reset"},
    generate("half", [HALF]),
    {"op": "reset"},
    generate("crowd", [*BASE, HALF, tokens(62, 200)], at_once=True),
]


@pytest.fixture(scope="module")
def runs(run_engine: RunEngine, server: ServerProcess) -> list[dict[str, Any]]:
    """An engine without a connector, one with an empty store, and a later one."""
    server.start()
    return [
        run_engine(STEPS, model="hybrid"),
        run_engine(STEPS[:1], model="hybrid", endpoint=server.endpoint),
        run_engine(STEPS, model="hybrid", endpoint=server.endpoint),
    ]


def test_all_groups_are_served(runs: list[dict[str, Any]]) -> None:
    """B4.10 A hit is one that every group can serve; the answers are the same."""
    reference, first, second = runs
    assert "KV cache group(s)" in second["log"]
    assert " 1 KV cache group(s)" not in second["log"]
    assert_same(reference["base"], first["base"])
    assert_same(reference["base"], second["base"])
    assert second["base"]["external_hits"] == hit_limit(BASE)


def test_a_prefix_finds_the_windows_at_its_end(runs: list[dict[str, Any]]) -> None:
    """B4.10 Windows are stored along the whole prompt, so a hit may end anywhere in it."""
    reference, _, second = runs
    assert_same(reference["half"], second["half"])
    assert second["half"]["external_hits"] == 9 * BLOCK


def test_many_at_once(runs: list[dict[str, Any]]) -> None:
    """Concurrent requests of a hybrid model answer as without a connector."""
    reference, _, second = runs
    assert_same(reference["crowd"], second["crowd"])
