"""A busy engine with a tiny KV cache: right tokens, no leaks (CHURN_SECONDS=300 for both modes)."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from churn import MOMENTS
from scenario import BLOCK, RunEngine, generate, tokens
from server_process import ServerProcess

SECONDS = float(os.environ.get("CHURN_SECONDS", "300")) / 2
"""Seconds per mode."""
START_SECONDS = 600
POOL_BLOCKS = 40
REGION = "48MiB"
"""Of the server: fewer blocks than all prompts have, so that it evicts as well, and fetches back
from its disk."""
OUTPUT = 40


def make_prompts() -> list[list[int]]:
    """Returns 40 prompts of 1 to 14 blocks; five each share a prefix."""
    rng = random.Random(4)
    prompts = []
    for family in range(8):
        prefix = tokens(500 + family, rng.randint(1, 9) * BLOCK)
        prompts += [prefix + tokens(600 + 10 * family + tail, rng.randint(1, 5 * BLOCK)) for tail in range(5)]
    return prompts


@pytest.fixture(scope="module")
def reference(run_engine: RunEngine) -> list[dict[str, Any]]:
    """Answers of an engine without a connector and with enough memory, to each prompt alone."""
    prompts = make_prompts()
    rows = run_engine([generate("all", prompts, max_tokens=OUTPUT)])["all"]["rows"]
    return [{"prompt": prompt, **row} for prompt, row in zip(prompts, rows, strict=True)]


@pytest.mark.timeout(SECONDS + START_SECONDS + 300)
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_nothing_leaks_and_no_token_is_wrong(
    reference: list[dict[str, Any]], run_engine: RunEngine, tmp_path: Path, mode: str
) -> None:
    """B4.3, B4.4, B4.12 Chunked prefill, preemptions, aborts and evictions on both sides."""
    server = ServerProcess(tmp_path, REGION)
    server.start()
    try:
        life = run_engine(
            [{"seconds": SECONDS, "seed": 1, "reference": reference}],
            endpoint=server.endpoint,
            lookup_timeout_s=5.0,
            extra={"lazy_offload": mode == "lazy"},
            runner="churn.py",
            long_timeout=False,
            seconds=SECONDS + START_SECONDS,
            num_gpu_blocks_override=POOL_BLOCKS,
            max_num_batched_tokens=4 * BLOCK,
            max_num_seqs=8,
            max_model_len=24 * BLOCK,
        )["churn"]
        counts = life["counts"]
        print(f"\n{mode}: {counts}")
        assert counts["finished"] > 0
        assert counts["preemptions"] > 0
        assert counts["external_hits"] >= 10 * BLOCK
        assert all(counts.get(f"aborted {moment}") for moment in MOMENTS), "some moment never came"
        assert not any(life["held"].values()), life["held"]
    finally:
        server.kill()
