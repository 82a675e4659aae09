"""Run of the conversations in the engine's process. vLLM itself measures the times."""

from __future__ import annotations

import time
from typing import Any

from .decode import steps_of_engine
from .workload import Workload

__all__ = ["generate", "run_turns"]

COUNTERS = {"external_hits": "vllm:external_prefix_cache_hits", "local_hits": "vllm:prefix_cache_hits"}
LOGPROBS = 2
"""Number of best tokens that vLLM returns. If their probabilities are nearly equal, they tie."""


def run_turns(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Runs the workload; returns rows, counters and seconds.

    Prompts contain the answers of ``transcript``; without a transcript, the engine's own answers.
    With ``idle_rounds``, ``steps`` has the seconds of idle steps after the workload.
    """
    workload = Workload(**job["workload"])
    transcript: list[list[list[int]]] | None = job["transcript"]
    said: list[list[list[int]]] = [[] for _ in range(workload.conversations)]
    generate(llm, [workload.said(-1, 1)], workload.answer)  # warm-up
    before, started, rows = _counters(llm), time.perf_counter(), []
    for turn, conversations in workload.waves():
        history = transcript or said
        prompts = [workload.prompt(number, turn, history[number]) for number in conversations]
        outputs = generate(llm, prompts, workload.answer)
        for number, prompt, output in zip(conversations, prompts, outputs, strict=True):
            row = _row(output, number, turn, len(prompt))
            said[number].append(row["tokens"])
            rows.append(row)
    seconds = time.perf_counter() - started
    counted = {name: value - before[name] for name, value in _counters(llm).items()}
    steps = steps_of_engine(llm, job["idle_rounds"]) if job["idle_rounds"] else []
    return {"seconds": seconds, "rows": rows, "steps": steps, **counted}


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=LOGPROBS, detokenize=False, ignore_eos=True)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return outputs


def _row(output: Any, conversation: int, turn: int, prompt_tokens: int) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "conversation": conversation,
        "turn": turn,
        "prompt_tokens": prompt_tokens,
        "first_token_seconds": output.metrics.first_token_latency,
        "tokens": list(completion.token_ids),
        "margins": [_margin([item.logprob for item in step.values()]) for step in completion.logprobs],
    }


def _margin(logprobs: list[float]) -> float:
    best, second, *_ = sorted(logprobs, reverse=True)
    return best - second


def _counters(llm: Any) -> dict[str, float]:
    from vllm.v1.metrics.reader import Counter

    values = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    return {name: values.get(metric, 0) for name, metric in COUNTERS.items()}
