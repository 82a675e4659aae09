"""Interceptor of calls over gRPC: applies the rules of calls, the limits of gRPC, and turns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Self
from urllib.parse import unquote

import grpc

from ...protos.endpoint import network_of
from ...protos.error_reasons import error_details
from ..auth.roles import CALLER, OWNER, is_public
from .call_pace import CallPace
from .call_rules import CallRules, session_id_of
from .in_flight_limits import (
    LOCAL_OR_REMOTE,
    PUBLIC,
    GrpcCaller,
    InFlightLimiter,
    RunningRequests,
    StreamShares,
)
from .slice_scheduler import GRPC_SECONDS, Account, SliceScheduler

__all__ = ["RefusalInterceptor"]

_OPEN = "/kvtier.v1.SessionService/Open"
"""The registry of sessions limits these streams."""
_CAPABILITIES = "/kvtier.v1.SessionService/Capabilities"
_PACED = ("/grpc.health.", "/grpc.reflection.")
"""Begin of the methods that have a rate, with `_CAPABILITIES`."""
_MAX_METADATA = 512
_MAX_METADATA_BYTES = 32 << 10
"""More than gRPC accepts (32 KiB, of which each entry counts 32 bytes). But if a connection ends
within a block of headers, gRPC begins a call with all headers that have arrived: megabytes."""
_MAX_STREAMS = 256
"""Maximum number of running streams of a method, over TCP and over the Unix socket."""
_MAX_STREAMS_OF = {"/kvtier.v1.EventService/WatchEvents": 1024}
"""The same for streams that hold little memory."""
_RUNNING_BYTES = 64 << 20
"""Memory of the requests of running calls over TCP, and over the Unix socket. A tenant has half."""


class RefusalInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Maps a refusal to its status and reason, and any other error to INTERNAL and a log entry."""

    def __init__(self, rules: CallRules, turns: SliceScheduler | None = None) -> None:
        """`turns` grants turns to single requests."""
        self.rules = rules
        self._turns = turns
        # Callers over TCP take no place of the Unix socket, and no place of a health check.
        self._in_flight = {
            (is_local, public): InFlightLimiter(PUBLIC if public else LOCAL_OR_REMOTE)
            for is_local in (True, False)
            for public in (True, False)
        }
        self._running = {is_local: RunningRequests(_RUNNING_BYTES) for is_local in (True, False)}
        self._paces = {key: CallPace() for key in self._in_flight}
        self._streams: dict[tuple[bool, str], StreamShares] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if _is_cut_off(handler_call_details.invocation_metadata or ()):
            return None
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # gRPC refuses an unknown method
            await self.rules.refusal_pace.wait()
            return None
        # For gRPC each call has a stream of requests, because gRPC calls such a handler before it
        # receives a request. On the wire both kinds are equal.
        wrapped = self._wrap(handler_call_details.method, handler)
        behavior = wrapped.unary_unary or wrapped.unary_stream
        if behavior is None:
            return wrapped
        if wrapped.response_streaming:
            return grpc.stream_stream_rpc_method_handler(behavior, None, wrapped.response_serializer)
        return grpc.stream_unary_rpc_method_handler(behavior, None, wrapped.response_serializer)

    def _wrap(self, method: str, handler: Any) -> Any:
        """Wraps a handler. `method` is the handler's name in metrics and log."""
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                wrap = self._wrap_stream if kind.endswith("stream") else self._wrap_unary
                receives = kind.startswith("unary")
                if receives and handler.request_deserializer:
                    behavior = _parsed(behavior, self.rules.parser_of(method, handler.request_deserializer))
                    handler = handler._replace(request_deserializer=None)
                streams = kind != "unary_unary"
                return handler._replace(**{kind: wrap(method, behavior, receives=receives, streams=streams)})
        return handler

    async def _admit(
        self, method: str, context: Any, outcome: _Outcome, request: Any, *, receives: bool, streams: bool
    ) -> Any:
        """Counts an authenticated call over gRPC. Returns its request, received if `receives`.

        Raises `Refused`.
        """
        caller = _caller_of(context)
        is_local = caller.group.startswith("unix:")
        if streams and method != _OPEN:
            shares = self._streams.get((is_local, method))
            if shares is None:
                shares = self._streams[is_local, method] = StreamShares(_MAX_STREAMS_OF.get(method, _MAX_STREAMS))
            outcome.counted.enter_context(shares.counting(caller.group))
        place = is_local, is_public(method.lstrip("/"))
        is_paced = method == _CAPABILITIES or method.startswith(_PACED)
        if is_paced and receives:
            await self._paces[place].wait(caller)
        elif is_paced:
            return _paced(self._paces[place], caller, request)
        if receives:
            # Streams have other limits. Their requests are small, and are not kept.
            running = None if streams or place[1] else self._running[is_local]
            request = await self._in_flight[place].receive(context, caller, running, outcome.counted)
            outcome.received()
        return request

    async def _enter(self, message: bytes, context: Any) -> Account | None:
        """Waits for the turn of the caller's session; returns the account for the call's time."""
        if self._turns is None:
            return None
        session_id = session_id_of(message)
        account = self._turns.account_of(session_id) if session_id else None
        if account is None:
            account = self._turns.account_without_session(CALLER.get().tenant or _caller_of(context).group)
        await self._turns.enter(account)
        self._turns.charge(account, time.monotonic(), GRPC_SECONDS)
        return account

    def _start(self, account: Account | None, behavior: Any, request: Any, context: Any) -> Any:
        """Calls a handler. The time that its parser uses is charged to the account."""
        if account is None or self._turns is None:
            return behavior(request, context)
        return self._turns.run(account, behavior, request, context)

    def _metered(self, account: Account | None, call: Any) -> Any:
        """Returns an awaitable that charges the time of the call to the account."""
        return call if account is None or self._turns is None else self._turns.metered(account, call)

    async def hold_back(self, context: Any, seconds: float) -> None:
        """Delays the answer to a refused caller, so that it does not call again at once."""
        if self._turns is not None:
            left = context.time_remaining()
            await self._turns.delay_refusal(seconds if left is None else min(seconds, left / 2))

    def _wrap_unary(self, method: str, behavior: Any, *, receives: bool, streams: bool) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            account: Account | None = None
            with _Outcome(self, method, context) as outcome:
                try:
                    if self.rules.authorize is not None:
                        self.rules.authorize(method, context)
                    request = await self._admit(method, context, outcome, request, receives=receives, streams=streams)
                    if receives:
                        account = await self._enter(request, context)
                    answer = self._start(account, behavior, request, context)
                    return await self._metered(account, answer) if hasattr(answer, "__await__") else answer
                except Exception as error:  # noqa: BLE001 - an error of one call must not end the server
                    del request  # see `abort`
                    await self._metered(account, outcome.abort(context, error))

        return call

    def _wrap_stream(self, method: str, behavior: Any, *, receives: bool, streams: bool) -> Any:
        # `call` writes the answers itself and is not a generator. If a call is cancelled while gRPC
        # sends an answer, gRPC would drop a generator without closing it. Then the generator's
        # `finally` block, which ends the session, would run only at the next garbage collection.
        async def call(request: Any, context: grpc.aio.ServicerContext) -> None:
            account: Account | None = None
            with _Outcome(self, method, context) as outcome:
                try:
                    if self.rules.authorize is not None:
                        self.rules.authorize(method, context)
                    request = await self._admit(method, context, outcome, request, receives=receives, streams=streams)
                    if receives:
                        account = await self._enter(request, context)
                    answers = self._start(account, behavior, request, context)
                    request = None  # is not held as long as the stream runs
                    # The health service writes its answers itself, so there is nothing to iterate.
                    if not hasattr(answers, "__anext__"):
                        await answers
                        return
                except Exception as error:  # noqa: BLE001 - as above
                    del request
                    await self._metered(account, outcome.abort(context, error))
                async with contextlib.aclosing(answers):
                    while True:
                        try:
                            answer = await self._metered(account, anext(answers))
                        except StopAsyncIteration:
                            return
                        except Exception as error:  # noqa: BLE001 - as above
                            del request
                            await self._metered(account, outcome.abort(context, error))
                        await self._metered(account, _send(context, answer))
                        del answer  # frees the frame (1 MiB) during the wait for the next one

        return call


