"""Pages beside the completions: health, metrics, models, and hints of agents."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from .agents import prefetch
from .bodies import RejectedError, read_body
from .conversations import Conversation
from .engines import Answer, EngineFailedError, engine_headers
from .fleet import Instance
from .metrics import CONTENT_TYPE
from .reply import error_answer
from .service import Service
from .turns import BadRequestError, parse_hint

__all__ = ["Pages", "no_route"]

MAX_HINT_BYTES = 16 << 10


class Pages:
    """Handlers of the pages."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _: HttpRequest) -> Response:
        """Reports which engines are up, and removes expired entries (B2.24)."""
        service = self._service
        evicted = service.conversations.own.evict(service.clock())
        service.metrics.dropped.labels("expired").inc(evicted)
        is_up = any(instance.is_up for instance in service.decode.instances)
        answer = {
            "status": "ok" if is_up else "no decode engine is up",
            "prefill": [_described(instance) for instance in service.prefill.instances],
            "decode": [_described(instance) for instance in service.decode.instances],
            "conversations": len(service.conversations.own),
            "evicted": evicted,
        }
        return JSONResponse(answer, 200 if is_up else 503)

    async def metrics(self, _: HttpRequest) -> Response:
        """Returns the metrics for Prometheus."""
        return Response(self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def models(self, http: HttpRequest) -> Response:
        """Returns the models of a decode engine."""
        instance = self._service.decode.choose(None, include_down=True)
        answer = error_answer(502, "No engine could answer.")
        try:
            if instance is not None:
                answer = await self._service.engines.ask(instance, "/v1/models", None, engine_headers(http.headers))
        except EngineFailedError as error:
            answer = error.answer or answer
        return _response(answer)

    async def hint(self, http: HttpRequest) -> Response:
        """Sends an agent's hint to kvtier servers. Answers with the number of these servers."""
        try:
            raw = await read_body(http.receive, http.headers.get("content-length", ""), MAX_HINT_BYTES)
            given = parse_hint(raw or b"")
        except RejectedError as rejected:
            return _response(rejected.answer)
        except BadRequestError as error:
            return _response(error_answer(400, str(error)))
        authorization = engine_headers(http.headers).get("authorization", "")
        conversation = Conversation.of(authorization, given.model, given.conversation_id)
        service = self._service
        if given.is_prefetch:
            hints = prefetch(conversation, self._home_of(conversation))
        else:
            hints = service.retentions.release(conversation, service.clock())
        service.hints.send(hints)
        return JSONResponse({"servers": len(hints)}, 202)

    def _home_of(self, conversation: Conversation) -> list[str]:
        """Returns the kvtier server of the engine that would compute the next prompt."""
        service = self._service
        instance = service.prefill.choose(conversation.name) or service.decode.choose(conversation.name)
        return [instance.hints] if instance is not None and instance.hints is not None else []


def _described(instance: Instance) -> dict[str, object]:
    described: dict[str, object] = {"url": instance.url, "up": instance.is_up, "outstanding": instance.outstanding}
    return described | ({"engine_id": instance.engine.engine_id} if instance.engine is not None else {})


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers))


async def no_route(http: HttpRequest, error: Exception) -> Response:
    """Answers unknown paths and wrong methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"There is no {http.method} {http.scope['path']} here."
    return _response(error_answer(status, message, getattr(error, "headers", None)))
