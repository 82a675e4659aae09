"""Transports of synchronous clients: gRPC, raw sockets and copies in shared memory."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from ...cuda.host.memory import tune_malloc
from ...protos.credentials import Credentials
from ...protos.endpoint import Endpoint, client_endpoint
from ..effects import Call, Connect, Copy, Effect, Operation, Performer, Pull, Push
from ..errors import InvalidRequest, NotConnected, SessionLost, error_from_call
from ..session.fork_guard import ForkGuarded, fork_safe
from ..session.reconnect import ClientIdentity, SessionConnection
from ..session.session import ClientSession
from ..timeouts import Timeouts
from .grpc_methods import (
    CHANNEL_OPTIONS,
    SERVICE_OPTIONS,
    STREAM_RESPONSES,
    UnaryCalls,
    path_of,
    response_of,
    serialize,
)
from .socket_connector import GrpcStreams, SocketConnector
from .socket_streams import SocketStreams

__all__ = ["GrpcTransport", "ServiceTransport", "run_operation"]

T = TypeVar("T")

_FAILURES = (SessionLost, grpc.RpcError, grpc.FutureCancelledError, ValueError)
_INTERRUPT_SECONDS = 0.5
"""An interrupt of the main thread takes effect within this time."""


def run_operation(performer: Performer, operation: Operation[T]) -> T:
    """Performs the effects of an operation, and returns its result."""
    try:
        effect = next(operation)
        while True:
            try:
                result = performer.perform(effect)
            except BaseException as error:  # noqa: BLE001 - the operation cleans up and raises it again
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


class ServiceTransport(ForkGuarded):
    """Performs calls that need no session, over its own gRPC channel. Any thread may use it."""

    def __init__(
        self,
        endpoint: Endpoint | str | None,
        credentials: Credentials | None,
        options: Sequence[tuple[str, Any]] = SERVICE_OPTIONS,
    ) -> None:
        """Does not connect yet. Raises `InvalidRequest`."""
        try:
            self._server = endpoint if isinstance(endpoint, Endpoint) else client_endpoint(endpoint)
            self._credentials = credentials or Credentials.from_environment()
            self._channel = fork_safe(self._credentials.channel(self._server, options))
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._calls = UnaryCalls(self._channel)
        self._closed = False

    def start(self, method: str, request: Message, timeout: float) -> grpc.Future:
        """Starts a call. Its `result` raises `grpc.RpcError`; see `error_from_call`."""
        self._check_process()
        return self._calls[method].future(request, timeout=timeout)

    def stream(self, method: str, request: Message) -> Iterator[Any]:
        """Yields the responses of a call, without a time limit. Raises `KVTierError`.

        If the caller closes the iterator, the call is cancelled.
        """
        self._check_process()
        call = self._channel.unary_stream(path_of(method), serialize, STREAM_RESPONSES[method].FromString)(request)
        try:
            yield from call
        except grpc.RpcError as error:
            raise error_from_call(error) from None
        finally:
            call.cancel()

    def perform(self, effect: Effect) -> Any:
        self._check_process()
        if not isinstance(effect, Call):
            raise TypeError(f"{type(effect).__name__} needs a session")
        try:
            return _run_apart(lambda: self._calls[effect.method](effect.request, timeout=effect.timeout))
        except _FAILURES as error:
            if (translated := self._translated(error)) is error:
                raise
            raise translated from None

    def _translated(self, error: Exception) -> Exception:
        """Returns the error for the caller.

        After `close` it is `NotConnected`, because the caller closed the session. gRPC raises
        ValueError for a closed channel.
        """
        if isinstance(error, grpc.RpcError):
            error = error_from_call(error)
        elif isinstance(error, grpc.FutureCancelledError):
            error = SessionLost("the session has ended")
        if self._closed and isinstance(error, SessionLost | ValueError):
            return NotConnected("the client is closed")
        return error

    def close(self) -> None:
        if self._is_forked:
            return
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GrpcTransport(ServiceTransport):
    """Performs effects on a session, over its own gRPC channel. See `effects.Transport`."""

    def __init__(
        self, endpoint: str | None, identity: ClientIdentity, timeouts: Timeouts, credentials: Credentials | None
    ) -> None:
        tune_malloc()
        super().__init__(endpoint, credentials, CHANNEL_OPTIONS)
        channel, server, credentials = self._channel, self._server, self._credentials
        self._sockets = SocketConnector(channel, server, credentials, enabled=identity.transport != "grpc")
        self._connection = SessionConnection(channel, server, identity, timeouts.call, credentials)

    @property
    def session(self) -> ClientSession | None:
        return None if self._is_forked else self._connection.session

    def invalidate(self, session: ClientSession) -> None:
        self._check_process()
        self._connection.invalidate(session)

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        if not self._is_forked:
            self._connection.withdraw(session, grant_id)

    def perform(self, effect: Effect) -> Any:
        if self._is_forked:
            self._check_process()
        try:
            match effect:
                case Call(method, request, timeout):
                    return self._call(method, request, timeout)
                case Connect(timeout, patient):
                    session = self._connection.wait(timeout, patient=patient)
                    if session.region is None:
                        self._sockets.search(session)  # starts the search for the socket
                    return session
                case Copy(run):
                    run()
                case Push(session):
                    return self._stream(session, lambda streams, on_start: streams.push(effect, on_start))
                case Pull(session):
                    self._stream(session, lambda streams, on_start: streams.pull(effect, on_start))
        except _FAILURES as error:
            if (translated := self._translated(error)) is error:
                raise
            raise translated from None
        return None

    def _call(self, method: str, request: Message, timeout: float) -> Any:
        session, deadline = self._connection.latest, time.monotonic() + timeout
        if session is not None and session.calls is not None and not session.ended:
            answer = session.calls.call(method, serialize(request), timeout)
            if answer is None or session.downgrades:
                session.calls_used(refusal=session.calls.refusal if answer is None else None)
            if answer is not None:
                return response_of(method, answer)
        # The attempt to connect to the socket has taken a part of the time.
        left = max(0.0, deadline - time.monotonic())
        return _run_apart(lambda: self._calls[method](request, timeout=left))

    def _stream(
        self, session: ClientSession, move: Callable[[GrpcStreams | SocketStreams, Callable[[Any], object]], Any]
    ) -> Any:
        """Runs a stream. An interrupt cancels it, and is raised when the stream has ended."""
        if self._sockets.found:
            return self._sockets.stream(session, lambda streams: move(streams, lambda _: None))
        calls: list[Any] = []
        interrupted = threading.Event()

        def on_start(call: Any) -> None:
            calls.append(call)
            if interrupted.is_set():
                call.cancel()

        def on_interrupt() -> None:
            interrupted.set()
            for call in calls:
                call.cancel()

        return _run_apart(lambda: self._sockets.stream(session, lambda streams: move(streams, on_start)), on_interrupt)

    def close(self) -> None:
        if self._is_forked:
            return
        self._closed = True
        self._connection.close()
        self._sockets.close()
        self._channel.close()


def _run_apart(work: Callable[[], Any], on_interrupt: Callable[[], object] | None = None) -> Any:
    """Runs work with gRPC on a thread of its own if this is the main thread.

    Signals interrupt the main thread. A KeyboardInterrupt within gRPC can leave a lock of its
    channel locked, so that no call of the client ends any more. With `on_interrupt`, which shortens
    the work, waits for the end of the work.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: list[tuple[Any, BaseException | None]] = []
    done: SimpleQueue[None] = SimpleQueue()
    begun = _thread.allocate_lock()  # the thread works if it gets the lock before the caller

    def run() -> None:
        if not begun.acquire(blocking=False):
            return
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            outcome.append((None, error))
        done.put(None)

    try:
        # Not `threading.Thread`: an interrupt during its start would leave its lock locked.
        _thread.start_new_thread(run, ())
        _wait(done)
    except BaseException:
        # The interrupt can come before the work begins, and after it has ended.
        if not begun.acquire(blocking=False) and on_interrupt is not None and not outcome:
            on_interrupt()
            _wait(done)
        raise
    [(answer, error)] = outcome
    if error is not None:
        raise error
    return answer


def _wait(done: SimpleQueue[None]) -> None:
    """Waits in turns, because Python can miss a signal that arrives right before a wait begins.

    It would handle that signal only after the wait.
    """
    while True:
        try:
            return done.get(timeout=_INTERRUPT_SECONDS)
        except Empty:
            continue
