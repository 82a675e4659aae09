"""Process of one engine: `python -m bench.engine.child JOB OUT`.

It imports only packages that an environment with vLLM has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .asked import answer_prompts
from .steps import run_steps
from .turns import run_turns

OPERATIONS = {"turns": run_turns, "steps": run_steps, "answer": answer_prompts}

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
    "seed": 0,
}
"""vLLM settings of all engines of the benchmark."""


def main() -> None:
    """Starts the engine, runs the job, writes the result."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM

    llm = LLM(**ENGINE, **job["llm"])
    Path(sys.argv[2]).write_text(json.dumps(OPERATIONS[job["operation"]](llm, job)))


if __name__ == "__main__":
    main()
