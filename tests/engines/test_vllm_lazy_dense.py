"""Lazy mode in a real engine: what it evicts, another one finds."""

from __future__ import annotations

from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens, wait_until_durable
from server_process import ServerProcess

POOL_BLOCKS = 48
PROMPTS = [tokens(51, 12 * BLOCK + 1), tokens(52, 12 * BLOCK + 9)]
FLOOD = [tokens(60 + number, 16 * BLOCK) for number in range(5)]


def test_what_an_engine_evicts_is_found_by_another(run_engine: RunEngine, server: ServerProcess) -> None:
    """B4.7 Of a small engine under pressure; answers stay the same in both."""
    truth = run_engine([generate("base", PROMPTS)])
    server.start()
    first = run_engine(
        [generate("base", PROMPTS), generate("flood", FLOOD), generate("again", PROMPTS)],
        endpoint=server.endpoint,
        extra={"lazy_offload": True},
        num_gpu_blocks_override=POOL_BLOCKS,
        max_model_len=32 * BLOCK,
    )
    assert_same(truth["base"], first["base"])
    assert_same(truth["base"], first["again"])
    assert first["base"]["external_hits"] == 0
    # The flood took every block of the engine: what it finds again came from the server.
    assert first["again"]["external_hits"] >= hit_limit(PROMPTS) // 2
    wait_until_durable(server)
    second = run_engine([generate("base", PROMPTS)], endpoint=server.endpoint)
    assert_same(truth["base"], second["base"])
    assert second["base"]["external_hits"] >= hit_limit(PROMPTS) // 2
