"""One engine process of the demo: transformers, with its KV cache in kvtier.

    python engine_transformers.py JOB.json

Prints events as lines of JSON; the last one is the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# OpenMP threads must not spin while they wait: on a busy machine this would take seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def say(event: str, **more: object) -> None:
    """Prints an event for the demo."""
    print(json.dumps({"event": event, **more}), flush=True)


class FirstToken:
    """Streamer that records the time of the first new token."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._prompt_seen = False

    def put(self, _: object) -> None:
        """Called with the prompt, then with each token."""
        if self._prompt_seen and self.at is None:
            self.at = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


class PrefillCounter:
    """Counts the tokens that the model computes for its first output, with hooks on the model."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        self._done = False
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)

    def start(self) -> None:
        """Starts counting."""
        self.tokens, self._done = 0, False

    def before(self, _: object, __: object, inputs: dict[str, Any]) -> None:
        """Called before each forward pass."""
        if not self._done:
            self.tokens += inputs["input_ids"].shape[1]

    def after(self, *_: object) -> None:
        """Called after each forward pass."""
        self._done = True


def main() -> None:
    """Runs the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    say("imports torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM

    from kvtier.client.engines.transformers import KVTierCache

    say("loads the model")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    counter = PrefillCounter(model)
    prompt = torch.tensor([job["prompt"]])
    options = {"block_tokens": job["block_tokens"], "wait": job["wait_seconds"]}
    with KVTierCache(model, job["endpoint"], observers=(counter.before, counter.after), **options) as kv:
        kv.wait_until_identified(60)
        say(f"runs a prompt of {prompt.shape[1]:,} tokens")
        counter.start()
        first = FirstToken()
        start = time.perf_counter()
        output = kv.generate(
            prompt, streamer=first, do_sample=False, max_new_tokens=job["new_tokens"], min_new_tokens=job["new_tokens"]
        )
        say("waits until its blocks are durable")
        kv.flush(output)
        say(
            "done",
            computed=counter.tokens,
            loaded=dict(kv.last_hit.tiers),
            first_token_seconds=(first.at or start) - start,
            output=output[0, prompt.shape[1] :].tolist(),
        )
        if job["stays"]:
            signal.pause()


if __name__ == "__main__":
    main()
