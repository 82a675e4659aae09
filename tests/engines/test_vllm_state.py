"""A model with state-space layers (Mamba2) beside full attention.

vLLM 0.32 on CPU goes wrong where a step of Mamba2 covers more than one block: so steps are of one
block here.
"""

from __future__ import annotations

from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens
from server_process import ServerProcess

BASE = [tokens(51, 16 * BLOCK), tokens(52, 12 * BLOCK + 9), tokens(53, 3 * BLOCK + 1)]
HALF = BASE[1][: 9 * BLOCK] + tokens(61, 70)
ANSWERED = 2 * BLOCK + 4
"""Tokens of an answer that fills blocks by decoding."""
STEPS = [
    generate("base", BASE),
    generate("answer", [BASE[2]], max_tokens=ANSWERED),
    {"op": "reset"},
    generate("again", [tokens(63, 5)], continues="answer"),
    {"op": "reset"},
    generate("half", [HALF]),
    {"op": "reset"},
    generate("crowd", [*BASE, HALF, tokens(62, 200)], at_once=True),
]
SETTINGS: dict[str, Any] = {"model": "state", "max_model_len": 1024, "max_num_batched_tokens": BLOCK, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def runs(run_engine: RunEngine, server: ServerProcess) -> list[dict[str, Any]]:
    """An engine without a connector, one with an empty store, and a later one with few blocks."""
    server.start()
    return [
        run_engine(STEPS, **SETTINGS),
        run_engine(STEPS[:1], endpoint=server.endpoint, **SETTINGS),
        run_engine(STEPS, endpoint=server.endpoint, num_gpu_blocks_override=96, **SETTINGS),
    ]


def test_states_are_served(runs: list[dict[str, Any]]) -> None:
    """B4.10 A hit is one that attention and state layers can serve; answers are the same."""
    reference, first, second = runs
    assert "KV cache group(s)" in second["log"]
    assert " 1 KV cache group(s)" not in second["log"]
    assert_same(reference["base"], first["base"])
    assert first["base"]["external_hits"] == 0
    assert_same(reference["base"], second["base"])
    assert second["base"]["external_hits"] == hit_limit(BASE)


def test_a_prefix_finds_the_state_at_its_end(runs: list[dict[str, Any]]) -> None:
    """B4.10 States are stored along the whole prompt, so a hit may end at any of its blocks."""
    reference, _, second = runs
    assert_same(reference["half"], second["half"])
    assert second["half"]["external_hits"] == 9 * BLOCK


def test_many_at_once(runs: list[dict[str, Any]]) -> None:
    """Concurrent requests answer as without a connector."""
    reference, _, second = runs
    assert_same(reference["crowd"], second["crowd"])


def test_what_decoding_leaves_is_found(runs: list[dict[str, Any]]) -> None:
    """B4.10 B4.14 States at the ends of blocks that an answer filled are stored too."""
    reference, _, second = runs
    assert_same(reference["again"], second["again"])
    assert second["again"]["external_hits"] == (len(BASE[2]) + ANSWERED) // BLOCK * BLOCK
