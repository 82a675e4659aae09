"""GET pages: health, metrics, models."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from .engines import Answer, EngineFailedError, engine_headers
from .fleet import Instance
from .metrics import CONTENT_TYPE
from .reply import error_answer
from .service import Service

__all__ = ["Pages", "no_route"]


class Pages:
    """Handlers of the GET pages."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _: HttpRequest) -> Response:
        """Reports which engines are up, and removes expired entries (B2.24)."""
        service = self._service
        evicted = service.conversations.evict(service.clock())
        service.metrics.dropped.labels("expired").inc(evicted)
        is_up = any(instance.is_up for instance in service.decode.instances)
        answer = {
            "status": "ok" if is_up else "no decode engine is up",
            "prefill": [_described(instance) for instance in service.prefill.instances],
            "decode": [_described(instance) for instance in service.decode.instances],
            "conversations": len(service.conversations),
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
