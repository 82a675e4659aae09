"""Demo of `kv_aware_router`: conversations over two vLLM engines, with the router and round robin.

    python router.py [--conversations N] [--turns N]

Each of two hosts has a vLLM engine on the CPU and a kvtier server. The same conversations run
twice: once with round robin, and once with the engine whose server has most of the prompt. Before
each run all caches are empty. The conversations take their turns in a random order, like users.

The exit code is 0 only if all outputs are identical in both runs, and the router has the higher hit
rate. All files are temporary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from processes import KVTIER, Child, DemoError, Server, console, free_ports, progress, run_demo
from report import conclude
from rich.table import Table

HOSTS = ("A", "B")
POLICIES = ("round_robin", "prefix")
BLOCK_TOKENS = 32
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1536, 128, 16
ENGINE_BLOCKS = 96
"""Blocks of an engine's own cache: a prompt and a half. Other prompts come from kvtier."""
CONVERSATIONS, TURNS = 6, 4
CONCURRENT = 1
"""Requests at the same time. The engines share the cores, so more would only wait."""
START_SECONDS = 300.0
"""Longest start of an engine; two of them start on the same cores."""
SETTLE_SECONDS = 0.5
"""Engines store the last blocks of an answer after they have sent it."""
PLAIN_WIDTH = 120
EXAMPLES = Path(__file__).resolve().parent.parent
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Answer:
    """One turn: tokens of the prompt, those that the engine did not compute, and its answer."""

    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    output: list[int]


@dataclass(frozen=True)
class Run:
    """All turns of all conversations with one policy, by conversation and turn."""

    policy: str
    answers: dict[tuple[int, int], Answer]

    @property
    def hit_rate(self) -> float:
        answers = self.answers.values()
        return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)

    def first_token_seconds(self, *, later: bool) -> float:
        """Returns the median; `later`: only of the turns after the first one of a conversation."""
        return statistics.median(
            answer.first_token_seconds for (_, turn), answer in self.answers.items() if turn or not later
        )


class EngineServer(Child):
    """A vLLM engine with an HTTP server, and kvtier's connector."""

    def __init__(self, host: str, directory: Path, model: Path, endpoint: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        extra = {"endpoint": endpoint, "publish_token_ids": True, "engine_address": f"127.0.0.1:{port}"}
        transfer = {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.client.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--skip-tokenizer-init"),
            *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--enforce-eager", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--seed", "0"),
            *("--num-gpu-blocks-override", str(ENGINE_BLOCKS), "--generation-config", "vllm"),
            *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
        ]
        super().__init__(f"vLLM on host {host}", command, directory / "engine.log", ENGINE_ENVIRONMENT)

    def is_up(self) -> bool:
        return get(f"{self.url}/health") is not None

    def empty(self) -> bool:
        """Empties the engine's own cache. Returns False while blocks are in use."""
        answer = httpx.post(f"{self.url}/reset_prefix_cache", timeout=60, trust_env=False)
        return answer.is_success and bool(answer.json()["success"])


