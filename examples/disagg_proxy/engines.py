"""HTTP requests to engines. Every failure is an `EngineFailedError`."""

from __future__ import annotations

import asyncio
import io
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp

from .fleet import Instance

__all__ = ["Answer", "Cause", "EngineFailedError", "Engines", "engine_headers", "read_answer"]

CONNECT_TIMEOUT_S = 5.0
IDLE_S = 2.0
"""The proxy closes an idle connection after this time in seconds.

Engines close one after 5 s, and a request that is sent at this moment would fail.
"""
MAX_ANSWER_BYTES = 64 << 20
_LARGE_BYTES = 1 << 20
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
"""Response headers that clients do not get: they concern the engine's connection only."""

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
"""Request headers that engines do not get: about the connection, or the choice of an engine."""


class Cause(Enum):
    """Kind of failure."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    STATUS = "status"
    """A 5xx status, or a stream that begins with an error."""
    BROKEN = "broken"
    """The engine closed the connection, or sent invalid data."""


@dataclass(frozen=True)
class Answer:
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def parsed(self) -> dict[str, Any]:
        """Returns the JSON object in the body. Raises EngineFailedError for another body."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise EngineFailedError(Cause.BROKEN)
        return value


class EngineFailedError(Exception):
    """An engine failed. `answer`: its error response, if any."""

    def __init__(self, cause: Cause, answer: Answer | None = None) -> None:
        super().__init__(cause.value)
        self.cause = cause
        self.answer = answer


class Engines:
    """HTTP client for all engines.

    `silence_s`: longest time until the headers of a response, and then without a byte of its body.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def open(
        self, instance: Instance, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request (GET without `body`) and yields the response when its headers arrive."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        work = 0 if body is None else 1
        instance.outstanding += work
        instance.served += work
        # aiohttp warns of large bytes, because it would write them at once.
        data = io.BytesIO(content) if content is not None and len(content) > _LARGE_BYTES else content
        session = self._session = self._session or _session(self._timeout)
        try:
            # `sock_read` begins only after the request was sent, and an engine may never read it.
            async with (
                asyncio.timeout(self._silence_s) as limit,
                session.request(
                    method, instance.url + path, data=data, headers=headers, allow_redirects=False
                ) as response,
            ):
                limit.reschedule(None)
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineFailedError(Cause.CONNECT) from error
        except TimeoutError as error:  # also aiohttp.SocketTimeoutError
            raise EngineFailedError(Cause.TIMEOUT) from error
        except aiohttp.ClientError as error:
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
        """Returns a complete response. Raises EngineFailedError on failure or a 5xx status.

        `timeout_s` limits the whole request.
        """
        try:
            async with asyncio.timeout(timeout_s), self.open(instance, path, body, headers) as response:
                return await read_answer(response)
        except TimeoutError as error:
            raise EngineFailedError(Cause.TIMEOUT) from error


def _session(timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=timeout,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),  # all clients share this object
    )


async def read_answer(response: aiohttp.ClientResponse) -> Answer:
    """Reads the rest of a response. For a 5xx status raises EngineFailedError with the response."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise EngineFailedError(Cause.BROKEN)
    answer = Answer(response.status, _response_headers(response), bytes(body))
    if answer.status >= 500:
        raise EngineFailedError(Cause.STATUS, answer)
    return answer


def _response_headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    """Returns the headers that the client gets."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    dropped = _HOP_BY_HOP | _named(headers)
    return {name: value for name, value in headers.items() if name not in dropped}


def _named(headers: Mapping[str, str]) -> set[str]:
    """Returns the headers that `Connection` lists."""
    values = [value for name, value in headers.items() if name == "connection"]
    return {name.strip().lower() for name in ",".join(values).split(",")}


def engine_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers for engines: those of the client, and one request id for all engines."""
    dropped = _NOT_PASSED_ON | _named(headers)
    passed = {name: value for name, value in headers.items() if name not in dropped and value.isascii()}
    return {
        "x-request-id": uuid.uuid4().hex,
        **passed,
        "content-type": "application/json",
        "accept-encoding": "identity",
    }
