"""Prompts, steps and comparisons of the engine tests."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.polling import polls
from server_process import ServerProcess
from tiny_models import VOCABULARY

__all__ = ["BLOCK", "RunEngine", "assert_same", "generate", "hit_limit", "server_step", "tokens", "wait_until_durable"]

BLOCK = 32
RunEngine = Callable[..., dict[str, Any]]
TOLERANCE = 5e-4  # float32 noise is about 4e-5, one wrong block 1e-2


def tokens(seed: int, count: int) -> list[int]:
    """Returns random tokens, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(4, VOCABULARY) for _ in range(count)]


def generate(name: str, prompts: list[list[int]], **options: Any) -> dict[str, Any]:
    """Returns a step that generates from prompts, in sequence unless `at_once`."""
    return {"op": "generate", "name": name, "prompts": prompts, **options}


def server_step(server: ServerProcess, action: str, *more: str) -> dict[str, Any]:
    """Returns a step in which the engine process sends a command to the server."""
    script = Path(__file__).with_name("server_process.py")
    return {"op": "shell", "command": [sys.executable, str(script), str(server.folder), action, *more]}


def hit_limit(prompts: list[list[int]]) -> int:
    """Returns the tokens that hits may cover: whole blocks, and never the last token (B4.2)."""
    return sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Asserts identical tokens, and log-probabilities equal but for noise."""
    for number, (want, got) in enumerate(zip(expected["rows"], actual["rows"], strict=True)):
        where = f"{actual['name']}, prompt {number}"
        assert got["finish_reason"] == "length", where
        assert got["tokens"] == want["tokens"], where
        for left, right in zip(want["logprobs"], got["logprobs"], strict=True):
            common = left.keys() & right.keys()
            assert common, where
            assert all(math.isclose(left[token], right[token], abs_tol=TOLERANCE) for token in common), where


def wait_until_durable(server: ServerProcess, seconds: float = 120) -> dict[str, int]:
    """Waits until the lower tier has all blocks of the CPU tier. Returns the blocks per tier.

    Blocks that a rank left half written, as one does whose call met its deadline on a busy machine,
    are not waited for: what counts then is that nothing is being stored or waits for the lower
    tier, and that it took all.
    """
    for _ in polls(seconds, 0.1):
        status = server.status()
        tiers = {tier["name"]: tier for tier in status["tiers"]}
        blocks = {name: tier["blocks"] for name, tier in tiers.items()}
        unfinished = ("queued_bytes", "jobs", "dropped_blocks", "declined")
        at_rest = not (status["stores"] or any(tiers["lmdb"][figure] for figure in unfinished))
        if blocks["lmdb"] and (blocks["lmdb"] >= blocks["cpu"] > 0 or at_rest):
            return blocks
    raise AssertionError(blocks)
