"""Transports of asyncio clients. They never block the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from ...cuda.host.memory import tune_malloc
from ...protos.credentials import Credentials
from ...protos.endpoint import Endpoint, client_endpoint
from ..effects import Call, Connect, Copy, Effect, Operation, Performer, Pull, Push
from ..errors import InvalidRequest, KVTierError, NotConnected, SessionLost, error_from_call
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
from .socket_calls_aio import AsyncSocketCalls
from .socket_connector import GrpcStreams, SocketConnector
from .socket_streams import SocketStreams

__all__ = ["AsyncGrpcTransport", "AsyncServiceTransport", "run_operation"]

T = TypeVar("T")

_MAX_STREAMS = 64
"""Maximum number of concurrent streams; each uses a thread. Further streams wait."""


async def run_operation(performer: Performer, operation: Operation[T]) -> T:
    """Performs the effects of an operation, and returns its result."""
    try:
        effect = next(operation)
        while True:
            try:
                result = await performer.perform(effect)
            except BaseException as error:  # noqa: BLE001 - the operation cleans up and raises it again
                effect = operation.throw(error)
            else:
                effect = operation.send(result)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


class AsyncServiceTransport(ForkGuarded):
    """Performs calls that need no session, over its own gRPC channel.

    Construct it on the event loop that uses it.
    """

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
            self._channel = self._credentials.aio_channel(self._server, options)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._calls = UnaryCalls(self._channel)
        self._closed = False

    def stream(self, method: str, request: Message) -> Any:
        """Starts a call with a stream of responses. The call raises `grpc.aio.AioRpcError`."""
        self._check_process()
        return self._channel.unary_stream(path_of(method), serialize, STREAM_RESPONSES[method].FromString)(request)

    async def perform(self, effect: Effect) -> Any:
        self._check_process()
        try:
            return await self._perform(effect)
        except SessionLost as error:
            raise self._translated(error) from None
        except grpc.RpcError as error:
            raise self._translated(error_from_call(error)) from None
        except grpc.FutureCancelledError:
            raise self._translated(SessionLost("the session has ended")) from None
        except grpc.aio.UsageError:
            raise NotConnected("the client is closed") from None
        except (RuntimeError, ValueError):
            if self._closed:  # raised by an ended thread pool, and by gRPC for a closed channel
                raise NotConnected("the client is closed") from None
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            if self._closed:  # the caller was not cancelled, but a closed channel cancels its calls
                raise NotConnected("the client is closed") from None
            raise

    def _translated(self, error: KVTierError) -> KVTierError:
        """After `close`, replaces `SessionLost` by `NotConnected`, because the caller closed it."""
        return NotConnected("the client is closed") if self._closed and isinstance(error, SessionLost) else error

    async def _perform(self, effect: Effect) -> Any:
        if not isinstance(effect, Call):
            raise TypeError(f"{type(effect).__name__} needs a session")
        return await self._calls[effect.method](effect.request, timeout=effect.timeout)

    async def close(self) -> None:
        if self._is_forked:
            return
        self._closed = True
        await self._channel.close()


class AsyncGrpcTransport(AsyncServiceTransport):
    """Performs effects on a session, over its own gRPC channels. See `effects.Transport`.

    Construct it on the event loop that uses it. A thread keeps the session open, even if the event
    loop is busy.
    """

    def __init__(
        self, endpoint: str | None, identity: ClientIdentity, timeouts: Timeouts, credentials: Credentials | None
    ) -> None:
        super().__init__(endpoint, credentials, CHANNEL_OPTIONS)
        server, credentials = self._server, self._credentials
        try:
            self._session_channel = fork_safe(credentials.channel(server, CHANNEL_OPTIONS))
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        tune_malloc()
        # Not the loop's default executor, because hanging streams would block the application.
        self._stream_threads = ThreadPoolExecutor(_MAX_STREAMS, "kvtier-stream")
        self._sockets = SocketConnector(
            self._session_channel, server, credentials, enabled=identity.transport != "grpc"
        )
        self._connection = SessionConnection(self._session_channel, server, identity, timeouts.call, credentials)
        self._socket_calls: AsyncSocketCalls | None = None

    @property
    def session(self) -> ClientSession | None:
        return None if self._is_forked else self._connection.session

    def invalidate(self, session: ClientSession) -> None:
        self._check_process()
        self._connection.invalidate(session)

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        if not self._is_forked:
            self._connection.withdraw(session, grant_id)

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Connect(timeout, patient):
                return await self._connect(timeout, patient=patient)
            case Call(method, request, timeout):
                return await self._call(method, request, timeout)
            case Push(session):
                return await self._stream(session, lambda streams, on_start: streams.push(effect, on_start))
            case Pull(session):
                await self._stream(session, lambda streams, on_start: streams.pull(effect, on_start))
            case Copy(run):
                await _run_to_end(asyncio.to_thread(run))
        return None

    async def _connect(self, timeout: float, *, patient: bool) -> ClientSession:
        session = self._connection.session
        if session is None:
            session = await asyncio.to_thread(self._connection.wait, timeout, patient=patient)
        if session.region is None:
            self._sockets.search(session)  # starts the search for the socket
        return session

    async def _call(self, method: str, request: Message, timeout: float) -> Any:
        calls = self._current_socket_calls()
        if calls is not None:
            session = self._connection.session
            answer = await calls.call(method, serialize(request), timeout)
            if session is not None:
                session.calls_used(refusal=calls.calls.refusal if answer is None else None)
            if answer is not None:
                return response_of(method, answer)
        return await self._calls[method](request, timeout=timeout)

    async def _stream(
        self, session: ClientSession, move: Callable[[GrpcStreams | SocketStreams, Callable[[Any], object]], Any]
    ) -> Any:
        """Runs a stream on a thread. A cancellation of the caller cancels the stream."""
        calls: list[Any] = []
        cancelled = threading.Event()

        def on_start(call: Any) -> None:
            calls.append(call)
            if cancelled.is_set():
                call.cancel()

        def on_cancel() -> None:
            cancelled.set()
            moved.cancel()  # has an effect only if the stream has not started
            for call in calls:
                call.cancel()

        moved = self._stream_threads.submit(self._sockets.stream, session, lambda streams: move(streams, on_start))
        await _run_to_end(asyncio.wrap_future(moved), on_cancel)
        return moved.result()

    def _current_socket_calls(self) -> AsyncSocketCalls | None:
        """Returns the socket calls of the current session; None if its calls use gRPC."""
        session = self._connection.session
        wanted = session.calls if session is not None else None
        if self._socket_calls is not None and self._socket_calls.calls is not wanted:
            self._socket_calls.close()
            self._socket_calls = None
        if self._socket_calls is None and wanted is not None:
            self._socket_calls = AsyncSocketCalls(wanted)
        return self._socket_calls

    async def close(self) -> None:
        """Ends the session. Takes up to two seconds, even if cancelled."""
        if self._is_forked:
            return
        self._closed = True
        await _run_to_end(self._close())

    async def _close(self) -> None:
        with ThreadPoolExecutor(1, "kvtier-close") as closer:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(closer, self._connection.close)  # also ends the streams
            await loop.run_in_executor(closer, self._sockets.close)
            self._stream_threads.shutdown(wait=False)
        if self._socket_calls is not None:
            self._socket_calls.close()
        self._session_channel.close()
        await self._channel.close()


async def _run_to_end(work: Awaitable[object], on_cancel: Callable[[], object] = lambda: None) -> None:
    """Waits for the end of `work`, even if the caller is cancelled.

    On a cancellation it calls `on_cancel`, which may shorten `work`. It must not return earlier:
    the memory of a copy must stay valid until the copy has ended, and a partial close would leak
    resources.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
        except BaseException:
            if cancelled is None:
                raise
            # `on_cancel` probably caused this error. The caller gets the CancelledError instead.
    if cancelled is None:
        task.result()
        return
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved; otherwise asyncio would log it
    raise cancelled
