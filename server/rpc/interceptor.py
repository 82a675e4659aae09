"""gRPC interceptor of every call: authorization, error statuses, metrics, audit and traces."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError

from ...protos.error_reasons import STATUS_OF, error_details
from ...tiers.errors import CoreError
from ..auth.audit_log import AuditLog
from ..refused import Refused
from ..telemetry.logs import get_logger
from ..telemetry.tracing import Tracing
from .receptions import Receptions
from .request_bounds import RequestBounds
from .slice_scheduler import SliceScheduler

__all__ = ["RefusalInterceptor"]


_log = get_logger(__name__)

_GRPC_SECONDS = 0.0002
"""Use of the event loop by a call over gRPC before and after its handler."""
_GARBAGE_SECONDS = 0.1
"""A caller whose request cannot be parsed is held back for so long."""
_MAX_DELAY_SECONDS = 1.0
"""Maximum delay of the answer to a call above the rate limit."""
_SESSION_TAGS, _SESSION_ID_BYTES = b"\n\n\x10", 16
"""Tags and length of the session's id, which most requests begin with."""
_RELEASES = frozenset(
    f"/kvtier.v1.{name}"
    for name in (
        "CacheService/CompleteLoad",
        "CacheService/ReleaseLease",
        "CacheService/CompleteStore",
        "CacheService/FinishRequest",
        "HandoffService/ReleaseHolds",
        "TransferService/UnregisterDeviceBuffers",
    )
)
"""Methods that release slots or pins. Their handlers permit some calls above the rate limit."""


class RefusalInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Maps a refusal to its status and reason, and any other error to INTERNAL and a log entry.

    When a call or stream has ended, the interceptor calls `observe(method, code, seconds)`. If the
    call was refused or has failed, the interceptor first calls `refused(method, reason)`.
    """

    def __init__(
        self,
        observe: Callable[..., None],
        refused: Callable[[str, str], None] = lambda *_: None,
        tracing: Tracing | None = None,
        *,
        authorize: Callable[[str, Any], None] | None = None,
        audit_log: AuditLog | None = None,
        bounds: RequestBounds | None = None,
        turns: SliceScheduler | None = None,
        check_rate: Callable[[bytes], None] | None = None,
        tenant_of: Callable[[Any], str | None] = lambda _: None,
    ) -> None:
        """`authorize(method, context)` runs before each call and can raise `Refused`.

        `bounds` checks each single request before it is parsed. A handler of a stream of requests
        checks them itself. Before that, `check_rate(session_id)` can raise `Refused`. `turns`
        grants turns to single requests over gRPC. `tenant_of(context)` returns the tenant of a
        caller without a session.
        """
        self.observe = observe
        self.refused = refused
        self.tracing = tracing
        self.audit_log = audit_log
        self.bounds = bounds
        self._authorize = authorize
        self._turns = turns
        self._check_rate = check_rate
        self._tenant_of = tenant_of
        self._receptions = Receptions()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        wrapped = self.wrap(handler_call_details.method, handler)
        if handler.request_streaming:
            return wrapped
        return self._with_reception(wrapped, _token_of(handler_call_details.invocation_metadata))

    def _with_reception(self, handler: Any, caller: str) -> Any:
        """Makes a handler of a single request receive this request with `Receptions`.

        For gRPC it is the handler of a stream of requests, because gRPC calls such a handler before
        it receives. On the wire both kinds are equal.
        """
        behavior = handler.unary_unary or handler.unary_stream

        async def call(_: Any, context: grpc.aio.ServicerContext) -> Any:
            # Without a variable: see `_Outcome.abort`.
            return await self._in_turn(
                behavior, await self._receptions.receive(context, caller or _address_of(context)), context
            )

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    async def _in_turn(self, behavior: Any, message: bytes, context: grpc.aio.ServicerContext) -> Any:
        """Waits for the turn of the caller's session, and measures for how long the call runs."""
        if self._turns is None:
            call = behavior(message, context)
            del message  # see `_Outcome.abort`
            return await call
        session_id = session_id_of(message)
        account = self._turns.account_of(session_id) if session_id else None
        if account is None:
            account = self._turns.account_without_session(self._tenant_of(context))
        await self._turns.enter(account)
        self._turns.charge(account, time.monotonic(), _GRPC_SECONDS)
        call = behavior(message, context)
        del message
        return await self._turns.metered(account, call)

    async def hold_back(self, context: Any, seconds: float) -> None:
        """Keeps a refused caller from calling again for `seconds`, but at most for a second.

        Over a socket, the connection is not read meanwhile. Over gRPC, the answer is delayed.
        """
        seconds = min(seconds, _MAX_DELAY_SECONDS)
        if hasattr(context, "held_back"):
            context.held_back = seconds
        elif self._turns is not None:
            left = context.time_remaining()
            await self._turns.delay_refusal(seconds if left is None else min(seconds, left / 2))

    def wrap(self, method: str, handler: Any) -> Any:
        """Wraps a handler. `method` is the handler's name in metrics and log."""
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                wrap = self._wrap_stream if kind.endswith("stream") else self._wrap_unary
                if kind.startswith("unary") and handler.request_deserializer:
                    # The wrapper parses the request. If gRPC parsed it, a parsing error would be
                    # answered with UNKNOWN and without a reason.
                    parse = handler.request_deserializer
                    if self.bounds is not None:
                        parse = self.bounds.checking(method, parse)
                    if self.tracing is not None:
                        parse = self.tracing.recording_request_id(parse)
                    check_rate = None if method in _RELEASES else self._check_rate
                    behavior = _with_parser(behavior, parse, check_rate)
                    handler = handler._replace(request_deserializer=None)
                return handler._replace(**{kind: wrap(method, behavior)})
        return handler

    def _wrap_unary(self, method: str, behavior: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with _Outcome(self, method, context) as outcome:
                try:
                    if self._authorize is not None:
                        self._authorize(method, context)
                    answer = behavior(request, context)
                    return await answer if inspect.isawaitable(answer) else answer
                except Exception as error:  # noqa: BLE001 - an error of one call must not end the server
                    del request  # see `abort`
                    await outcome.abort(context, error)

        return call

    def _wrap_stream(self, method: str, behavior: Any) -> Any:
        # `call` writes the answers itself and is not a generator. If a call is cancelled while gRPC
        # sends an answer, gRPC would drop a generator without closing it. Then the generator's
        # `finally` block, which ends the session, would run only at the next garbage collection.
        async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
            with _Outcome(self, method, context) as outcome:
                try:
                    if self._authorize is not None:
                        self._authorize(method, context)
                    answers = behavior(request, context)
                    # The health service writes its answers itself, so there is nothing to iterate.
                    if not hasattr(answers, "__anext__"):
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
                        del answer  # frees the frame (2 MiB) during the wait for the next one

        return call


def _token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    return next((str(value) for key, value in metadata or () if key == "authorization"), "")


def _address_of(context: grpc.aio.ServicerContext) -> str:
    """Returns the address of a caller without its port, such as "ipv4:127.0.0.1"."""
    peer: str = context.peer() or ""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer


async def _send(context: grpc.aio.ServicerContext, answer: Any) -> None:
    """Sends an answer. If the client has disconnected, cancels the call without a log entry."""
    try:
        await context.write(answer)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def session_id_of(message: bytes) -> bytes:
    """Returns the id of the session that a serialized request begins with; b"" if it has none."""
    return message[4 : 4 + _SESSION_ID_BYTES] if message[:1] + message[2:4] == _SESSION_TAGS else b""


def _with_parser(
    behavior: Any, parse: Callable[[bytes], Any], check_rate: Callable[[bytes], None] | None = None
) -> Any:
    def call(message: bytes, context: grpc.aio.ServicerContext) -> Any:
        if check_rate is not None and (session_id := session_id_of(message)):
            check_rate(session_id)
        try:
            request = parse(message)
        except DecodeError as error:
            text = f"the message cannot be parsed: {error}"
            raise Refused("INVALID_ARGUMENT", text, hold_back=_GARBAGE_SECONDS) from error
        return behavior(request, context)

    return call


class _Outcome:
    """Duration and status of one call; aborts the call if the handler fails."""

    def __init__(self, interceptor: RefusalInterceptor, method: str, context: Any) -> None:
        self._interceptor = interceptor
        self._method = method
        self._context = context
        self._code = grpc.StatusCode.OK
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, grpc.aio.AbortError):
            # The call was cancelled, or the client disconnected before an answer was sent.
            self._code = grpc.StatusCode.CANCELLED
        seconds = time.monotonic() - self._started
        tracing = self._interceptor.tracing
        trace_id = (
            None if tracing is None else tracing.call_ended(self._method, self._code.name, seconds, self._context)
        )
        self._interceptor.observe(self._method, self._code.name, seconds, trace_id)
        if self._interceptor.audit_log is not None:
            self._interceptor.audit_log.record_call(self._method, self._code.name)

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> None:
        """Aborts the call with the status of `error`; always raises.

        gRPC keeps the raised exception in a reference cycle with the context. The frames of the
        exception's traceback refer to the request. So this method first removes the traceback.
        Without that, ten refused messages of 7 MB occupied 600 MB.
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
        self._interceptor.refused(self._method, reason)
        if self._interceptor.audit_log is not None:
            self._interceptor.audit_log.record_refusal(self._method, context, reason)
        retry_after = error.retry_after if isinstance(error, Refused) else None
        if isinstance(error, Refused) and error.hold_back:
            await self._interceptor.hold_back(context, error.hold_back)
        await context.abort(self._code, message, error_details(reason, message, retry_after))
