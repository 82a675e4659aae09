"""ASGI application: routes, limits, and cancellation if a client disconnects."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .conversations import Conversation, Conversations
from .engines import Answer, Engines, engine_headers
from .exchange import Exchange
from .fleet import Fleet
from .metrics import Metrics, Outcome
from .pages import Pages, no_route
from .reply import ClientGoneError, Reply, error_answer
from .service import Request, Service
from .settings import Settings
from .turns import SOURCE_HEADER, BadRequestError, Turn
from .watch import Watch

__all__ = ["make_app"]

_PATHS = ("/v1/completions", "/v1/chat/completions")

READ_TIMEOUT_S = 60.0
"""Seconds for a client to send its request. After this time the proxy answers 408."""

_HANG_UP = {"connection": "close"}
"""Header of responses before the whole body has arrived: the server must not wait for the rest."""

logger = logging.getLogger(__name__)


class _RejectedError(Exception):
    """The proxy rejects the request without asking an engine."""

    def __init__(self, outcome: Outcome, answer: Answer) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome
        self.answer = answer


class Completions:
    """`POST /v1/completions` and `/v1/chat/completions`."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._settings = settings
        self._under_way = 0

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves an ASGI request. `path` is the path of the route."""
        metrics, begun_at = self._service.metrics, self._service.clock()
        reply, outcome = Reply(send), Outcome.DEFECT
        self._under_way += 1
        try:
            outcome = await self._serve(path, HttpRequest(scope, receive), reply, begun_at)
        except _RejectedError as rejected:
            outcome = rejected.outcome
            await reply.whole(rejected.answer)
        except ClientGoneError:
            outcome = Outcome.GONE
        finally:
            self._under_way -= 1
            metrics.requests.labels(path, outcome.value).inc()
            metrics.duration.labels(path).observe(self._service.clock() - begun_at)

    async def _serve(self, path: str, http: HttpRequest, reply: Reply, begun_at: float) -> Outcome:
        if self._under_way > self._settings.max_requests:
            raise _RejectedError(
                Outcome.BUSY, error_answer(503, "Too many requests are in progress.", {"retry-after": "1"})
            )
        raw = await self._read(http.receive, http.headers.get("content-length", ""))
        if raw is None:
            return Outcome.GONE
        try:
            turn = Turn.parse(raw, http.headers.get(SOURCE_HEADER, ""))
        except BadRequestError as error:
            raise _RejectedError(Outcome.CLIENT_ERROR, error_answer(400, str(error))) from None
        request = self._request(path, http, turn, begun_at)
        outcome = await _while_connected(http.receive, Exchange(self._service, request, reply).run())
        return Outcome.GONE if outcome is None else outcome

    async def _read(self, receive: Receive, declared: str) -> bytes | None:
        """Returns the body, or None if the client disconnected."""
        limit, body = self._settings.max_body, bytearray()
        too_large = _RejectedError(
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
            raise _RejectedError(Outcome.CLIENT_ERROR, answer) from None

    def _request(self, path: str, http: HttpRequest, turn: Turn, begun_at: float) -> Request:
        headers = engine_headers(http.headers)
        conversation = None
        if turn.conversation_id is None:
            logger.warning("%s has no conversation_id, so a later turn cannot use its blocks", headers["x-request-id"])
        else:
            owner = hashlib.sha256(headers.get("authorization", "").encode()).hexdigest()
            conversation = Conversation(owner, turn.model, turn.conversation_id)
        return Request(path, turn, conversation, headers, begun_at)


def make_app(settings: Settings, clock: Callable[[], float]) -> Starlette:
    """Returns the application, which watches the engines during its lifespan."""
    prefill, decode = Fleet(settings.prefill_instances()), Fleet(settings.decode_instances())
    conversations = Conversations(settings.entry_ttl, settings.max_entries)
    metrics = Metrics((prefill, decode), conversations.__len__)
    engines = Engines(settings.decode_timeout)
    service = Service(prefill, decode, engines, conversations, metrics, clock, settings.prefill_timeout)
    pages, completions = Pages(service), Completions(service, settings)
    routes = [
        *(Route(path, partial(completions, path), methods=["POST"]) for path in _PATHS),
        Route("/v1/models", pages.models),
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
    ]
    return Starlette(routes=routes, lifespan=_lifespan(service, settings), exception_handlers={HTTPException: no_route})


def _lifespan(service: Service, settings: Settings) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        instances = [*service.prefill.instances, *service.decode.instances]
        watches = [
            Watch(
                instance,
                service.engines,
                service.clock,
                check_s=settings.check_interval,
                probe_s=settings.probe_interval,
            )
            for instance in instances
        ]
        await asyncio.gather(*(watch.check() for watch in watches))
        tasks = [asyncio.create_task(watch.run()) for watch in watches]
        try:
            yield
        finally:
            await _end(tasks)
            await service.engines.close()

    return lifespan


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """Returns the result of `work`, or cancels it and returns None if the client disconnects."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(until_gone())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _end((task, gone))


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    pending = list(tasks)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
