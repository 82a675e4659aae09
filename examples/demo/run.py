"""Demo: one engine computes the KV of a prompt; later engines load it, even after a server crash.

    python run.py [--engine transformers|vllm] [--tokens N]

Three engine processes get the same prompt, one after the other. Before the third process the server
is killed with SIGKILL and restarted, so the third process loads from LMDB. The exit code is 0 only
if all outputs are identical and the second and third engine loaded the expected tokens. All files
are temporary.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from model import make_model, make_prompt
from rich.console import Console
from rich.status import Status
from rich.table import Table

HERE = Path(__file__).resolve().parent
KVTIER = Path(sys.executable).with_name("kvtier")
BLOCK_TOKENS = 64
PROMPT_TOKENS = {"transformers": 3072, "vllm": 6144}
NEW_TOKENS = 24
PATIENCE_SECONDS = 60.0
PLAIN_WIDTH = 110

console = Console(highlight=False)


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


@dataclass(frozen=True)
class Result:
    """Result of one engine process."""

    computed: int
    """Tokens of the prompt that the engine computed."""
    loaded: dict[str, int]
    """Tokens of the prompt that the engine loaded, by tier."""
    first_token_seconds: float
    output: list[int]


class Server:
    """A `kvtier serve` with the embedded defaults in its own directory."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"unix:{directory / 'kvtier.sock'}"
        self._log = directory / "server.log"
        self._command = [KVTIER, "serve", "--listen", self.endpoint, "--region-size", "1GiB"]
        self._command += ["--data-dir", str(directory / "data")]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def start(self) -> float:
        """Starts the server. Returns the seconds until its first answer."""
        start = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while self.status() is None:
            if self._process.poll() is not None or time.perf_counter() - start > PATIENCE_SECONDS:
                raise DemoError(f"the server did not start:\n{self._log.read_text()}")
        return time.perf_counter() - start

    def kill(self) -> None:
        """Ends the server as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def status(self) -> dict[str, Any] | None:
        """Returns the answer of `kvtier status`, or None without a server."""
        command = [KVTIER, "status", "--endpoint", self.endpoint, "--json"]
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        return json.loads(answer.stdout) if answer.returncode == 0 else None

    def settle(self) -> int:
        """Waits until the CPU tier's blocks are all in LMDB. Returns their number."""
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while time.perf_counter() < deadline:
            status = self.status() or {"tiers": [], "stores": 1}
            blocks = {tier["name"]: tier["blocks"] for tier in status["tiers"]}
            busy = status["stores"] or any(tier["jobs"] for tier in status["tiers"])
            if not busy and len(set(blocks.values())) == 1:
                return int(blocks["cpu"])
            time.sleep(0.2)
        raise DemoError(f"the blocks do not arrive in LMDB: {self.status()}")


def run_engine(engine: str, directory: Path, job: dict[str, Any], label: str) -> Result:
    """Runs one engine process and shows its progress. Returns its result."""
    (directory / "job.json").write_text(json.dumps(job))
    command = [sys.executable, str(HERE / f"engine_{engine}.py"), str(directory / "job.json")]
    result = None
    with (directory / "engine.log").open("w+") as log, progress(f"{label}: starts") as status:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, cwd=directory
        )
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"event"'):  # the engine's own output
                continue
            message = json.loads(line)
            event = message.pop("event")
            status.update(f"{label}: {event}")
            if event == "done":
                result = Result(**message)
        code = process.wait()
        if code != 0 or result is None:
            log.seek(0)
            raise DemoError(f"{label} ended with {code}:\n{log.read()[-4000:]}")
    return result


def attributed(result: Result, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Result:
    """Names the lowest tier with new hits, if the engine named no tier for the loaded tokens."""
    unnamed = result.loaded.get("")
    if not unnamed or before is None or after is None:
        return result
    grown = [now["name"] for was, now in zip(before["tiers"], after["tiers"], strict=True) if now["hits"] > was["hits"]]
    return replace(result, loaded={grown[-1] if grown else "?": unnamed})


def progress(text: str) -> Status:
    """Returns a spinner line."""
    if not console.is_terminal:
        console.print(f"… {text}", markup=False)
    return console.status(text)


def verdict(results: Sequence[Result], prompt_tokens: int) -> list[str]:
    """Returns the differences from the expected results. Empty if there are none."""
    wanted = (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    expected: list[dict[str, int]] = [{}, {"cpu": wanted}, {"lmdb": wanted}]
    wrong = []
    for number, (result, loaded) in enumerate(zip(results, expected, strict=True), start=1):
        if result.loaded != loaded:
            wrong.append(f"engine {number} loaded {result.loaded or 'nothing'}, expected {loaded or 'nothing'}")
        if result.computed != prompt_tokens - sum(loaded.values()):
            wrong.append(f"engine {number} computed {result.computed} tokens of the prompt")
        if result.output != results[0].output:
            wrong.append(f"the output of engine {number} differs from the output of engine 1")
    return wrong


def show(results: Sequence[Result], notes: Sequence[str]) -> None:
    """Prints the table."""
    table = Table(title="One prompt, three engine processes", title_justify="left")
    table.add_column("engine process", no_wrap=True)
    for column in ("computed", "from CPU", "from LMDB", "first token", "speed-up", "same output"):
        table.add_column(column, justify="right")
    base = results[0]
    for result, note in zip(results, notes, strict=True):
        table.add_row(
            note,
            f"{result.computed:,}",
            f"{result.loaded.get('cpu', 0):,}",
            f"{result.loaded.get('lmdb', 0):,}",
            f"{result.first_token_seconds:.2f} s",
            f"{base.first_token_seconds / result.first_token_seconds:.0f}x",
            "yes" if result.output == base.output else "NO",
        )
    console.print(table)


def demo(engine: str, prompt_tokens: int, directory: Path) -> int:
    """Runs the demo; returns the exit code."""
    with progress("makes a small Llama with seeded random weights (47 million parameters, nothing is downloaded)"):
        make_model(directory / "model")
    prompt = make_prompt(prompt_tokens)
    results = []
    with Server(directory) as server:
        console.print(f"kvtier serves on {server.endpoint}", markup=False)
        job = {
            "model": str(directory / "model"),
            "prompt": prompt,
            "new_tokens": NEW_TOKENS,
            "endpoint": server.endpoint,
            "block_tokens": BLOCK_TOKENS,
        }
        for number in (1, 2, 3):
            if number == 3:
                with progress("waits until all blocks are in LMDB"):
                    blocks = server.settle()
                server.kill()
                seconds = server.start()
                console.print(
                    f"{blocks} blocks in LMDB; server killed (SIGKILL) and started again: it answered after {seconds:.1f} s"
                )
            before = server.status()
            result = run_engine(engine, directory, job, f"engine {number}")
            results.append(attributed(result, before, server.status()))
            console.print(f"engine {number} is done: first token after {result.first_token_seconds:.2f} s")
    show(results, ("1: nothing known yet", "2: new process", "3: new process, new server"))
    wrong = verdict(results, prompt_tokens)
    for line in wrong:
        console.print(f"WRONG: {line}", style="red", markup=False)
    if not wrong:
        console.print("All three outputs are identical, and nothing known was computed twice.")
    return 1 if wrong else 0


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--tokens", type=int, help="length of the prompt")
    options = parser.parse_args()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as directory:
        try:
            return demo(options.engine, options.tokens or PROMPT_TOKENS[options.engine], Path(directory))
        except DemoError as error:
            console.print(f"failed: {error}", style="red", markup=False)
            return 1


if __name__ == "__main__":
    sys.exit(main())