def _caller_of(context: grpc.aio.ServicerContext) -> GrpcCaller:
    """Returns the caller of an authenticated call. All credentials of a tenant are one group."""
    connection = f"connection {context.peer() or ''}"
    identity = CALLER.get()
    if identity is OWNER:
        return GrpcCaller(_address_of(context), connection)
    place = "unix: " if connection.startswith("connection unix:") else ""
    name = f"tenant {identity.tenant}" if identity.tenant else f"caller {identity.name}"
    return GrpcCaller(f"{place}{name}", connection)


def _address_of(context: grpc.aio.ServicerContext) -> str:
    """Returns the network of a caller, such as "127.0.0.1"; "unix:" for the Unix socket."""
    peer: str = context.peer() or ""
    if not peer.startswith("ip"):
        return peer
    # gRPC writes "ipv4:127.0.0.1:1" and "ipv6:%5B::1%5D:1".
    address = unquote(peer).partition(":")[2].rpartition(":")[0]
    return network_of(address.strip("[]"))


async def _paced(pace: CallPace, caller: GrpcCaller, requests: Any) -> AsyncIterator[Any]:
    """Yields the requests of a stream at a rate."""
    async for request in requests:
        await pace.wait(caller)
        yield request


async def _send(context: grpc.aio.ServicerContext, answer: Any) -> None:
    """Sends an answer. If the client has disconnected, cancels the call without a log entry."""
    try:
        await context.write(answer)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def _is_cut_off(metadata: Sequence[tuple[str, str | bytes]]) -> bool:
    """Returns whether the connection of a call ended before its metadata was complete."""
    return len(metadata) > _MAX_METADATA or sum(len(value) for _, value in metadata) > _MAX_METADATA_BYTES


