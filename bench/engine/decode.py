"""Decode steps of a whole engine with an idle connector (in the engine's process).

Two engines, one with a connector and one without, include the connector's background threads and
its session with the server, unlike the swap within one engine (steps.py). They also differ by all
noise between two processes.
"""

from __future__ import annotations

import random
import time
from typing import Any

from .workload import FIRST_TOKEN, VOCABULARY

__all__ = ["BATCH", "decode_seconds", "steps_of_engine"]

BATCH = 8
PROMPT_TOKENS, ANSWER_TOKENS = 16, 15
"""Together less than one block of the engine (32 tokens): nothing to find, load or save."""
FIRST_STEPS = 4
"""Not counted: some of these steps still compute prompts."""


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
    """Steps until no request is left; returns the seconds of the steps that decode all of them."""
    seconds, ended = [], False
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - start
        ended = ended or any(output.finished for output in outputs)
        if not ended:
            seconds.append(took)
    return seconds[FIRST_STEPS:]
