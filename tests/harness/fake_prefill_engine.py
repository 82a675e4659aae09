"""Fake prefill engine with an OpenAI completions API and a computed time per token."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = ["FakePrefillEngine"]


class FakePrefillEngine:
    """Listens on a loopback port. Only its computations advance its clock.

    Args:
        seconds_per_request: computed seconds for each prompt.
        seconds_per_token: computed seconds for each token of a prompt.
        max_model_len: the reported context length.
        refuse: HTTP status of every completion, if all fail.
        usage: the reported usage, instead of the correct one.
    """

    def __init__(
        self,
        *,
        seconds_per_request: float = 0.0,
        seconds_per_token: float = 0.0,
        max_model_len: int | None = 512,
        refuse: int | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        self.prompts: list[list[int]] = []
        self.questions: list[dict[str, Any]] = []
        self._now = 0.0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                model = {"id": "stand-in", "object": "model"}
                if max_model_len is not None:
                    model["max_model_len"] = max_model_len
                self._answer(200, {"data": [model]} if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = question.pop("prompt")
                engine.prompts.append(prompt)
                engine.questions.append(question | {"path": self.path})
                engine._now += seconds_per_request + seconds_per_token * len(prompt)
                told = {"prompt_tokens": len(prompt)} if usage is None else usage
                self._answer(refuse or 200, {"usage": told} if refuse is None else {"error": "no such model"})

            def _answer(self, status: int, body: Any) -> None:
                raw = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - http.server's name
                ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def clock(self) -> float:
        """The computed seconds so far."""
        return self._now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