def _parsed(behavior: Any, parse: Callable[[bytes], Any]) -> Any:
    def call(message: bytes, context: grpc.aio.ServicerContext) -> Any:
        return behavior(parse(message), context)

    return call


class _Outcome:
    """Duration and status of one call; aborts the call if the handler fails."""

    def __init__(self, interceptor: RefusalInterceptor, method: str, context: Any) -> None:
        self._interceptor = interceptor
        self._method = method
        self._context = context
        self._code = "OK"
        """Name of the call's status."""
        self._started = time.monotonic()
        self._counted: contextlib.ExitStack | None = None

    @property
    def counted(self) -> contextlib.ExitStack:
        """Counts the stream until the end of the call. Most calls have no use for it."""
        if self._counted is None:
            self._counted = contextlib.ExitStack()
        return self._counted

    def received(self) -> None:
        """Begins the duration of a call when its request has arrived."""
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._counted is not None:
            self._counted.close()
        if kind is not None and not issubclass(kind, grpc.aio.AbortError):
            # The call was cancelled, or the client disconnected before an answer was sent.
            self._code = "CANCELLED"
        self._interceptor.rules.ended(self._method, self._code, self._started, self._context)

    async def abort(self, context: grpc.aio.ServicerContext, error: Exception) -> None:
        """Aborts the call with the status of `error`; always raises."""
        if isinstance(error, grpc.aio.AbortError):
            self._code = (context.code() or grpc.StatusCode.UNKNOWN).name
            raise error
        rules = self._interceptor.rules
        code, reason, message, retry_after, hold_back = rules.refusal_of(self._method, context, error)
        self._code = code.name
        if reason == "UNAUTHENTICATED":
            await rules.refusal_pace.wait()
        if hold_back:
            await self._interceptor.hold_back(context, hold_back)
        await context.abort(code, message, error_details(reason, message, retry_after))
