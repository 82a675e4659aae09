"""One request's way: to P, to D, and what D holds afterwards.

Nothing is kept but at the very end, and whatever fails before the client has got a byte is tried again elsewhere.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

import httpx

from .conversations import Reuse, Taken
from .engines import Answer, Cause, EngineFailedError, read_answer
from .events import EventTooLargeError, Splitter, StreamReader, without_params
from .fleet import Fleet, Instance
from .metrics import Outcome
from .reply import Reply, error_answer, error_event
from .service import Request, Service
from .transfer import DecodeEngine, Params, first_turn, hold_only, is_usable, next_turn

__all__ = ["Exchange"]

TRIES = 2
"""Engines of a role that a request is given to, before it goes on without."""

_STREAM_HEADERS = ("content-type", "x-request-id")

logger = logging.getLogger(__name__)


class _RefusedError(Exception):
    """P does not want the request (4xx), so D would not either."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Exchange:
    """Serves one request."""

    def __init__(self, service: Service, request: Request, reply: Reply) -> None:
        self._service = service
        self._request = request
        self._turn = request.turn
        self._reply = reply
        self._key = request.conversation.name if request.conversation is not None else None

    async def run(self) -> Outcome:
        """Answers. Cancelled when the client has gone: the engines are hung up on, and nothing is kept."""
        taken = self._take()
        self._service.metrics.turns.labels(taken.reuse.value).inc()
        try:
            params = None if self._turn.alone else await self._prefill(taken.hold)
            return await self._decode(params)
        except _RefusedError as refused:
            await self._reply.whole(refused.answer)
            return Outcome.CLIENT_ERROR

    def _take(self) -> Taken:
        conversation = self._request.conversation
        if self._turn.alone:
            return Taken(Reuse.ALONE)
        if conversation is None:
            return Taken(Reuse.UNNAMED)
        taken = self._service.conversations.take(conversation, self._service.clock())
        if taken.reuse is Reuse.EXPIRED:
            self._service.metrics.dropped.labels("expired").inc()
        return taken

    # ---- P

    async def _prefill(self, hold: Params | None) -> Params | None:
        """Returns what D is to be given: P's answer, or, where no P does it, only that it is to hold the conversation."""
        body = self._turn.prefill_body(first_turn() if hold is None else next_turn(hold))
        cause = "down"
        for instance in self._instances(self._service.prefill):
            try:
                params = await self._prefill_at(instance, body)
            except EngineFailedError as error:
                self._note_failure(instance, error)
                cause = error.cause.value
                if error.cause is Cause.TIMEOUT:  # another would be as slow with it
                    break
                continue
            if params:
                return params
            cause = "nothing_handed_over"
            break
        if self._service.prefill.instances:
            self._service.metrics.fallbacks.labels(cause).inc()
        return hold_only() if self._request.conversation is not None else None

    async def _prefill_at(self, instance: Instance, body: Mapping[str, object]) -> Params | None:
        service, request = self._service, self._request
        begun_at = service.clock()
        answer = await service.engines.ask(
            instance, request.path, body, request.headers, timeout_s=service.prefill_timeout_s
        )
        if answer.status >= 400:
            raise _RefusedError(answer)
        params = answer.parsed().get("kv_transfer_params")
        instance.answered()
        service.metrics.prefill.observe(service.clock() - begun_at)
        return params if isinstance(params, dict) else None

    # ---- D

    async def _decode(self, params: Params | None) -> Outcome:
        failure = EngineFailedError(Cause.CONNECT)
        for instance in self._instances(self._service.decode, or_down=True):
            try:
                if self._turn.stream:
                    return await self._stream(instance, params)
                return await self._whole(instance, params)
            except EngineFailedError as error:
                self._note_failure(instance, error)
                failure = error
            if self._reply.has_begun:
                await self._reply.end(error_event(502, "The engine failed in the middle of its answer."))
                return Outcome.BROKEN
            if (
                failure.cause is Cause.TIMEOUT
            ):  # the request may be what takes so long: it is not to go from one to the next
                break
        status = 504 if failure.cause is Cause.TIMEOUT else 502
        await self._reply.whole(failure.answer or error_answer(status, "No engine could answer."))
        return Outcome.ENGINE_ERROR

    async def _whole(self, instance: Instance, params: Params | None) -> Outcome:
        body = self._turn.decode_body(params)
        answer = await self._service.engines.ask(instance, self._request.path, body, self._request.headers)
        return await self._reply_whole(instance, answer)

    async def _reply_whole(self, instance: Instance, answer: Answer) -> Outcome:
        if answer.status >= 400:
            await self._reply.whole(answer)
            return Outcome.CLIENT_ERROR
        fields = answer.parsed()
        instance.answered()
        if "kv_transfer_params" in fields:
            held = fields["kv_transfer_params"]
            self._learn(instance, held)
            self._keep(instance, held if is_usable(held) else None)
            answer = Answer(answer.status, answer.headers, without_params(fields))
        await self._reply.whole(answer)
        return Outcome.OK

    async def _stream(self, instance: Instance, params: Params | None) -> Outcome:
        """Passes events on as they come. D is told how to name its hold: at the end of a stream it does not say what it holds."""
        name = uuid.uuid4().hex if self._request.conversation is not None and not self._turn.alone else None
        body = self._turn.decode_body(params, name)
        reader = StreamReader(strip_usage=name is not None and not self._turn.wants_usage)
        try:
            async with self._service.engines.open(
                instance, self._request.path, body, self._request.headers
            ) as response:
                if response.status_code != 200 or "event-stream" not in response.headers.get("content-type", ""):
                    return await self._reply_whole(instance, await read_answer(response))
                await self._relay(instance, response, reader, name)
        except EngineFailedError:
            if not (reader.is_done and self._reply.has_begun):  # what comes after the end is nobody's loss
                raise
        await self._reply.end()
        return Outcome.BROKEN if reader.has_failed else Outcome.OK

    async def _relay(
        self, instance: Instance, response: httpx.Response, reader: StreamReader, name: str | None
    ) -> None:
        is_kept = False
        async with aclosing(_events(response)) as parts:
            async for events in parts:
                passed = b"".join([reader.read(event) for event in events])
                if reader.is_done and not is_kept:  # before the client can see the end, and send its next turn
                    is_kept = True
                    instance.answered()
                    self._learn(instance, reader.params)
                    self._keep(instance, reader.hold(instance.engine, name))
                if passed:
                    await self._pass_on(response, reader, passed)
        if not reader.is_done:
            raise EngineFailedError(Cause.BROKEN)

    async def _pass_on(self, response: httpx.Response, reader: StreamReader, chunk: bytes) -> None:
        if not self._reply.has_begun:
            headers = {name: response.headers[name] for name in _STREAM_HEADERS if name in response.headers}
            if reader.has_failed:
                raise EngineFailedError(Cause.STATUS, Answer(200, headers, chunk))
            self._service.metrics.first_token.labels(self._request.path).observe(
                self._service.clock() - self._request.begun_at
            )
            await self._reply.begin(response.status_code, {**headers, "cache-control": "no-cache"})
        await self._reply.more(chunk)

    # ---- both

    def _instances(self, fleet: Fleet, *, or_down: bool = False) -> Iterator[Instance]:
        """Yields engines to try, each chosen when it is wanted."""
        tried: list[Instance] = []
        while len(tried) < TRIES:
            instance = fleet.choose(self._key, tried, or_down=or_down)
            if instance is None:
                return
            tried.append(instance)
            yield instance

    def _note_failure(self, instance: Instance, error: EngineFailedError) -> None:
        logger.warning("%s (%s) failed: %s", instance.url, instance.role.value, error.cause.value)
        self._service.metrics.retries.labels(instance.role.value, error.cause.value).inc()
        # It may have been asked something odd, or too much: one client must not take an engine from all.
        if error.cause is Cause.CONNECT:
            instance.failed(self._service.clock())
        elif error.cause is not Cause.STATUS:
            instance.is_doubted = True

    def _learn(self, instance: Instance, params: object) -> None:
        engine = DecodeEngine.parse(params)
        if engine is not None:
            instance.introduced(engine, self._service.clock())

    def _keep(self, instance: Instance, hold: Params | None) -> None:
        conversation = self._request.conversation
        if hold is None or conversation is None or self._turn.alone:
            return
        address = instance.kvtier
        kept = hold if address is None else address.replacing(hold)
        crowded_out = self._service.conversations.put(conversation, kept, self._service.clock())
        self._service.metrics.dropped.labels("no_room").inc(crowded_out)


async def _events(response: httpx.Response) -> AsyncGenerator[list[bytes]]:
    """Yields the events of a stream, those that come together together."""
    splitter = Splitter()
    try:
        async for chunk in response.aiter_bytes():
            yield list(splitter.feed(chunk))
        yield splitter.end()
    except EventTooLargeError as error:
        raise EngineFailedError(Cause.BROKEN) from error
