"""A dense model: one engine fills the store, the server is killed and comes back, another engine reads."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, server_step, tokens, wait_until_durable
from server_process import ServerProcess

BASE = [tokens(11, 16 * BLOCK), tokens(12, 16 * BLOCK + 1), tokens(13, 16 * BLOCK - 1), tokens(14, 7 * BLOCK + 7)]
HALF = BASE[0][: 8 * BLOCK] + tokens(21, 100)
UNALIGNED = BASE[1][: 8 * BLOCK - 5] + tokens(22, 100)
OTHER_HEAD = tokens(23, BLOCK) + BASE[2][BLOCK:]
CROWD = [*BASE, HALF, UNALIGNED, tokens(31, 300), tokens(32, 40)]
LONG_ANSWER = 40
RESET = {"op": "reset"}

QUESTIONS = [
    generate("base", BASE, max_tokens=LONG_ANSWER),
    RESET,
    generate("half", [HALF]),
    RESET,
    generate("unaligned", [UNALIGNED]),
    RESET,
    generate("other head", [OTHER_HEAD]),
    RESET,
    generate("salted", [BASE[3]], salt="tenant-x"),
    RESET,
    generate("crowd", CROWD, at_once=True),
]


@pytest.fixture(scope="module")
def truth(run_engine: RunEngine) -> dict[str, Any]:
    """What an engine without a connector answers."""
    return run_engine(QUESTIONS)


@pytest.fixture(scope="module")
def first(run_engine: RunEngine, server: ServerProcess) -> dict[str, Any]:
    """An engine with an empty store."""
    server.start()
    results = run_engine([QUESTIONS[0]], endpoint=server.endpoint)
    return results | {"blocks": wait_until_durable(server)}


@pytest.fixture(scope="module")
def second(
    run_engine: RunEngine, server: ServerProcess, first: dict[str, Any], truth: dict[str, Any]
) -> dict[str, Any]:
    """Another engine, after the server was killed and started again."""
    assert first["blocks"]["lmdb"] > 0
    server.kill()
    server.start()
    next_turn = [
        prompt + row["tokens"] + tokens(40, 50) for prompt, row in zip(BASE, truth["base"]["rows"], strict=True)
    ]
    results = run_engine(
        [*QUESTIONS, RESET, generate("next turn", next_turn), RESET, generate("next turn again", next_turn)],
        endpoint=server.endpoint,
    )
    return results | {"next turn prompts": next_turn}


def test_storing_changes_no_answer(truth: dict[str, Any], first: dict[str, Any]) -> None:
    """An engine that stores answers as if nothing were stored, and finds nothing."""
    assert_same(truth["base"], first["base"])
    assert first["base"]["external_hits"] == 0


def test_another_engine_finds_all_after_a_sigkill_of_the_server(truth: dict[str, Any], second: dict[str, Any]) -> None:
    """B4.2 Every whole block before the last token is found, and answers stay the same."""
    assert_same(truth["base"], second["base"])
    assert second["base"]["external_hits"] == hit_limit(BASE)


@pytest.mark.parametrize(
    ("question", "hits"),
    [
        ("half", 8 * BLOCK),
        ("unaligned", 7 * BLOCK),
        ("other head", 0),
        ("salted", 0),
    ],
)
def test_shared_prefixes(truth: dict[str, Any], second: dict[str, Any], question: str, hits: int) -> None:
    """Whole blocks of a common prefix are found, and nothing behind a difference or under another salt."""
    assert_same(truth[question], second[question])
    assert second[question]["external_hits"] == hits


def test_many_at_once(truth: dict[str, Any], second: dict[str, Any]) -> None:
    """Concurrent loads, saves and decodes do not disturb one another."""
    assert_same(truth["crowd"], second["crowd"])
    assert second["crowd"]["external_hits"] >= hit_limit(BASE) // 2


def test_blocks_filled_by_decoding_are_stored(second: dict[str, Any]) -> None:
    """B4.14 The next turn finds what the last one generated."""
    prompts = second["next turn prompts"]
    # The last generated token was never computed, so the block that it fills cannot be there.
    answered = sum((len(prompt) + LONG_ANSWER - 1) // BLOCK * BLOCK for prompt in BASE)
    assert answered > hit_limit(BASE)
    assert second["next turn"]["external_hits"] == answered
    assert second["next turn again"]["external_hits"] == hit_limit(prompts)
    assert_same(second["next turn"], second["next turn again"])


def test_recomputing_stores_nothing_twice(run_engine: RunEngine, server: ServerProcess, second: dict[str, Any]) -> None:
    """B5.5 Equal content is stored once: engines that compute the same again add no block."""
    assert second["base"]["external_hits"]
    before = wait_until_durable(server)
    again = run_engine(
        [generate("first", [BASE[0]]), RESET, generate("again", [BASE[0]]), server_step(server, "status")],
        endpoint=server.endpoint,
    )
    assert again["again"]["external_hits"] == hit_limit([BASE[0]])
    assert wait_until_durable(server) == before
