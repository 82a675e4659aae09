"""Demo: one engine computes the KV of a prompt; later engines load it, even after a server crash.

    python run.py [--engine transformers|vllm|sglang] [--tokens N]

Four engine processes get the same prompt, one after the other. Before the third process the server
is killed with SIGKILL and restarted. `kvtier keeper` holds the memory meanwhile, so the third
process loads from the CPU tier. Before the fourth process the keeper is killed, too, so the fourth
one loads from LMDB. The exit code is 0 only if all outputs are identical and each engine loaded the
expected tokens. All files are temporary.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import Engine, Keeper, Result, Server, console, new_job, progress, run_demo
from report import conclude, differences, show, wanted_tokens

PROMPT_TOKENS = {"transformers": 3072, "vllm": 6144, "sglang": 3072}
NOTES = ("1: nothing known yet", "2: new process", "3: server killed", "4: server and keeper killed")


def attributed(result: Result, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Result:
    """Names the lowest tier with new hits, if the engine named no tier for the loaded tokens."""
    unnamed = result.loaded.get("")
    if not unnamed or before is None or after is None:
        return result
    grown = [now["name"] for was, now in zip(before["tiers"], after["tiers"], strict=True) if now["hits"] > was["hits"]]
    return replace(result, loaded={grown[-1] if grown else "?": unnamed})


def verdict(results: Sequence[Result], prompt_tokens: int) -> list[str]:
    """Returns the differences from the expected results. Empty if there are none."""
    wanted = wanted_tokens(prompt_tokens)
    return differences(results, [{}, {"cpu": wanted}, {"cpu": wanted}, {"lmdb": wanted}], prompt_tokens)


def restart(what: str, server: Server, keeper: Keeper | None = None) -> None:
    """Kills the server, and the keeper if there is one, and starts them again."""
    server.kill()
    if keeper is not None:
        keeper.kill()
        keeper.start()
    start = time.perf_counter()
    server.start()
    console.print(f"{what} and started again: it answered after {time.perf_counter() - start:.1f} s")


def demo(engine: str, prompt_tokens: int, directory: Path) -> int:
    """Runs the demo; returns the exit code."""
    job = new_job(directory, prompt_tokens)
    results = []
    keeper = Keeper(directory)
    server = Server(directory, "--region-size", "1GiB", environment={"KVTIER_KEEPER": str(keeper.path)})
    with keeper, server:
        console.print(f"kvtier serves on {server.endpoint}", markup=False)
        for number in range(1, len(NOTES) + 1):
            if number == 3:
                restart("server killed (SIGKILL)", server)
            elif number == 4:
                with progress("waits until all blocks are in LMDB"):
                    blocks = server.settle()
                restart(f"{blocks} blocks in LMDB; server and keeper killed", server, keeper)
            before = server.status()
            with Engine(engine, directory, {**job, "endpoint": server.endpoint}, f"engine {number}") as process:
                result = process.result()
            results.append(attributed(result, before, server.status()))
            console.print(f"engine {number} is done: first token after {result.first_token_seconds:.2f} s")
    notes = [{"engine process": note} for note in NOTES]
    show("One prompt, four engine processes", results, notes, {"cpu": "from CPU", "lmdb": "from LMDB"})
    return conclude(
        verdict(results, prompt_tokens), "All four outputs are identical, and nothing known was computed twice."
    )


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=tuple(PROMPT_TOKENS), default="transformers")
    parser.add_argument("--tokens", type=int, help="length of the prompt")
    options = parser.parse_args()
    tokens = options.tokens or PROMPT_TOKENS[options.engine]
    return run_demo(lambda directory: demo(options.engine, tokens, directory))


if __name__ == "__main__":
    sys.exit(main())
