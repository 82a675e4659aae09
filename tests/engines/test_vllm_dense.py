"""A dense model: one engine stores, the server is killed and restarted, another engine loads."""

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
SKIP = {"skip_load": True, "retain_for_s": 5}

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
def reference(run_engine: RunEngine) -> dict[str, Any]:
    """Answers of an engine without a connector."""
    return run_engine(QUESTIONS)


@pytest.fixture(scope="module")
def first(run_engine: RunEngine, server: ServerProcess) -> dict[str, Any]:
    """An engine with an empty store."""
    server.start()
    events = f"ipc://{server.folder}/events"
    # The events of the saves of a request are published during the next one. A reset waits for
    # pending saves; these are counted with the next step.
    steps = [QUESTIONS[0], generate("after", [tokens(50, 2 * BLOCK)]), RESET, generate("later", [tokens(51, BLOCK)])]
    results = run_engine(
        steps,
        endpoint=server.endpoint,
        afresh=True,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events},
    )
    return results | {"blocks": wait_until_durable(server)}


@pytest.fixture(scope="module")
def second(
    run_engine: RunEngine, server: ServerProcess, first: dict[str, Any], reference: dict[str, Any]
) -> dict[str, Any]:
    """Another engine, after a server restart, loads over gRPC what was stored in shared memory."""
    assert first["blocks"]["lmdb"] > 0
    server.kill()
    server.start()
    next_turn = [
        prompt + row["tokens"] + tokens(40, 50) for prompt, row in zip(BASE, reference["base"]["rows"], strict=True)
    ]
    results = run_engine(
        [
            *QUESTIONS,
            RESET,
            generate("next turn", next_turn),
            RESET,
            generate("next turn again", next_turn),
            RESET,
            generate("skipped", [HALF], settings=SKIP),
        ],
        endpoint=server.endpoint,
        extra={"transport": "grpc"},
    )
    return results | {"next turn prompts": next_turn}


def test_storing_changes_no_answer(reference: dict[str, Any], first: dict[str, Any]) -> None:
    """An engine with an empty store answers like one without a connector, and finds nothing."""
    assert_same(reference["base"], first["base"])
    assert first["base"]["external_hits"] == 0


def test_what_is_stored_is_counted_and_announced(first: dict[str, Any]) -> None:
    """B4.5, B4.14 vLLM's metrics count every full block as saved, and KV events name it."""
    blocks = sum((len(prompt) + LONG_ANSWER - 1) // BLOCK for prompt in BASE)
    counted = {name.removeprefix("vllm:kvtier_"): value for name, value in first["later"]["kvtier"].items()}
    assert counted["save_blocks:stored"] >= blocks
    assert counted["save_blocks:not_stored"] == counted["load_blocks:loaded"] == counted["load_bytes"] == 0
    assert counted["save_bytes"] % counted["save_blocks:stored"] == 0
    assert counted["save_seconds"] >= len(BASE)
    assert (counted["lookups:miss"], counted["lookups:hit"]) == (len(BASE) + 1, 0), "the last prompt is one block"
    assert counted["lookup_seconds"] == len(BASE) + 1
    events = [event for name in ("base", "after", "later") for event in first[name]["events"]]
    stored = {
        medium: {
            block_hash
            for kind, where, hashes in events
            if (kind, where) == ("BlockStored", medium)
            for block_hash in hashes
        }
        for medium in ("GPU", "CPU")
    }
    assert len(stored["CPU"]) >= blocks
    assert stored["CPU"] <= stored["GPU"]


def test_what_is_loaded_is_counted(second: dict[str, Any]) -> None:
    """The outcome of each lookup and load is in vLLM's metrics."""
    counted = {name.removeprefix("vllm:kvtier_"): value for name, value in second["base"]["kvtier"].items()}
    assert (counted["lookups:hit"], counted["lookups:partial"]) == (len(BASE), 0)
    assert counted["load_blocks:loaded"] == hit_limit(BASE) // BLOCK
    assert counted["load_blocks:failed"] == 0
    assert counted["load_bytes"] % counted["load_blocks:loaded"] == 0
    assert counted["load_seconds"] == len(BASE)
    assert "KV Transfer metrics" not in second["log"] or "load_blocks_loaded" in second["log"]


def test_a_request_may_be_computed_regardless(reference: dict[str, Any], second: dict[str, Any]) -> None:
    """A request's kv_transfer_params reach the connector."""
    assert_same(reference["half"], second["skipped"])
    assert second["skipped"]["external_hits"] == 0


def test_another_engine_finds_all_after_a_sigkill_of_the_server(
    reference: dict[str, Any], second: dict[str, Any]
) -> None:
    """B4.2 Every whole block before the last token hits; the answers are the same."""
    assert_same(reference["base"], second["base"])
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
def test_shared_prefixes(reference: dict[str, Any], second: dict[str, Any], question: str, hits: int) -> None:
    """Whole blocks of a common prefix hit; blocks behind a difference, or of another salt, miss."""
    assert_same(reference[question], second[question])
    assert second[question]["external_hits"] == hits


def test_many_at_once(reference: dict[str, Any], second: dict[str, Any]) -> None:
    """Concurrent loads, saves and decodes do not disturb one another."""
    assert_same(reference["crowd"], second["crowd"])
    assert second["crowd"]["external_hits"] >= hit_limit(BASE) // 2


def test_blocks_filled_by_decoding_are_stored(second: dict[str, Any]) -> None:
    """B4.14 The next turn finds blocks that the last one generated."""
    prompts = second["next turn prompts"]
    # The last generated token was never computed, so the block that it fills is not stored.
    answered = sum((len(prompt) + LONG_ANSWER - 1) // BLOCK * BLOCK for prompt in BASE)
    assert answered > hit_limit(BASE)
    assert second["next turn"]["external_hits"] == answered
    assert second["next turn again"]["external_hits"] == hit_limit(prompts)
    assert_same(second["next turn"], second["next turn again"])


def test_an_engine_with_the_deadlines_of_the_product(
    run_engine: RunEngine, server: ServerProcess, reference: dict[str, Any], second: dict[str, Any]
) -> None:
    """Just as a user starts it, it answers as without us.

    What it finds in time is the machine's matter.
    """
    assert second["base"]["external_hits"]
    life = run_engine(QUESTIONS[:1], endpoint=server.endpoint, lookup_timeout_s=2.0, afresh=True, long_timeout=False)
    assert_same(reference["base"], life["base"])
    assert "kvtier: namespace" in life["log"]
    assert not [line for line in life["log"].splitlines() if "background.py" in line and "Traceback" in line]


def test_recomputing_stores_nothing_twice(run_engine: RunEngine, server: ServerProcess, second: dict[str, Any]) -> None:
    """B5.5 Equal content is stored once: engines that compute it again add no block."""
    assert second["base"]["external_hits"]
    before = wait_until_durable(server)
    again = run_engine(
        [generate("first", [BASE[0]]), RESET, generate("again", [BASE[0]]), server_step(server, "status")],
        endpoint=server.endpoint,
    )
    assert again["again"]["external_hits"] == hit_limit([BASE[0]])
    assert wait_until_durable(server) == before
