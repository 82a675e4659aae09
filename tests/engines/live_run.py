"""Runs a `LiveEngine` through steps with server failures in between: `live_run.py JOB OUT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine_run import describe
from harness.polling import polls
from live_engine import LiveEngine

SETTLE_SECONDS = 120.0
STEP_SECONDS = 300.0
QUESTIONS = 5


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    live = LiveEngine(job["llm"])
    results = [_step(live, dict(step)) for step in job["steps"]]
    Path(sys.argv[2]).write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # vLLM's shutdown in a single process is not tested here


def _step(live: LiveEngine, step: dict[str, Any]) -> dict[str, Any]:
    match step.pop("op"):
        case "generate":
            return _generate(live, **step)
        case "find":
            return _find(live, **step)
        case "reset":
            _forget(live)
        case "server":
            _run(step["command"])
        case "meet":
            _meet(live, step["command"])
        case "settle":
            return {"name": step["name"], **_settle(live, step["command"])}
        case unknown:
            raise ValueError(unknown)
    return {}


def _generate(
    live: LiveEngine,
    prompts: list[list[int]],
    name: str,
    max_tokens: int = 8,
    act: dict[str, Any] | None = None,
    *,
    at_once: bool = True,
) -> dict[str, Any]:
    """`act`: the server's command, run once "when" the engine reaches a moment."""
    acted: list[str] = []
    if act is not None:

        def once() -> None:
            if not acted:
                acted.append(act["when"])
                if act["command"][-1] == "hang" and act["when"] != "asking":
                    live.hear()  # so that lookups that time out are counted at their moment
                _run([*act["command"], str(os.getpid())])

        live.moments = {act["when"]: once}
    before, known = live.counters(), (live.abandoned, live.failed_loads, live.not_stored)
    start, outputs = time.perf_counter(), []
    for number, prompt in enumerate(prompts):
        live.add(f"{name}/{number}", prompt, max_tokens)
        if not at_once:
            outputs += live.run()
    outputs += live.run()
    seconds = time.perf_counter() - start
    live.moments = {}
    live.rest()
    after = live.counters()
    outputs.sort(key=lambda output: int(output.request_id.rpartition("/")[2]))
    return {
        "name": name,
        "acted": bool(acted),
        "seconds": seconds,
        "abandoned": live.abandoned - known[0],
        "failed_loads": live.failed_loads - known[1],
        "not_stored": live.not_stored - known[2],
        "external_hits": after["vllm:external_prefix_cache_hits"] - before["vllm:external_prefix_cache_hits"],
        "preemptions": after["vllm:num_preemptions"] - before["vllm:num_preemptions"],
        "rows": [describe(output) for output in outputs],
    }


def _find(live: LiveEngine, status: list[str], *, forget: bool, **step: Any) -> dict[str, Any]:
    """Generates stored prompts once the server answers lookups in time again."""
    for number in range(QUESTIONS):
        _meet(live, status)
        late = live.abandoned
        live.add(f"is it there? {number}", step["prompts"][0], 1, salt=f"{step['name']} {number}")
        live.run()
        if live.abandoned == late:
            break
    if forget:
        _forget(live)
    return _generate(live, **step)


def _forget(live: LiveEngine) -> None:
    live.rest()
    assert live.reset()


def _meet(live: LiveEngine, status: list[str]) -> None:
    live.meet(int(json.loads(_run(status))["epoch"], 16))


def _settle(live: LiveEngine, command: list[str]) -> dict[str, Any]:
    """Returns what the server and the engine still hold after they had time to release it."""
    live.rest()
    for _ in polls(SETTLE_SECONDS, 0.1):
        status = json.loads(_run(command))
        held = {name: int(status[name]) for name in ("leases", "stores", "quarantined_bytes")}
        if not any(held.values()):
            break
    return {"server": held, "engine": live.leftovers()}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=STEP_SECONDS)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main()
