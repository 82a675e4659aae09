"""Responses to the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from starlette.types import Message, Send

from .engines import Answer

__all__ = ["ClientGoneError", "Reply", "error_answer", "error_event"]

SEND_TIMEOUT_S = 60.0
"""If a client does not read buffered data for this time in seconds, its request ends."""

_JSON = {"content-type": "application/json"}


def error_answer(status: int, message: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Returns an error in OpenAI's form."""
    return Answer(status, {**_JSON, **(headers or {})}, _error(status, message))


def error_event(status: int, message: str) -> bytes:
    """Returns an error as an event of a stream that has begun."""
    return b"data: " + _error(status, message) + b"\n\n"


class ClientGoneError(Exception):
    """The client does not read its response."""


class Reply:
    """Response to one request. Every method may raise ClientGoneError."""

    def __init__(self, send: Send) -> None:
        self._pass = send
        self.has_begun = False

    async def whole(self, answer: Answer) -> None:
        """Sends a complete response."""
        await self.begin(answer.status, {**answer.headers, "content-length": str(len(answer.body))})
        await self.end(answer.body)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends status and headers."""
        self.has_begun = True
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def more(self, chunk: bytes) -> None:
        """Sends a chunk of the body. Waits while the client is slow."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes = b"") -> None:
        """Sends the last chunk of the body."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._pass(message)
        except TimeoutError:
            raise ClientGoneError from None


def _error(status: int, message: str) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()
