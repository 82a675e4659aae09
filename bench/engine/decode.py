"""Decode steps of a whole engine with an idle connector. Runs in the engine's process.

The benchmark compares an engine with a connector and an engine without. Unlike the swap within one
engine (steps.py), this includes the cost of the connector's background threads and session. But the
result also contains the noise between two processes.
"""

from __future__ import annotations

import random
import time
from typing import Any

from .workload import FIRST_TOKEN, VOCABULARY

__all__ = ["BATCH", "decode_seconds", "steps_of_engine"]

BATCH = 8
PROMPT_TOKENS, ANSWER_TOKENS = 16, 15
"""Prompt and answer together are less than one engine block (32 tokens). So the connector has
nothing to find, load or save."""
FIRST_STEPS = 4
"""First steps that are not counted, because some of them still compute prompts."""


def steps_of_engine(llm: Any, rounds: int) -> list[float]:
    """Returns the seconds of each counted step; each round decodes ``BATCH`` new requests."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
    source, seconds = random.Random(4), []
    for number in range(rounds + 1):
        words = [source.choices(range(FIRST_TOKEN, VOCABULARY), k=PROMPT_TOKENS) for _ in range(BATCH)]
        llm.enqueue([{"prompt_token_ids": prompt} for prompt in words], sampling, use_tqdm=False)
        taken = decode_seconds(llm.llm_engine)
        seconds += taken if number else []  # the first round may wait for earlier saves
    return seconds


def decode_seconds(engine: Any) -> list[float]:
    """Runs all requests to their end; returns the seconds of the steps that decode all of them."""
    seconds, ended = [], False
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - start
        ended = ended or any(output.finished for output in outputs)
        if not ended:
            seconds.append(took)
    return seconds[FIRST_STEPS:]
