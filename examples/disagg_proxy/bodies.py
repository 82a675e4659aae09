"""Bodies of clients' requests, read with a limit of size and time."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from .engines import Answer
from .metrics import Outcome
from .reply import error_answer

__all__ = ["RejectedError", "read_body"]

READ_TIMEOUT_S = 60.0
"""Seconds for a client to send its request. After this time the proxy answers 408."""

_HANG_UP = {"connection": "close"}
"""Header of responses before the whole body has arrived: the server must not wait for the rest."""


class RejectedError(Exception):
    """The proxy rejects the request without asking an engine."""

    def __init__(self, outcome: Outcome, answer: Answer) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome
        self.answer = answer


async def read_body(receive: Receive, declared: str, limit: int) -> bytes | None:
    """Returns the body, or None if the client disconnected. Raises RejectedError.

    `declared`: the header Content-Length. `limit`: maximum size in bytes.
    """
    body = bytearray()
    too_large = RejectedError(
        Outcome.CLIENT_ERROR, error_answer(413, f"The body has more than {limit} bytes.", _HANG_UP)
    )
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        answer = error_answer(408, "The body did not arrive in time.", _HANG_UP)
        raise RejectedError(Outcome.CLIENT_ERROR, answer) from None
