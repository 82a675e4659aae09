"""Runs an SGLang engine through a list of steps: JSON job in, JSON results out.

Hit counts come from SGLang's own counters, not from the adapter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.polling import wait_until
from server_process import ServerProcess

STEP_SECONDS = 300.0


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import sglang

    _begin()
    engine = sglang.Engine(**job["engine"])
    results = [_step(engine, dict(step)) for step in job["steps"]]
    Path(sys.argv[2]).write_text(json.dumps(results))
    engine.shutdown()


def _step(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    match step.pop("op"):
        case "generate":
            return _generate(engine, **step)
        case "forget":
            # The engine refuses while pages are copied to the host pool.
            wait_until(lambda: engine.flush_cache().success, STEP_SECONDS, otherwise="the engine keeps its pages")
        case "clear":
            _begin()
            manager = engine.tokenizer_manager
            assert engine.loop.run_until_complete(manager.clear_hicache_storage()).success
        case "shell":
            subprocess.run(step["command"], check=True, timeout=STEP_SECONDS)
        case "trigger":
            Path(step["file"]).write_text(json.dumps([step["moment"], step["command"]]))
        case "acted":
            wait_until(lambda: not Path(step["file"]).exists(), STEP_SECONDS, otherwise="the moment did not come")
        case "opened":
            _wait_for_sessions(ServerProcess(Path(step["folder"])), step["ranks"])
        case "stored":
            _wait_for_blocks(ServerProcess(Path(step["folder"])), step["blocks"])
        case "files":
            folder = Path(step["folder"])
            wait_until(lambda: len(list(folder.glob("*.bin"))) >= step["count"], STEP_SECONDS)
        case unknown:
            raise ValueError(unknown)
    return {}


def _begin() -> None:
    """Called before the engine's sessions are opened."""
    global _begun  # noqa: PLW0603 - this program runs one engine
    _begun = time.monotonic()


_begun = 0.0


def _wait_for_sessions(server: ServerProcess, ranks: int) -> None:
    def opened() -> bool:
        age = time.monotonic() - _begun
        return sum(session["age_seconds"] < age for session in server.status()["sessions"]) == ranks

    wait_until(opened, STEP_SECONDS, otherwise=server.status, interval=0.1)


def _wait_for_blocks(server: ServerProcess, blocks: int) -> None:
    """Waits until both tiers have this many blocks, and no store is in flight."""

    def stored() -> bool:
        status = server.status()
        return not status["stores"] and all(tier["blocks"] >= blocks for tier in status["tiers"])

    wait_until(stored, STEP_SECONDS, otherwise=server.status, interval=0.2)


def _generate(
    engine: Any, prompts: list[list[int]], name: str = "", max_tokens: int = 8, **request: Any
) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
    begun = time.perf_counter()
    outputs = [
        engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, top_logprobs_num=3, **request)
        for prompt in prompts
    ]
    return {
        "name": name,
        "prompts": prompts,
        "seconds": time.perf_counter() - begun,
        "rows": [_describe(output) for output in outputs],
    }


def _describe(output: dict[str, Any]) -> dict[str, Any]:
    facts = output["meta_info"]
    details = facts.get("cached_tokens_details") or {}
    return {
        "tokens": output["output_ids"],
        "logprobs": [{str(token): value for value, token, _ in top} for top in facts["output_top_logprobs"]],
        "finish_reason": facts["finish_reason"]["type"],
        "cached": facts["cached_tokens"],
        "storage": details.get("storage", 0),
    }


if __name__ == "__main__":
    main()
