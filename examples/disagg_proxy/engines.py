"""Requests to engines, over HTTP. Whatever goes wrong there is an ``EngineFailedError``."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from .fleet import Instance

__all__ = ["Answer", "Cause", "EngineFailedError", "Engines", "engine_headers", "read_answer"]

CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 << 20
_HOP_BY_HOP = {
    "connection",
    "content-encoding",
    "content-length",
    "date",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "server",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
"""Headers of an answer that are about the engine's connection, not about the answer."""

_NOT_PASSED_ON = {
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-data-parallel-rank",
}
"""Headers of a request that are about the client's connection or its body's form, or choose among engines."""


class Cause(Enum):
    """What went wrong."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    STATUS = "status"
    """It said 5xx, or an error was the first that came of its stream."""
    BROKEN = "broken"
    """It hung up, or what it sent makes no sense."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, for the client or to be read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def parsed(self) -> dict[str, Any]:
        """Returns its JSON object; raises EngineFailedError."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise EngineFailedError(Cause.BROKEN)
        return value


class EngineFailedError(Exception):
    """An engine did not do its part. ``answer``: what it said of that, if anything."""

    def __init__(self, cause: Cause, answer: Answer | None = None) -> None:
        super().__init__(cause.value)
        self.cause = cause
        self.answer = answer


class Engines:
    """The way to all engines. ``silence_s``: how long an engine may send nothing."""

    def __init__(self, silence_s: float) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            # A connection per request: one that is kept may be closed while it is taken for the next request, by the engine (idle
            # for 5 s) or by httpx (seen on a machine that stood still), and a decode engine's only answer is lost.
            headers={"connection": "close"},
            trust_env=False,  # engines are not behind the proxy of whoever started this
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # what one client is given is not for the next
        )

    async def close(self) -> None:
        """Hangs up."""
        await self._client.aclose()

    @asynccontextmanager
    async def open(
        self, instance: Instance, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Asks, by GET where there is no ``body``; yields the answer as soon as it begins. To leave early is to hang up."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        work = 0 if body is None else 1
        instance.outstanding += work
        instance.served += work
        try:
            async with self._client.stream(method, instance.url + path, content=content, headers=headers) as response:
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineFailedError(Cause.CONNECT) from error
        except httpx.TimeoutException as error:
            raise EngineFailedError(Cause.TIMEOUT) from error
        except httpx.RequestError as error:
            raise EngineFailedError(Cause.BROKEN) from error
        finally:
            instance.outstanding -= work

    async def ask(
        self,
        instance: Instance,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        timeout_s: float | None = None,
    ) -> Answer:
        """Returns a whole answer that is no 5xx. ``timeout_s``: for all of it."""
        try:
            async with asyncio.timeout(timeout_s), self.open(instance, path, body, headers) as response:
                return await read_answer(response)
        except TimeoutError as error:
            raise EngineFailedError(Cause.TIMEOUT) from error


async def read_answer(response: httpx.Response) -> Answer:
    """Reads the rest of an answer; a 5xx is an EngineFailedError that has it."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise EngineFailedError(Cause.BROKEN)
    answer = Answer(response.status_code, _passed_on(response), bytes(body))
    if answer.status >= 500:
        raise EngineFailedError(Cause.STATUS, answer)
    return answer


def _passed_on(response: httpx.Response) -> dict[str, str]:
    """Returns the headers that the client is to get as well."""
    headers = response.headers
    dropped = _HOP_BY_HOP | _named(headers)
    return {name: value for name, value in headers.items() if name not in dropped}


def _named(headers: Mapping[str, str]) -> set[str]:
    """Returns the headers that ``Connection`` says are about the connection, too."""
    values = [value for name, value in headers.items() if name == "connection"]
    return {name.strip().lower() for name in ",".join(values).split(",")}


def engine_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns what engines get of a client's headers; the request is known by one id everywhere."""
    dropped = _NOT_PASSED_ON | _named(headers)
    passed = {name: value for name, value in headers.items() if name not in dropped and value.isascii()}
    return {
        "x-request-id": uuid.uuid4().hex,
        **passed,
        "content-type": "application/json",
        "accept-encoding": "identity",
    }