class Router(Child):
    """A process of `kv_aware_router` in front of the engines."""

    def __init__(self, policy: str, directory: Path, targets: Sequence[str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, EXAMPLES / "kv_aware_router", "--policy", policy, "--port", str(port)]
        for target in targets:
            command += ["--engine", target]
        super().__init__(f"the router ({policy})", command, directory / f"router-{policy}.log")

    def blocks(self) -> list[int] | None:
        """Returns the number of known blocks per engine; None before the start."""
        health = get(f"{self.url}/health")
        return None if health is None else [row["blocks"] for row in health.json()["engines"]]


def get(url: str) -> httpx.Response | None:
    try:
        answer = httpx.get(url, timeout=30, trust_env=False)
    except httpx.HTTPError:
        return None
    return answer if answer.is_success else None


def start_host(name: str, directory: Path, model: Path, running: ExitStack) -> tuple[Server, EngineServer, str]:
    """Starts the server and the engine of a host. Returns them and the router's `--engine`."""
    own = directory / f"host-{name}"
    own.mkdir()
    events = {"publish": f"ipc://{own / 'publish'}", "replay": f"ipc://{own / 'replay'}"}
    lines = ["[events]", *(f"{key} = {json.dumps(value)}" for key, value in events.items())]
    (own / "kvtier.toml").write_text("\n".join(lines))
    options = ("--config", str(own / "kvtier.toml"), "--region-size", "512MiB", "--cpu-only")
    server = running.enter_context(Server(own, *options, name=f"kvtier on host {name}"))
    engine = EngineServer(name, own, model, server.endpoint, free_ports("127.0.0.1", 1)[0])
    running.enter_context(engine)
    return server, engine, f"{engine.url},events={events['publish']},replay={events['replay']}"


def prompts_of(conversations: int, turns: int) -> list[list[list[int]]]:
    """Returns the user's tokens, by conversation and turn."""
    chance = random.Random(11)
    return [
        [chance.choices(range(4, 2048), k=TURN_TOKENS if turn else FIRST_TOKENS) for turn in range(turns)]
        for _ in range(conversations)
    ]


async def ask(http: httpx.AsyncClient, prompt: list[int]) -> Answer:
    """Sends one turn and reads the stream."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    begun_at, first, output, usage = time.perf_counter(), None, list[int](), dict[str, Any]()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            if "error" in piece:
                raise DemoError(f"an engine failed: {piece['error']}")
            for choice in piece["choices"]:
                first = first or time.perf_counter() - begun_at
                output += choice["token_ids"] or []
            usage = piece.get("usage") or usage
    if response.status_code != 200 or first is None:
        raise DemoError(f"the router answered {response.status_code}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(usage["prompt_tokens"], cached, first, output)


async def converse(policy: str, url: str, prompts: list[list[list[int]]]) -> Run:
    """Runs all conversations: turn by turn, in a random order, some at the same time."""
    chance, answers = random.Random(5), dict[tuple[int, int], Answer]()
    history: list[list[int]] = [[] for _ in prompts]
    slots = asyncio.Semaphore(CONCURRENT)

    async def take_turn(http: httpx.AsyncClient, number: int, turn: int) -> None:
        async with slots:
            history[number] += prompts[number][turn]
            answers[number, turn] = answer = await ask(http, history[number])
            history[number] += answer.output
            await asyncio.sleep(SETTLE_SECONDS)

    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        for turn in range(len(prompts[0])):
            order = list(range(len(prompts)))
            chance.shuffle(order)
            with progress(f"{policy}: turn {turn + 1} of {len(prompts)} conversations"):
                await asyncio.gather(*(take_turn(http, number, turn) for number in order))
    return Run(policy, answers)


def empty(servers: Sequence[Server], engines: Sequence[EngineServer], routers: Sequence[Router]) -> None:
    """Empties the engines' own caches and the servers. Waits until the routers know it."""
    for engine in engines:
        engine.wait_until(engine.empty, "the reset of its own cache")
    for server in servers:
        command = [KVTIER, "evict", "--all", "--endpoint", server.endpoint]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    for router in routers:
        router.wait_until(lambda router=router: not any(router.blocks() or [0]), "the end of all blocks")


def verdict(runs: Sequence[Run]) -> list[str]:
    """Returns the differences from the expected results. Empty if there are none."""
    plain, routed = runs
    wrong = [
        f"the output of conversation {number + 1}, turn {turn + 1} differs"
        for (number, turn), answer in plain.answers.items()
        if answer.output != routed.answers[number, turn].output
    ]
    if routed.hit_rate <= plain.hit_rate:
        wrong.append(f"the router's hit rate is {routed.hit_rate:.0%}, that of round robin {plain.hit_rate:.0%}")
    return wrong


def reusable_rate(run: Run) -> float:
    """Returns the hit rate if each turn found all full blocks of the turn before."""
    reusable = sum(
        (run.answers[number, turn - 1].prompt_tokens + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for number, turn in run.answers
        if turn
    )
    return reusable / sum(answer.prompt_tokens for answer in run.answers.values())


def show(runs: Sequence[Run], seconds: dict[str, float]) -> None:
    """Prints the table."""
    count, load = len(runs[0].answers), os.getloadavg()[0]
    title = f"{count} requests to two engines; at most {reusable_rate(runs[0]):.0%} of the tokens can be reused"
    table = Table(title=title, title_justify="left")
    for column in ("policy", "hit rate", "median first token", "of later turns", "whole run"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for run in runs:
        table.add_row(
            run.policy,
            f"{run.hit_rate:.0%}",
            f"{run.first_token_seconds(later=False):.2f} s",
            f"{run.first_token_seconds(later=True):.2f} s",
            f"{seconds[run.policy]:.0f} s",
        )
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load average {load:.1f}", markup=False)


def demo(conversations: int, turns: int, directory: Path) -> int:
    """Runs the demo; returns the exit code."""
    from model import make_model

    with progress("makes a small Llama with seeded random weights (47 million parameters, nothing is downloaded)"):
        make_model(directory / "model")
    runs, seconds = list[Run](), dict[str, float]()
    with ExitStack() as running:
        hosts = [start_host(name, directory, directory / "model", running) for name in HOSTS]
        engines = [engine for _, engine, _ in hosts]
        with progress("starts two vLLM engines"):
            for engine in engines:
                engine.wait_until(engine.is_up, "the start", START_SECONDS)
        ports = free_ports("127.0.0.1", len(POLICIES))
        targets = [target for _, _, target in hosts]
        routers = [
            running.enter_context(Router(policy, directory, targets, port))
            for policy, port in zip(POLICIES, ports, strict=True)
        ]
        for router in routers:
            router.wait_until(lambda router=router: router.blocks() is not None, "the start")
        prompts = prompts_of(conversations, turns)
        for engine in engines:  # the first request of an engine is slow
            asyncio.run(warm_up(engine.url))
        for policy, router in zip(POLICIES, routers, strict=True):
            with progress("empties all caches"):
                empty([server for server, _, _ in hosts], engines, routers)
            begun_at = time.perf_counter()
            runs.append(asyncio.run(converse(policy, router.url, prompts)))
            seconds[policy] = time.perf_counter() - begun_at
            console.print(f"{policy} is done: hit rate {runs[-1].hit_rate:.0%}", markup=False)
    show(runs, seconds)
    return conclude(verdict(runs), "All outputs are identical.")


async def warm_up(url: str) -> None:
    """Sends a request to an engine."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        await ask(http, list(range(4, 4 + FIRST_TOKENS)))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="number of conversations")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of each conversation")
    options = parser.parse_args()
    return run_demo(lambda directory: demo(options.conversations, options.turns, directory), plain_width=PLAIN_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
