"""Unary calls over the socket protocol (`docs/wire.md`).

These calls use the handlers of the gRPC server and the same rules (`call_rules`). So refusals,
metrics and logs are the same as for gRPC calls. A connection belongs to one session, carries one
call at a time, and ends with the session.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.rpc import status_pb2

from ...protos.error_reasons import status_of
from ...protos.wire.socket_frames import (
    HEAD_BYTES,
    Hello,
    pack_answer,
    pack_error,
    unpack_call,
    unpack_call_head,
)
from ..auth.roles import OWNER, Identity
from ..telemetry.logs import get_logger
from .call_rules import CallRules
from .in_flight_limits import MessageBudget
from .slice_scheduler import Account, SliceScheduler

__all__ = ["CallContext", "SocketCallServer"]

_log = get_logger(__name__)

_SERVICES = "kvtier.v1."
_REQUEST_SECONDS = 30.0
"""Maximum time between the first and the last byte of a request, and to read an answer."""
_BUDGET_MESSAGES = 8
"""Size of the `MessageBudget`, in requests of the largest size."""
_READ_BYTES = 64 << 10
"""Bytes that the server receives at a time."""
_BUFFER = memoryview(bytearray(_READ_BYTES))
"""Receives the bytes of all connections, which copy them at once."""
_READ_SECONDS = 2e-5
"""Use of the event loop for an event of a connection, before `get_buffer`."""
_PIECE_BYTES = 1024
"""After fewer bytes that do not end a request, the connection is held back: a client sends a whole
request, so its pieces are larger on every network."""
_PIECE_SECONDS, _MAX_PIECE_SECONDS = 0.01, 1.0
"""Time for which it is held back; each further short piece in a row doubles it. On a Unix socket
277 single bytes fit into the buffers, and to receive them takes 0.4 ms."""
_NAME_BYTES = 1 + 255
"""Largest name of a method, with its length."""
_SMALL_BYTES = 64 << 10
"""Largest request that the server receives without a reservation in its `MessageBudget`."""


class SocketCallServer:
    """Server of unary calls over sockets. Runs on the event loop.

    Services are registered as with a gRPC server (`add_…Servicer_to_server`). Only unary methods
    are served.
    """

    def __init__(self, rules: CallRules, max_message_bytes: int, turns: SliceScheduler) -> None:
        """The server refuses and discards a message of more than `max_message_bytes`."""
        self.turns = turns
        self.max_message_bytes = max_message_bytes
        self.budget = MessageBudget(_BUDGET_MESSAGES * max_message_bytes)
        self._rules = rules
        self._methods: dict[bytes, _Method] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Registers the methods of a service; the generated code calls this."""
        for name, handler in handlers.items():
            if handler.unary_unary is not None:
                method = f"/{service}/{name}"
                parse = self._rules.parser_of(method, handler.request_deserializer)
                served = _Method(method, parse, handler.unary_unary, handler.response_serializer)
                self._methods[f"{service.removeprefix(_SERVICES)}/{name}".encode()] = served

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Does nothing: `add_registered_method_handlers` gets the same methods."""

    def size_refusal(self, number: int, start: bytearray, length: int) -> bytes | None:
        """Returns the answer to a request of `length` bytes that is too large; None if it is not.

        `start` begins with the name of the method. Calls without long lists have a small limit.
        """
        if length > self.max_message_bytes:
            limit = f"{self.max_message_bytes} bytes, the limit that limits.max_message_bytes sets"
            text = f"the message has {length} bytes, which is larger than {limit}"
            return _refusal(number, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        if self._rules.bounds is None:
            return None
        method = start[1 : 1 + start[0]].decode(errors="replace")
        refusal = self._rules.bounds.size_refusal(method, length - 1 - start[0])
        return None if refusal is None else pack_error(number, status_of(refusal.reason, str(refusal)))

    async def serve(self, transport: asyncio.Transport, hello: Hello, caller: Identity = OWNER) -> None:
        """Serves a connection of a session until it ends, then closes it."""
        served = _Connection(self, hello, caller)
        transport.set_protocol(served)
        served.connection_made(transport)
        served.read_on()
        try:
            await served.ended
        finally:
            served.close()

    async def call(self, number: int, name: bytes, message: bytes, context: CallContext) -> tuple[bytes, float]:
        """Returns the answer, and for how many seconds no further call must be read."""
        method = self._methods.get(name)
        if method is None:
            return _refusal(number, grpc.StatusCode.UNIMPLEMENTED, "there is no such method"), 0.0
        rules = self._rules
        if rules.tracing is not None:
            rules.tracing.record_request_id(None)  # the calls of a connection share a context
        began, code = time.monotonic(), "CANCELLED"  # unless the call ends otherwise
        try:
            if rules.authorize is not None:
                rules.authorize(method.name, context)
            answer = method.serialize(await method.handle(method.parse(message), context))
            code = "OK"
        except Exception as error:  # noqa: BLE001 - an error of one call must not end the server
            refusal = rules.refusal_of(method.name, context, error)
            if refusal.reason == "UNAUTHENTICATED":
                await rules.refusal_pace.wait()
            code = refusal.code.name
            status = status_of(refusal.reason, refusal.message, refusal.retry_after)
            return pack_error(number, status), refusal.hold_back
        finally:
            rules.ended(method.name, code, began, context)
        return pack_answer(number, 0, answer), 0.0


def _refusal(number: int, code: grpc.StatusCode, message: str) -> bytes:
    """Returns a packed answer with this status, for a call that no handler gets."""
    return pack_error(number, status_pb2.Status(code=code.value[0], message=message))


class _Method(NamedTuple):
    """A unary method: its name in gRPC, and the parts of a call."""

    name: str
    parse: Callable[[bytes], Any]
    handle: Callable[[Any, Any], Coroutine[Any, Any, Any]]
    serialize: Callable[[Any], bytes]


class CallContext(NamedTuple):
    """The part of gRPC's context that authorization uses. Unary handlers do not use a context."""

    caller: Identity


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, calls: SocketCallServer, hello: Hello, caller: Identity) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._calls = calls
        self._session_id = hello.session_id
        self._last_call = hello.number
        self._caller = caller
        self._context = CallContext(caller)
        self._turns = calls.turns
        self._account: Account = calls.turns.account_of(hello.session_id) or calls.turns.account_without_session(
            caller.tenant
        )
        self._run = partial(calls.turns.run, self._account)
        self._reading_at = 0.0
        self._held_back = 0.0
        """For how many seconds no call is read after the last one."""
        self._has_short_piece = False
        """Whether the last bytes were few."""
        self._piece_seconds = _PIECE_SECONDS
        self._deadline: asyncio.TimerHandle | None = None
        """Closes the connection if the rest of a request does not arrive in time."""
        self._unread: asyncio.TimerHandle | None = None
        """Closes the connection if the client does not read an answer in time."""
        self._received = bytearray()
        self._reserved = 0
        self._oversized = 0
        """Number of bytes of an oversized request that are still to be discarded."""
        self._size_refusal = b""
        """Answer to the oversized request."""
        self._task: asyncio.Task[None] | None = None
        """The running call, if it did not finish at once."""
        self._is_scheduled = False
        """Whether the connection waits for its turn, or is held back. Then it is not read."""
        self._is_paused = True
        """Whether the transport does not read."""
        self._write_paused = False
        """Whether the client does not read the answers. Then no further call starts."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, _: int) -> memoryview:
        """Runs before the transport receives, which takes long for many small packets or TLS."""
        self._reading_at = time.monotonic()
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        before = time.monotonic() - self._reading_at + _READ_SECONDS
        self._turns.run(self._account, self._receive, nbytes, before=before)

    def _receive(self, nbytes: int) -> None:
        self._received += _BUFFER[:nbytes]
        self._has_short_piece = nbytes < _PIECE_BYTES
        if not self._has_short_piece:
            self._piece_seconds = _PIECE_SECONDS
        if self._task is None and not self._write_paused and not self._is_scheduled:
            if self._turns.may_run(self._account):
                self._next()
            else:
                self._wait_for_turn()
        if self._received and self._buffer_is_full:
            self._pause_reading()

    def read_on(self) -> None:
        """Lets the transport read, unless the buffer is full."""
        if self._is_paused and not self._buffer_is_full:
            self._is_paused = False
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def _wait_for_turn(self) -> None:
        """Stops reading until it is the turn of the session."""
        self._is_scheduled = True
        self._pause_reading()
        self._turns.wait(self._account, self._continue)

    def _continue(self) -> bool:
        self._is_scheduled = False
        if self._task is None and not self._write_paused and not self._transport.is_closing():
            self._next()
        return False

    def pause_writing(self) -> None:
        self._write_paused = True
        self._unread = asyncio.get_running_loop().call_later(_REQUEST_SECONDS, self.close)

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._unread is not None:
            self._unread.cancel()
        self.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self._set_deadline(waiting=False)
        if self._unread is not None:
            self._unread.cancel()
        self._release()
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Closes the connection soon; a running call is cancelled.

        TLS of asyncio fails if its transport is aborted while it delivers the last bytes.
        """
        asyncio.get_running_loop().call_soon(self._transport.abort)

    def _next(self) -> None:
        """Starts the next call if its request is complete."""
        if self._oversized:
            self._discard()
        self.read_on()
        if self._oversized or len(self._received) < HEAD_BYTES:
            if self._oversized or self._received:
                self._wait_for_rest()
            else:
                self._set_deadline(waiting=False)
            return
        try:
            length, number = unpack_call_head(self._received, self._last_call)
        except (ValueError, ConnectionError) as error:
            _log.warning("socket call refused", error=str(error))
            self.close()
            return
        end = HEAD_BYTES + length
        if length > max(_SMALL_BYTES, self._reserved) and not self._admit(number, length):
            if self._oversized:
                self._next()
            else:
                self._wait_for_rest()
        elif len(self._received) >= end:
            body = bytes(memoryview(self._received)[HEAD_BYTES:end])
            del self._received[:end]
            if self._deadline is not None:
                self._set_deadline(waiting=False)
            self._last_call, self._piece_seconds = number, _PIECE_SECONDS
            self._task = _run_eagerly(self._answer(number, body), self._run)
            if self._task is None and (self._received or self._held_back):
                self._called()
        else:
            self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        """Waits for the rest of a request. After a short piece, does not read on at once."""
        self._set_deadline(waiting=True)
        if self._has_short_piece:
            self._has_short_piece = False
            self._hold_back(self._piece_seconds)
            self._piece_seconds = min(2 * self._piece_seconds, _MAX_PIECE_SECONDS)

    def _hold_back(self, seconds: float) -> None:
        """Reads nothing for this time, and then waits for a turn."""
        self._is_scheduled = True
        self._pause_reading()
        asyncio.get_running_loop().call_later(seconds, self._end_hold_back)

    def _called(self) -> None:
        """Prepares the next call of the connection after an answer."""
        if self._held_back:
            self._hold_back(self._held_back)
            self._held_back = 0.0
        elif self._received:
            self._wait_for_turn()  # other connections get a turn before

    def _end_hold_back(self) -> None:
        if not self._transport.is_closing():
            self._wait_for_turn()

    def _admit(self, number: int, length: int) -> bool:
        """Returns whether a large request may be received: it is not too large and has memory."""
        start = self._received[HEAD_BYTES : HEAD_BYTES + _NAME_BYTES]
        if length <= self._calls.max_message_bytes and not (start and len(start) > start[0]):
            return False  # the name of the method is incomplete
        refusal = self._calls.size_refusal(number, start, length)
        if refusal is not None:
            self._size_refusal, self._oversized = refusal, HEAD_BYTES + length
            self._last_call = number
            return False
        return self._reserve(length)

    @property
    def _buffer_is_full(self) -> bool:
        """Whether the buffer holds more than the request may have. Then reading is paused."""
        return len(self._received) > HEAD_BYTES + max(_SMALL_BYTES, self._reserved)

    def _reserve(self, nbytes: int) -> bool:
        """Reserves memory for a request and continues to read it, if there is memory."""
        if not self._calls.budget.reserve(self._session_id, self._caller.tenant, nbytes, self):
            return False
        self._reserved = nbytes
        self.read_on()
        return True

    def _release(self) -> None:
        reserved, self._reserved = self._reserved, 0
        self._calls.budget.release(self._session_id, self._caller.tenant, reserved, self)

    def resume(self) -> None:
        """Waits for the next turn, unless a call is running or the client does not read answers."""
        if self._task is None and not self._is_scheduled and not self._write_paused:
            self._wait_for_turn()

    def _set_deadline(self, *, waiting: bool) -> None:
        """Starts the deadline for the rest of a request if `waiting`; otherwise cancels it."""
        if waiting and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(_REQUEST_SECONDS, self.close)
        elif not waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _discard(self) -> None:
        """Discards bytes of an oversized request. Refuses the request after its last byte."""
        dropped = min(self._oversized, len(self._received))
        del self._received[:dropped]
        self._oversized -= dropped
        if not self._oversized:
            self._transport.write(self._size_refusal)

    async def _answer(self, number: int, body: bytes) -> None:
        try:
            answer, self._held_back = await self._calls.call(number, *unpack_call(body), self._context)
        except Exception as error:  # noqa: BLE001 - an error of one call must not end the server
            _log.warning("socket call refused", error=str(error), exc_info=None if type(error) is ValueError else error)
            self.close()
            return
        if self._reserved:
            self._release()
        waited, self._task = self._task is not None, None
        self._transport.write(answer)
        if waited:
            self._called()
            if not self._is_scheduled:
                self._next()  # reads on


