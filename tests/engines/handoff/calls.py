"""Requests to an OpenAI server, with results in the form of the engine tests' rows."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPResponse
from types import TracebackType
from typing import Any, Self

__all__ = ["CallError", "Stream", "ask", "chat_row", "post", "question", "row", "streamed_row"]

ANSWER_SECONDS = 240.0
"""Most seconds for an answer, because the cores are shared."""


class CallError(Exception):
    """An HTTP status other than 200, with the body."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:2000]}")
        self.status = status


def question(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Returns a completion's body in tokens, whose answer depends on the prompt only."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 3,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def post(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sends a request and returns the answer; raises `CallError`."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    with contextlib.closing(connection):
        response = _send(connection, path, body)
        text = response.read().decode()
        if response.status != 200:
            raise CallError(response.status, text)
        answer: dict[str, Any] = json.loads(text) if text else {}
        return answer


def ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
    return post(port, "/v1/completions", body)


class Stream:
    """A streamed completion; leaving the context closes the connection."""

    def __init__(self, port: int, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self._request = path, {**body, "stream": True}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Closes the connection at any time."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def send(self) -> None:
        path, body = self._request
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Sends the request; yields the pieces of the answer as they come.

        Raises `CallError`, in the middle of it too.
        """
        self.send()
        response = self._connection.getresponse()
        if response.status != 200:
            raise CallError(response.status, response.read().decode())
        for line in response:
            data = line.decode().strip().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                piece: dict[str, Any] = json.loads(data)
                if "error" in piece:
                    raise CallError(int(piece["error"]["code"]), data)
                yield piece


def row(answer: dict[str, Any]) -> dict[str, Any]:
    [choice] = answer["choices"]
    return {
        "tokens": choice["token_ids"],
        "logprobs": _by_token(choice["logprobs"]),
        "finish_reason": choice["finish_reason"],
    }


def streamed_row(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    choices = [choice for piece in pieces for choice in piece["choices"]]
    return {
        "tokens": [token for choice in choices for token in choice["token_ids"]],
        "logprobs": [found for choice in choices for found in _by_token(choice["logprobs"])],
        "finish_reason": choices[-1]["finish_reason"],
    }


def chat_row(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a chat completion; its words are "w" and the token."""
    [choice] = answer["choices"]
    said = choice["logprobs"]["content"]
    return {
        "tokens": choice["token_ids"],
        "logprobs": [
            {top["token"].removeprefix("token_id:"): top["logprob"] for top in w["top_logprobs"]} for w in said
        ],
        "finish_reason": choice["finish_reason"],
    }


def _send(connection: HTTPConnection, path: str, body: dict[str, Any] | None) -> HTTPResponse:
    payload = None if body is None else json.dumps(body)
    connection.request("POST", path, payload, {"Content-Type": "application/json"})
    return connection.getresponse()


def _by_token(logprobs: dict[str, Any]) -> list[dict[str, float]]:
    return [
        {token.removeprefix("token_id:"): logprob for token, logprob in top.items()} for top in logprobs["top_logprobs"]
    ]
