"""ASGI application: chooses an engine per request and passes its answer on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from disagg_proxy.app import while_connected
from disagg_proxy.engines import Answer, Cause, EngineFailedError, Engines, engine_headers, read_answer
from disagg_proxy.fleet import Instance, Role
from disagg_proxy.metrics import Outcome
from disagg_proxy.reply import ClientGoneError, Reply, error_answer, error_event
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send

from .block_index import BlockIndex
from .routing import Engine, Policy, Route, Router, prompt_of, tokenize_body
from .subscription import Subscription

__all__ = ["Events", "Target", "make_app"]

PATHS = ("/v1/completions", "/v1/chat/completions")
ENGINE_HEADER, TOKENS_HEADER = "x-router-engine", "x-router-known-tokens"
"""Headers of the answer: the URL of the engine, and the tokens of the prompt that its host had."""

MAX_BODY_BYTES = 32 << 20
SILENCE_TIMEOUT_S = 1800.0
TOKENIZE_TIMEOUT_S = 5.0

_STREAM_HEADERS = ("content-type", "x-request-id")

logger = logging.getLogger(__name__)

Events = tuple[str, str | None]
"""Addresses of a kvtier server: `events.publish` and `events.replay`."""

Target = tuple[str, Events]
"""URL of an engine, and the events of its kvtier server."""


class Completions:
    """`POST /v1/completions` and `/v1/chat/completions`."""

    def __init__(self, router: Router, engines: Engines, clock: Callable[[], float]) -> None:
        self._router = router
        self._engines = engines
        self._clock = clock

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves an ASGI request. `path` is the path of the route."""
        reply, http = Reply(send), HttpRequest(scope, receive)
        try:
            body = await _read(http)
            if body is None:
                await reply.whole(error_answer(400, "The body must be a JSON object of at most 32 MiB."))
                return
            await while_connected(receive, self._serve(path, body, engine_headers(http.headers), reply))
        except ClientGoneError:
            logger.info("a client does not read its answer")

    async def _serve(self, path: str, body: dict[str, Any], headers: dict[str, str], reply: Reply) -> Outcome:
        tokens = await self._tokens_of(body, headers)
        model = str(body.get("model") or "")
        tried: list[Engine] = []
        answer = error_answer(502, "No engine could answer.")
        while (route := self._router.choose(tokens, model, self._clock(), tried)) is not None:
            route.engine.takes(len(tokens), route.known_tokens)
            instance = route.engine.instance
            try:
                await self._pass_on(route, path, body, headers, reply)
            except EngineFailedError as error:
                logger.warning("%s failed: %s", instance.url, error.cause.value)
                instance.failed(self._clock())
                if reply.has_begun:
                    await reply.end(error_event(502, "The engine failed in the middle of its answer."))
                    return Outcome.BROKEN
                answer = error.answer or answer
                tried.append(route.engine)
                if error.cause is Cause.TIMEOUT:  # the request itself may be slow
                    break
            else:
                instance.answered()
                return Outcome.OK
        await reply.whole(answer)
        return Outcome.ENGINE_ERROR

    async def _pass_on(
        self, route: Route, path: str, body: dict[str, Any], headers: dict[str, str], reply: Reply
    ) -> None:
        instance = route.engine.instance
        about = {ENGINE_HEADER: instance.url, TOKENS_HEADER: str(route.known_tokens)}
        async with self._engines.open(instance, path, body, headers) as response:
            if response.status >= 400 or not body.get("stream"):
                answer = await read_answer(response)
                await reply.whole(Answer(answer.status, {**answer.headers, **about}, answer.body))
                return
            kept = {name: response.headers[name] for name in _STREAM_HEADERS if name in response.headers}
            await reply.begin(response.status, kept | about)
            async for chunk in response.content.iter_any():
                await reply.more(chunk)
        await reply.end()

    async def _tokens_of(self, body: dict[str, Any], headers: dict[str, str]) -> list[int]:
        """Returns the tokens of the prompt; none if no engine can tokenize it."""
        if (tokens := prompt_of(body)) is not None:
            return tokens
        asked = tokenize_body(body)
        if asked is None:
            return []
        instance = self._router.idlest(self._clock()).instance
        try:
            answer = await self._engines.ask(instance, "/tokenize", asked, headers, timeout_s=TOKENIZE_TIMEOUT_S)
            found = answer.parsed().get("tokens")
        except EngineFailedError as error:
            logger.warning("%s does not tokenize a prompt: %s", instance.url, error.cause.value)
            return []
        return found if isinstance(found, list) else []


class Pages:
    """GET pages."""

    def __init__(self, router: Router, engines: Engines, clock: Callable[[], float]) -> None:
        self._router = router
        self._engines = engines
        self._clock = clock

    async def health(self, _: HttpRequest) -> Response:
        """Reports the engines: state, requests, tokens, and blocks in the index of their host."""
        now = self._clock()
        rows = [
            {
                "url": engine.instance.url,
                "usable": engine.is_usable(now),
                "outstanding": engine.instance.outstanding,
                "requests": engine.routed,
                "prompt_tokens": engine.prompt_tokens,
                "known_tokens": engine.known_tokens,
                "blocks": len(engine.index),
            }
            for engine in self._router.engines
        ]
        is_up = any(row["usable"] for row in rows)
        return JSONResponse({"status": "ok" if is_up else "no engine is up", "engines": rows}, 200 if is_up else 503)

    async def models(self, http: HttpRequest) -> Response:
        """Returns the models of an engine."""
        instance = self._router.idlest(self._clock()).instance
        try:
            answer = await self._engines.ask(instance, "/v1/models", None, engine_headers(http.headers))
        except EngineFailedError as error:
            answer = error.answer or error_answer(502, "No engine could answer.")
        return Response(answer.body, answer.status, dict(answer.headers))


def make_app(targets: list[Target], policy: Policy, clock: Callable[[], float]) -> Starlette:
    """Returns the application, which follows the servers' events during its lifespan."""
    indexes: dict[Events, BlockIndex] = {events: BlockIndex() for _, events in targets}
    router = Router([Engine(Instance(url, Role.DECODE), indexes[events]) for url, events in targets], policy)
    engines = Engines(SILENCE_TIMEOUT_S)
    subscriptions = [Subscription(*events, index) for events, index in indexes.items()]
    completions, pages = Completions(router, engines, clock), Pages(router, engines, clock)
    routes = [
        *(HttpRoute(path, partial(completions, path), methods=["POST"]) for path in PATHS),
        HttpRoute("/v1/models", pages.models),
        HttpRoute("/health", pages.health),
    ]
    return Starlette(routes=routes, lifespan=_lifespan(subscriptions, engines))


def _lifespan(
    subscriptions: list[Subscription], engines: Engines
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(subscription.run()) for subscription in subscriptions]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engines.close()

    return lifespan


async def _read(http: HttpRequest) -> dict[str, Any] | None:
    """Returns the body; None if it is too large or not a JSON object."""
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
