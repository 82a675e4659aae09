"""Engine that answers prompts of another process, one at a time, so that engines can take turns.

A line of the socket is a JSON list of tokens. The answer is a JSON object with `tokens` and
`first_token_seconds`.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from .turns import generate

__all__ = ["ANSWER_TOKENS", "answer_prompts"]

ANSWER_TOKENS = 2


def answer_prompts(llm: Any, job: dict[str, Any]) -> None:
    """Answers until the other process closes its end of the socket."""
    with socket.socket(fileno=job["socket"]) as connection, connection.makefile("rw") as lines:
        for line in lines:
            [output] = generate(llm, [json.loads(line)], ANSWER_TOKENS)
            tokens, seconds = list(output.outputs[0].token_ids), output.metrics.first_token_latency
            lines.write(json.dumps({"tokens": tokens, "first_token_seconds": seconds}) + "\n")
            lines.flush()
