"""Requests of vLLM name their conversation, and an agent acts on its blocks."""

from __future__ import annotations

from scenario import BLOCK, RunEngine, generate, hit_limit, tokens, wait_until_durable
from server_process import ServerProcess

PROMPT = tokens(71, 16 * BLOCK + 1)
OTHER = tokens(72, 16 * BLOCK + 1)
NAMED = {"conversation_id": "agent 1"}


def test_blocks_of_a_conversation_are_retained_and_deleted(run_engine: RunEngine, server: ServerProcess) -> None:
    """Retained blocks survive an eviction of all others; deleted ones are found by no engine."""
    server.start()
    run_engine([generate("named", [PROMPT], settings=NAMED), generate("other", [OTHER])], endpoint=server.endpoint)
    wait_until_durable(server)
    [known] = server.conversations("show", NAMED["conversation_id"])["conversations"]
    assert known["requests"] == 1
    assert known["blocks"] == known["tiers"][0]["blocks"] > 0
    done = server.conversations("retain", NAMED["conversation_id"], "--for", "10m")
    assert done["changed_blocks"] == known["blocks"]
    server.evict_all()
    second = run_engine(
        [generate("named", [PROMPT], settings=NAMED), generate("other", [OTHER])], endpoint=server.endpoint
    )
    assert second["named"]["external_hits"] == hit_limit([PROMPT])
    assert second["other"]["external_hits"] == 0
    wait_until_durable(server)
    assert server.conversations("show", NAMED["conversation_id"])["conversations"][0]["requests"] == 2
    assert server.conversations("delete", NAMED["conversation_id"])["changed_blocks"] >= known["blocks"]
    third = run_engine([generate("named", [PROMPT])], endpoint=server.endpoint)
    assert third["named"]["external_hits"] == 0
