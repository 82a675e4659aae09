"""Serves one request: prefill on P, decode on D, then records D's hold.

With the setting `overlap`, D gets the request at the same time as P. The hold is recorded only
after D's complete answer. If an engine fails before the client gets the first byte, the proxy tries
another engine.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

import aiohttp

from .agents import calls_tools, prefetch
from .conversations import FoundHold, Reuse
from .engines import Answer, Cause, EngineFailedError, read_answer
from .events import EventSplitter, EventTooLargeError, StreamReader, without_params
from .fleet import Fleet, Instance
from .metrics import Outcome
from .reply import Reply, error_answer, error_event
from .service import Request, Service
from .transfer import EngineIdentity, Params, first_turn, hold_only, is_usable, next_turn, overlapping

__all__ = ["Exchange"]

TRIES = 2
"""Number of engines of a role that are tried for a request."""

LATE_PREFILL_S = 1.0
"""Time for P's answer after D's answer has ended. D has all blocks, or has computed the prompt."""

_STREAM_HEADERS = ("content-type", "x-request-id")

logger = logging.getLogger(__name__)


class _RefusedError(Exception):
    """P refused the request (4xx), so D would refuse it too."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Exchange:
    def __init__(self, service: Service, request: Request, reply: Reply) -> None:
        self._service = service
        self._request = request
        self._turn = request.turn
        self._reply = reply
        self._key = request.conversation.name if request.conversation is not None else None
        self._has_prefilled = False
        self._servers: set[str] = set()
        """The kvtier servers, as far as they get hints, of the engines that served the request."""

    async def run(self) -> Outcome:
        """Serves the request. If the client disconnects, the caller cancels this method."""
        found = await self._find()
        self._service.metrics.turns.labels(found.reuse.value).inc()
        try:
            instance, identity = self._early_prefill()
            if instance is not None and identity is not None:
                return await self._both(instance, identity, found.hold)
            params = None if self._turn.alone else await self._prefill(found.hold)
            return await self._decode(params)
        except _RefusedError as refused:
            await self._reply.whole(refused.answer)
            return Outcome.CLIENT_ERROR

    async def _find(self) -> FoundHold:
        conversation = self._request.conversation
        if self._turn.alone:
            return FoundHold(Reuse.ALONE)
        if conversation is None:
            return FoundHold(Reuse.UNNAMED)
        found = await self._service.conversations.find(conversation, self._turn.prompt)
        if found.reuse is Reuse.EXPIRED:
            self._service.metrics.dropped.labels("expired").inc()
        return found

    # ---- both at the same time

    def _early_prefill(self) -> tuple[Instance | None, EngineIdentity | None]:
        """Returns the P that computes while D pulls, and its identity from an earlier answer."""
        if self._turn.alone or not self._service.overlap:
            return None, None
        instance = next(self._instances(self._service.prefill), None)
        return instance, instance.engine if instance is not None else None

    async def _both(self, instance: Instance, identity: EngineIdentity, hold: Params | None) -> Outcome:
        """Sends the request to P and D. If P fails, D finds no hold, and computes the prompt."""
        name = uuid.uuid4().hex
        body = self._turn.prefill_body(overlapping(first_turn() if hold is None else next_turn(hold)), name)
        self._has_prefilled = True
        prefill = self._service.start(self._prefill_early(instance, body))
        try:
            outcome = await self._decode(identity.early_hold(name))
        except BaseException:
            prefill.cancel()  # a disconnected client aborts both
            raise
        # The connection ends with D's answer, and the caller then cancels this method. P may go on.
        asyncio.get_running_loop().call_later(LATE_PREFILL_S, prefill.cancel)
        return outcome

    async def _prefill_early(self, instance: Instance, body: Mapping[str, object]) -> None:
        try:
            await self._prefill_at(instance, body)
        except EngineFailedError as error:
            self._note_failure(instance, error)
            self._service.metrics.fallbacks.labels(error.cause.value).inc()
        except _RefusedError:  # D refuses the request too, and the client gets D's answer
            pass

    # ---- P

    async def _prefill(self, hold: Params | None) -> Params | None:
        """Returns D's parameters. If no P answers, they tell D to compute and hold the prompt."""
        body = self._turn.prefill_body(first_turn() if hold is None else next_turn(hold))
        cause = "down"
        for instance in self._instances(self._service.prefill):
            try:
                params = await self._prefill_at(instance, body)
            except EngineFailedError as error:
                self._note_failure(instance, error)
                cause = error.cause.value
                if error.cause is Cause.TIMEOUT:  # another P would be as slow
                    break
                continue
            if params:
                self._has_prefilled = True
                return params
            cause = "nothing_handed_over"
            break
        if self._service.prefill.instances:
            self._service.metrics.fallbacks.labels(cause).inc()
        return hold_only() if self._request.conversation is not None else None

    async def _prefill_at(self, instance: Instance, body: Mapping[str, object]) -> Params | None:
        service, request = self._service, self._request
        begun_at = service.clock()
        self._hint_prefetch(instance)
        answer = await service.engines.ask(
            instance, request.path, body, request.headers, timeout_s=service.prefill_timeout_s
        )
        if answer.status >= 400:
            raise _RefusedError(answer)
        params = answer.parsed().get("kv_transfer_params")
        if service.overlap:
            self._learn(instance, params)
        self._served(instance)
        service.metrics.prefill.observe(service.clock() - begun_at)
        return params if isinstance(params, dict) else None

    # ---- D

    async def _decode(self, params: Params | None) -> Outcome:
        failure = EngineFailedError(Cause.CONNECT)
        for instance in self._instances(self._service.decode, include_down=True):
            if not self._has_prefilled:
                self._hint_prefetch(instance)
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
            # The request itself may be slow, so no other engine is tried.
            if failure.cause is Cause.TIMEOUT:
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
        self._served(instance)
        self._hint_after(is_calling=any(calls_tools(choice) for choice in _choices(fields)))
        if "kv_transfer_params" in fields:
            held = fields["kv_transfer_params"]
            self._learn(instance, held)
            await self._keep(instance, held if is_usable(held) else None)
            answer = Answer(answer.status, answer.headers, without_params(fields))
        await self._reply.whole(answer)
        return Outcome.OK

    async def _stream(self, instance: Instance, params: Params | None) -> Outcome:
        """Forwards events. D gets a name for the hold, because streams do not report the hold."""
        name = uuid.uuid4().hex if self._request.conversation is not None and not self._turn.alone else None
        body = self._turn.decode_body(params, name)
        reader = StreamReader(strip_usage=name is not None and not self._turn.wants_usage)
        try:
            async with self._service.engines.open(
                instance, self._request.path, body, self._request.headers
            ) as response:
                if response.status != 200 or "event-stream" not in response.headers.get("content-type", ""):
                    return await self._reply_whole(instance, await read_answer(response))
                await self._relay(instance, response, reader, name)
        except EngineFailedError:
            if not (reader.is_done and self._reply.has_begun):  # all events have arrived
                raise
        await self._reply.end()
        return Outcome.BROKEN if reader.has_failed else Outcome.OK

    async def _relay(
        self, instance: Instance, response: aiohttp.ClientResponse, reader: StreamReader, name: str | None
    ) -> None:
        is_kept = False
        async with aclosing(_events(response)) as parts:
            async for events in parts:
                passed = b"".join([reader.read(event) for event in events])
                if reader.is_done and not is_kept:  # before the client can send its next turn
                    is_kept = True
                    self._served(instance)
                    if not reader.has_failed:
                        self._hint_after(is_calling=reader.calls_tools)
                    self._learn(instance, reader.params)
                    await self._keep(instance, reader.hold(instance.engine, name))
                if passed:
                    await self._pass_on(response, reader, passed)
        if not reader.is_done:
            raise EngineFailedError(Cause.BROKEN)

    async def _pass_on(self, response: aiohttp.ClientResponse, reader: StreamReader, chunk: bytes) -> None:
        if not self._reply.has_begun:
            headers = {name: response.headers[name] for name in _STREAM_HEADERS if name in response.headers}
            if reader.has_failed:
                raise EngineFailedError(Cause.STATUS, Answer(200, headers, chunk))
            self._service.metrics.first_token.labels(self._request.path).observe(
                self._service.clock() - self._request.begun_at
            )
            await self._reply.begin(response.status, {**headers, "cache-control": "no-cache"})
        await self._reply.more(chunk)

    # ---- P and D

    def _instances(self, fleet: Fleet, *, include_down: bool = False) -> Iterator[Instance]:
        """Yields the engines to try. Each is chosen after the previous one has failed."""
        tried: list[Instance] = []
        while len(tried) < TRIES:
            instance = fleet.choose(self._key, tried, include_down=include_down)
            if instance is None:
                return
            tried.append(instance)
            yield instance

    def _note_failure(self, instance: Instance, error: EngineFailedError) -> None:
        logger.warning("%s (%s) failed: %s", instance.url, instance.role.value, error.cause.value)
        self._service.metrics.retries.labels(instance.role.value, error.cause.value).inc()
        # The request may be the cause. One client must not mark an engine down for all clients.
        if error.cause is Cause.CONNECT:
            instance.failed(self._service.clock())
        elif error.cause is not Cause.STATUS:
            instance.is_suspect = True

    def _served(self, instance: Instance) -> None:
        instance.answered()
        if instance.hints is not None:
            self._servers.add(instance.hints)

    def _hint_prefetch(self, instance: Instance) -> None:
        """Lets the server load the conversation's blocks while the request waits in the engine."""
        conversation = self._request.conversation
        if conversation is not None and instance.hints is not None and self._turn.agent.has_tool_results:
            self._service.hints.send(prefetch(conversation, [instance.hints]))

    def _hint_after(self, *, is_calling: bool) -> None:
        """Retains the conversation's blocks if the answer calls tools, and else releases them."""
        service, conversation, agent = self._service, self._request.conversation, self._turn.agent
        if conversation is None:
            return
        if is_calling and not agent.is_last:
            seconds = service.tool_time_s if agent.tool_s is None else agent.tool_s
            hints = service.retentions.retain(conversation, self._servers, seconds, service.clock())
        else:
            hints = service.retentions.release(conversation, service.clock())
        service.hints.send(hints)

    def _learn(self, instance: Instance, params: object) -> None:
        engine = EngineIdentity.parse(params)
        if engine is not None:
            instance.identified(engine, self._service.clock())

    async def _keep(self, instance: Instance, hold: Params | None) -> None:
        conversation = self._request.conversation
        if hold is None or conversation is None or self._turn.alone:
            return
        address = instance.kvtier
        kept = hold if address is None else address.replacing(hold)
        await self._service.conversations.put(conversation, self._turn.prompt, kept)


def _choices(fields: Mapping[str, object]) -> list[dict[str, object]]:
    choices = fields.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[list[bytes]]:
    """Yields the events of a stream in groups that arrived together."""
    splitter = EventSplitter()
    try:
        async for chunk in response.content.iter_any():
            yield list(splitter.feed(chunk))
        yield splitter.end()
    except EventTooLargeError as error:
        raise EngineFailedError(Cause.BROKEN) from error
