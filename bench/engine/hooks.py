"""Time of the connector's hooks in decode steps that fill no block, without an engine.

    PYTHONPATH=tests:tests/client/engines/vllm_adapters python -m bench.engine.hooks

Steps of 1, 32 and 256 running requests are made up. The client has no server, and its threads
wait. Before each half of a step 32 MiB are copied, because between two steps an engine uses the
caches for other work. KVTIER_BENCH_BESIDE is the directory of another tree, whose processes take
turns with those of this tree.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.calls import BESIDE
from bench.measure import percentile

__all__ = ["main"]

ROUNDS, STEPS = 8, 30
CASES = ((1, 0), (32, 0), (256, 0), (256, 3))
"""Number of requests, and of drafts per step of a request."""
COPIED = 32 << 20
PARTS = ("scheduler", "worker", "message")

Seconds = dict[str, list[float]]


def main() -> None:
    """Prints microseconds per step, lower quartile: scheduler, worker and pickled message."""
    if sys.argv[1:] == ["child"]:
        serve()
        return
    here = Path(__file__).parents[2]
    trees = {"this tree": here} | ({"beside": Path(os.environ[BESIDE])} if BESIDE in os.environ else {})
    children = {name: _child(tree / "src") for name, tree in trees.items()}
    for batch, drafts in CASES:
        found: dict[str, Seconds] = {name: {part: [] for part in PARTS} for name in children}
        for turn in range(ROUNDS):
            for name in list(children)[:: 1 if turn % 2 else -1]:
                for part, seconds in _ask(children[name], batch, drafts).items():
                    found[name][part] += seconds
        print(f"{batch} requests, {drafts} drafts: {_row(found)}", flush=True)
    for child in children.values():
        child.communicate()


def _row(found: Mapping[str, Seconds]) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{part} {percentile(seconds, 0.25) * 1e3:.0f}" for part, seconds in of_tree.items())
        for name, of_tree in found.items()
    )


def _child(sources: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{sources}:{os.environ['PYTHONPATH']}", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "bench.engine.hooks", "child"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _ask(child: subprocess.Popen[str], batch: int, drafts: int) -> Seconds:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps([batch, drafts]) + "\n")
    child.stdin.flush()
    for line in child.stdout:
        if line.startswith("{"):  # vLLM logs to the same stream
            answer: Seconds = json.loads(line)
            return answer
    raise RuntimeError("a child has ended")


def serve() -> None:
    """Runs steps for each line of the standard input; answers the seconds of each step."""
    from connector_rig import Server
    from step_rig import StepRig

    from kvtier.client.engines import identity
    from kvtier.client.engines.vllm import connector

    with (
        patch.object(connector, "Client", Server),
        patch.object(identity, "process_started_at", lambda: math.inf),  # the files are new
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
    ):
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "model.safetensors").write_bytes(b"weights")
        for line in sys.stdin:
            batch, drafts = json.loads(line)
            rig = StepRig(folder, batch, drafts)
            print(json.dumps(_measure(rig)), flush=True)
            rig.close()


def _measure(rig: Any) -> Seconds:
    seconds: Seconds = {part: [] for part in PARTS}
    rig.step()  # looks at each request
    for _ in range(STEPS):
        rig.step(_timer(seconds["scheduler"]), _timer(seconds["worker"]))
        _timer(seconds["message"])(lambda: pickle.loads(pickle.dumps(rig.metadata)))  # noqa: S301
    return seconds


@functools.cache
def _memory() -> tuple[bytes, bytearray]:
    return bytes(COPIED), bytearray(COPIED)


def _timer(seconds: list[float]) -> Callable[[Callable[[], Any]], None]:
    source, target = _memory()

    def call(act: Callable[[], Any]) -> None:
        target[:] = source
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)

    return call


if __name__ == "__main__":
    main()
