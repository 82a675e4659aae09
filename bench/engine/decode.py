"""Inside an engine's process: decode steps in which a connector has nothing to do, in an engine that had it from its start.

Two such engines, one with a connector and one without, show what no swap within one engine can (see steps.py): the connector's
background threads and its session with the server. In return they differ by all that two processes differ by.
"""

from __future__ import annotations

import random
import time
from typing import Any

from .workload import FIRST_TOKEN, VOCABULARY

__all__ = ["BATCH", "decode_seconds", "steps_of_engine"]

BATCH = 8
PROMPT_TOKENS, ANSWER_TOKENS = 16, 15
"""Together they do not fill one of the engine's blocks (32 tokens): there is nothing to find, to load or to save."""
FIRST_STEPS = 4
"""Not counted: while requests come in, some steps have prompts to compute."""


def steps_of_engine(llm: Any, rounds: int) -> list[float]:
    """Returns the seconds of every counted step of so many rounds, each of which decodes ``BATCH`` new requests."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
    source, seconds = random.Random(4), []
    for number in range(rounds + 1):
        words = [source.choices(range(FIRST_TOKEN, VOCABULARY), k=PROMPT_TOKENS) for _ in range(BATCH)]
        llm.enqueue([{"prompt_token_ids": prompt} for prompt in words], sampling, use_tqdm=False)
        taken = decode_seconds(llm.llm_engine)
        seconds += taken if number else []  # the first round may still have saves of the conversations to wait for
    return seconds


def decode_seconds(engine: Any) -> list[float]:
    """Steps until no request is left; returns the seconds of the steps in which all of them decode."""
    seconds, ended = [], False
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - start
        ended = ended or any(output.finished for output in outputs)
        if not ended:
            seconds.append(took)
    return seconds[FIRST_STEPS:]
