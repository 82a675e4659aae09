"""Tensor parallelism: every rank has its own part of each block."""

from __future__ import annotations

from scenario import BLOCK, RunEngine, assert_same, generate, hit_limit, tokens
from server_process import ServerProcess

BASE = [tokens(81, 12 * BLOCK + 5), tokens(82, 9 * BLOCK)]
STEPS = [generate("base", BASE)]


def test_two_ranks(run_engine: RunEngine, server: ServerProcess) -> None:
    """B4.5 A block is visible when both ranks have stored their part, and each loads its own."""
    server.start()
    two = {"tensor_parallel_size": 2, "bind": "0|1"}
    first = run_engine(STEPS, endpoint=server.endpoint, **two)
    second = run_engine(STEPS, endpoint=server.endpoint, **two)
    assert first["base"]["external_hits"] == 0
    assert second["base"]["external_hits"] == hit_limit(BASE)
    assert_same(first["base"], second["base"])