def _run_eagerly(coroutine: Coroutine[Any, Any, None], run: Callable[..., Any]) -> asyncio.Task[None] | None:
    """Runs a coroutine until it waits. Returns a task for the rest; None if it has finished.

    Most calls never wait. For such a call, a task and a turn of the event loop can cost more than
    the call itself. `run(function, argument)` calls each further step of the task.
    """
    if sys.version_info >= (3, 12):
        started = _StartedCoroutine(coroutine, run)
        task = asyncio.Task(started, loop=asyncio.get_running_loop(), eager_start=True)
        return None if task.done() else task
    try:
        pending = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_StartedCoroutine(coroutine, run, pending))


class _StartedCoroutine(Coroutine[Any, Any, None]):
    """Wraps a coroutine that was already started, so that a Task can continue it.

    The first `send` of the Task yields again the future that the coroutine already awaits: Python
    3.11 has no eager tasks.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], run: Callable[..., Any], *pending: Any) -> None:
        """`pending`: the future that the coroutine already awaits."""
        self._coroutine = coroutine
        self._run = run
        self._pending = list(pending)

    def send(self, value: Any) -> Any:
        return self._pending.pop() if self._pending else self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """Raises the error in the coroutine, even before the first `send`."""
        self._pending.clear()
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        """Required by `Coroutine`. A Task uses only `send` and `throw`."""
        raise NotImplementedError("only a Task may run this; it cannot be awaited")
