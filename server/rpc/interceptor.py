"""How a refusal becomes a gRPC status: one interceptor for every call of every service."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self

import grpc
from google.protobuf.message import DecodeError

from ...protos.error_reasons import STATUS_OF, error_details
from ...tiers.errors import CoreError
from ..refused import Refused
from ..telemetry.logs import get_logger
from ..telemetry.tracing import Tracing

__all__ = ["Auditor", "RefusalInterceptor"]


_log = get_logger(__name__)


class Auditor(Protocol):
    """Who is told of calls that ended, and of those that were refused."""

    def called(self, method: str, outcome: str) -> None:
        """A call has ended."""

    def refused(self, method: str, context: Any, reason: str) -> None:
        """A call was refused."""


class RefusalInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Answers refusals with their status and reason, and defects with INTERNAL and a traceback in the log.

    `observe(method, code, seconds)` is told of every call that ended, streams included, and `refused(method, reason)` of
    those that were refused or failed.
    """

    def __init__(
        self,
        observe: Callable[..., None],
        refused: Callable[[str, str], None] = lambda *_: None,
        tracing: Tracing | None = None,
        *,
        gate: Callable[[str, Any], None] | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        """Of a call that `tracing` records, `observe` gets the id of the trace as well.

        `gate(method, context)` is asked before each call whether it may be made, and raises `Refused` if not.
        """
        self.observe = observe
        self.refused = refused
        self.tracing = tracing
        self.auditor = auditor
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of a call."""
        handler: Any = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler_call_details.method, handler)

    def wrap(self, method: str, handler: Any) -> Any:
        """Returns the handler with this around it; `method` is for metrics and the log."""
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                wrap = self._wrap_stream if kind.endswith("stream") else self._wrap_unary
                if kind.startswith("unary") and handler.request_deserializer:
                    # gRPC answers UNKNOWN, without a reason, to a message that does not parse; and parses it before us.
                    parse = handler.request_deserializer
                    if self.tracing is not None:
                        parse = self.tracing.recording_request_id(parse)
                    behavior, handler = _parsing(behavior, parse), handler._replace(request_deserializer=None)
                return handler._replace(**{kind: wrap(method, behavior)})
        return handler

    def _wrap_unary(self, method: str, behavior: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with _Outcome(self, method, context) as outcome:
                try:
                    if self._gate is not None:
                        self._gate(method, context)
                    answer = behavior(request, context)
                    return await answer if inspect.isawaitable(answer) else answer
                except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
                    del request  # see `abort`
                    await outcome.abort(context, error)

        return call

    def _wrap_stream(self, method: str, behavior: Any) -> Any:
        # No generator, though gRPC takes one: of a call that is cancelled while an answer is being sent, gRPC drops the
        # generator where it stands, and what its `finally` does (a session falls) waits until it is collected.
        async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
            with _Outcome(self, method, context) as outcome:
                try:
                    if self._gate is not None:
                        self._gate(method, context)
                    answers = behavior(request, context)
                    if not hasattr(answers, "__anext__"):  # it writes its answers itself, as the health service does
                        await answers
                        return
                except Exception as error:  # noqa: BLE001 - as above
                    del request
                    await outcome.abort(context, error)
                async with contextlib.aclosing(answers):
                    while True:
                        try:
                            answer = await anext(answers)
                        except StopAsyncIteration:
                            return
                        except Exception as error:  # noqa: BLE001 - as above
                            del request
                            await outcome.abort(context, error)
                        await _send(context, answer)
                        del answer  # a frame of 2 MiB, while the next may be long in coming

        return call


async def _send(context: grpc.aio.ServicerContext, answer: Any) -> None:
    """Sends an answer. Where the client is gone the call is cancelled: gRPC would log its own error as a defect of ours."""
    try:
        await context.write(answer)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def _parsing(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    def call(message: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            request = parse(message)
        except DecodeError as error:
            raise Refused("INVALID_ARGUMENT", f"the message cannot be parsed: {error}") from error
        return behavior(request, context)

    return call


class _Outcome:
    """Measures one call, and ends it if it failed."""

    def __init__(self, interceptor: RefusalInterceptor, method: str, context: Any) -> None:
        self._to = interceptor
        self._method = method
        self._context = context
        self._code = grpc.StatusCode.OK
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, grpc.aio.AbortError):
            # Cancelled; or an answer could not be sent, because the client is gone.
            self._code = grpc.StatusCode.CANCELLED
        seconds = time.monotonic() - self._started
        tracing = self._to.tracing
        trace_id = tracing and tracing.call_ended(self._method, self._code.name, seconds, self._context)
        if trace_id:
            self._to.observe(self._method, self._code.name, seconds, trace_id)
        else:
            self._to.observe(self._method, self._code.name, seconds)
        if self._to.auditor is not None:
            self._to.auditor.called(self._method, self._code.name)

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> None:
        """Ends the call with the status of this error; raises.

        gRPC keeps what is raised here in a cycle with the context. So the frames that this error came through, and
        the request in them, are let go first: ten refused messages of 7 MB otherwise added up to 600 MB.
        """
        if isinstance(error, grpc.aio.AbortError):
            self._code = context.code() or grpc.StatusCode.UNKNOWN
            raise error
        if isinstance(error, CoreError | Refused):
            reason, message = error.reason, str(error)
        else:
            reason, message = "INTERNAL", "a defect of the server; its log has the traceback"
            _log.error("call failed", method=self._method, exc_info=error)
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self._code = STATUS_OF[reason]
        self._to.refused(self._method, reason)
        if self._to.auditor is not None:
            self._to.auditor.refused(self._method, context, reason)
        retry_after = error.retry_after if isinstance(error, Refused) else None
        await context.abort(self._code, message, error_details(reason, message, retry_after))
