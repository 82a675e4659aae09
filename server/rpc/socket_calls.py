"""Unary calls over the Unix socket that also hands out the region (`protos/wire/call_frames.py`).

The same handlers as gRPC's, in the same interceptor: what is refused, measured and logged is the same. A connection belongs to a
session, carries one call at a time, and ends with its session.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Coroutine, Generator, Mapping
from typing import Any, NoReturn

import grpc
from google.rpc import status_pb2

from ...protos.error_reasons import status_within
from ...protos.wire.call_frames import LENGTH_BYTES, pack_answer, unpack_call, unpack_length
from ..auth.roles import OWNER, Identity
from ..telemetry.logs import get_logger
from .interceptor import RefusalInterceptor

__all__ = ["SocketCallServer"]

_log = get_logger(__name__)

_SERVICES = "kvtier.v1."
_REQUEST_SECONDS = 30.0
"""How long a request may be under way, from its first byte to its last."""


class SocketCallServer:
    """The methods that can be called, and what serves a connection. Lives on the event loop.

    Services are registered as with a server of gRPC (`add_…Servicer_to_server`); of their methods the unary ones are served.
    """

    def __init__(self, interceptor: RefusalInterceptor, max_message_bytes: int) -> None:
        """A request of more than `max_message_bytes` is refused, unread."""
        self.max_message_bytes = max_message_bytes
        self._interceptor = interceptor
        self._handlers: dict[bytes, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Takes in a service's methods, as gRPC does."""
        for name, handler in handlers.items():
            if handler.unary_unary is not None:
                method = f"{service.removeprefix(_SERVICES)}/{name}".encode()
                self._handlers[method] = self._interceptor.wrap(f"/{service}/{name}", handler)

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Does nothing: gRPC takes the same methods in twice."""

    async def serve(self, connection: socket.socket, caller: Identity = OWNER) -> None:
        """Serves a connection until its end. Takes it over. `caller` is who opened its session."""
        loop = asyncio.get_running_loop()
        _, served = await loop.connect_accepted_socket(lambda: _Connection(self, caller), connection)
        try:
            await served.ended
        finally:
            served.close()

    async def call(self, name: bytes, message: bytes, caller: Identity = OWNER) -> bytes:
        """Returns the answer to a call, packed."""
        handler = self._handlers.get(name)
        if handler is None:
            return _refusal(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
        try:
            answer = await handler.unary_unary(message, _Context(caller))
        except _Aborted as aborted:
            return pack_answer(aborted.status.code, aborted.status.SerializeToString())
        return pack_answer(0, handler.response_serializer(answer))


def _refusal(code: grpc.StatusCode, message: str) -> bytes:
    """Returns the answer to a call that has not come to its handler."""
    number: int = code.value[0]
    return pack_answer(number, status_pb2.Status(code=number, message=message).SerializeToString())


class _Aborted(grpc.aio.AbortError):  # type: ignore[misc]  # grpc has no types
    """A call was refused, or has failed."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class _Context:
    """What of gRPC's context the interceptor asks for. Handlers use nothing of it."""

    __slots__ = ("caller",)

    def __init__(self, caller: Identity) -> None:
        self.caller = caller

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> NoReturn:
        """Ends the call."""
        status = status_within(trailing_metadata)
        if status is not None:
            raise _Aborted(status)
        number: int = code.value[0]
        raise _Aborted(status_pb2.Status(code=number, message=details))


class _Connection(asyncio.Protocol):
    """One connection: takes a request, has it answered, takes the next."""

    def __init__(self, calls: SocketCallServer, caller: Identity) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._calls = calls
        self._caller = caller
        self._patience: asyncio.TimerHandle | None = None
        """Ends the connection if the rest of a request does not come."""
        self._received = bytearray()
        self._oversized = 0
        """Bytes still to come of a request that is refused for its size."""
        self._task: asyncio.Task[None] | None = None
        self._has_turn = False
        """Whether the loop is about to come back for the next call."""
        self._unread = False
        """Whether the client lets its answers lie: it gets no more of them until it takes them."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._task is None and not self._unread and not self._has_turn:
            self._next()
        if self._has_more_than_one:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._unread = True

    def resume_writing(self) -> None:
        self._unread = False
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self._be_patient(waiting=False)
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Hangs up; a call that is running is cancelled."""
        self._transport.abort()

    def _next(self) -> None:
        """Starts the next call, if it has come whole."""
        if self._oversized:
            self._skip()
        if not self._has_more_than_one:
            self._transport.resume_reading()
        if self._oversized or len(self._received) < LENGTH_BYTES:
            self._be_patient(waiting=bool(self._oversized or self._received))
            return
        end = LENGTH_BYTES + unpack_length(self._received)
        if end > LENGTH_BYTES + self._calls.max_message_bytes:
            self._oversized = end
            self._next()
        elif len(self._received) >= end:
            body = bytes(memoryview(self._received)[LENGTH_BYTES:end])
            del self._received[:end]
            self._be_patient(waiting=False)
            self._task = _begin(self._answer(body))
            if self._task is None and self._received:  # it is answered; others have their turn before the next one
                self._has_turn = True
                asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._be_patient(waiting=True)

    @property
    def _has_more_than_one(self) -> bool:
        """Whether more has come than a call can be long: the next one is there, and what follows it can wait."""
        return len(self._received) > LENGTH_BYTES + self._calls.max_message_bytes

    def _go_on(self) -> None:
        """Starts the next call, where nothing stands against it."""
        self._has_turn = False
        if self._task is None and not self._unread and not self._transport.is_closing():
            self._next()

    def _be_patient(self, *, waiting: bool) -> None:
        """Gives the rest of a request its time, from when it was first waited for."""
        if waiting and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(_REQUEST_SECONDS, self.close)
        elif not waiting and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _skip(self) -> None:
        """Drops what has come of a request that is too large; refuses it at its end, when the client has sent it all."""
        skipped = min(self._oversized, len(self._received))
        del self._received[:skipped]
        self._oversized -= skipped
        if not self._oversized:
            most = self._calls.max_message_bytes
            self._transport.write(_refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of more than {most} bytes"))

    async def _answer(self, body: bytes) -> None:
        try:
            answer = await self._calls.call(*unpack_call(body), self._caller)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            _log.warning("local call refused", error=str(error), exc_info=None if type(error) is ValueError else error)
            self.close()
            return
        waited, self._task = self._task is not None, None
        self._transport.write(answer)
        if waited:
            self._go_on()


def _begin(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Runs a coroutine at once, as far as it comes without waiting; returns the task that goes on with it, if it waits.

    Nearly all calls wait for nothing. A task, and a turn of the loop, would cost them more than what many of them do.
    """
    if sys.version_info >= (3, 12):
        task = asyncio.Task(coroutine, loop=asyncio.get_running_loop(), eager_start=True)
        return None if task.done() else task
    try:
        waited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_Begun(coroutine, waited))


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine that has run up to where it waits, for a task to go on with: what it waits for is said once more."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waited: Any) -> None:
        self._coroutine = coroutine
        self._waited = [waited]

    def send(self, value: Any) -> Any:
        return self._waited.pop() if self._waited else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Whatever is thrown, a cancellation before the task has begun included, is thrown to where it waits."""
        self._waited.clear()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        """Never called: what is a `Coroutine` must have it, and a task only sends and throws."""
        raise NotImplementedError("a task runs this; it is not awaited")
