"""ASGI application: routes, limits, and cancellation if a client disconnects."""

from __future__ import annotations

import asyncio
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

from .agents import Retentions
from .bodies import RejectedError, read_body
from .conversations import Conversation, Conversations
from .engines import Engines, engine_headers
from .exchange import Exchange
from .fleet import Fleet
from .hints import Hints
from .metrics import Metrics, Outcome
from .pages import Pages, no_route
from .reply import ClientGoneError, Reply, error_answer
from .service import Request, Service
from .settings import Settings
from .shared import SharedConversations
from .turns import BadRequestError, Turn
from .watch import Watch

__all__ = ["make_app", "while_connected"]

_PATHS = ("/v1/completions", "/v1/chat/completions")

logger = logging.getLogger(__name__)


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
        except RejectedError as rejected:
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
            raise RejectedError(
                Outcome.BUSY, error_answer(503, "Too many requests are in progress.", {"retry-after": "1"})
            )
        raw = await read_body(http.receive, http.headers.get("content-length", ""), self._settings.max_body)
        if raw is None:
            return Outcome.GONE
        try:
            turn = Turn.parse(raw, http.headers)
        except BadRequestError as error:
            raise RejectedError(Outcome.CLIENT_ERROR, error_answer(400, str(error))) from None
        request = self._request(path, http, turn, begun_at)
        outcome = await while_connected(http.receive, Exchange(self._service, request, reply).run())
        return Outcome.GONE if outcome is None else outcome

    def _request(self, path: str, http: HttpRequest, turn: Turn, begun_at: float) -> Request:
        headers = engine_headers(http.headers)
        conversation = None
        if turn.conversation_id is None:
            logger.warning("%s has no conversation_id, so a later turn cannot use its blocks", headers["x-request-id"])
        else:
            conversation = Conversation.of(headers.get("authorization", ""), turn.model, turn.conversation_id)
            turn = turn.named(conversation.server_name)
        return Request(path, turn, conversation, headers, begun_at)


def make_app(settings: Settings, clock: Callable[[], float]) -> Starlette:
    """Returns the application, which watches the engines during its lifespan."""
    prefill, decode = Fleet(settings.prefill_instances()), Fleet(settings.decode_instances())
    conversations = Conversations(settings.entry_ttl, settings.max_entries)
    metrics = Metrics((prefill, decode), conversations.__len__)
    engines = Engines(settings.decode_timeout)
    service = Service(
        prefill,
        decode,
        engines,
        SharedConversations(conversations, metrics, clock, settings.state, settings.entry_ttl),
        Retentions(settings.max_entries),
        Hints(settings.hint_servers(), metrics, clock),
        metrics,
        clock,
        settings.prefill_timeout,
        settings.tool_time,
        settings.overlap,
    )
    pages, completions = Pages(service), Completions(service, settings)
    routes = [
        *(Route(path, partial(completions, path), methods=["POST"]) for path in _PATHS),
        Route("/hints", pages.hint, methods=["POST"]),
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
            async with service.hints.running():
                yield
        finally:
            await _end([*tasks, *service.tasks])
            await service.engines.close()
            await service.conversations.close()

    return lifespan


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
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
