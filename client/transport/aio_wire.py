"""What performs the effects of the asyncio client, without blocking its loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from ...cuda.host.memory import tune_malloc
from ...protos.credentials import Credentials
from ...protos.endpoint import client_endpoint
from ...protos.v1 import transfer_pb2
from ..effects import Call, Connect, Copy, Effect, Pull, Push
from ..errors import InvalidRequest, KVTierError, NotConnected, SessionLost, error_from_status
from ..session.connection import ClientIdentity, SessionConnection
from ..session.session import Session
from ..timeouts import Timeouts
from .bulk_connector import AnyStreams, BulkConnector
from .grpc_methods import CHANNEL_OPTIONS, PULL, PUSH, RESPONSES, path_of, response_of, serialize
from .socket_calls_aio import AsyncSocketCalls

__all__ = ["AsyncTransport"]

_MOST_STREAMS = 64
"""Streams to the bulk process at a time; more wait for their turn."""


class AsyncTransport:
    """Performs effects over channels of its own, on one event loop; construct it there.

    The session is kept by a thread, so that a loop which is busy for long does not lose it.
    """

    def __init__(
        self, endpoint: str | None, identity: ClientIdentity, timeouts: Timeouts, credentials: Credentials | None
    ) -> None:
        """Does not block. Raises `InvalidRequest` for an endpoint that cannot be parsed, or credentials that do not go with it."""
        credentials = credentials or Credentials.from_environment()
        try:
            server = client_endpoint(endpoint)
            self._session_channel = credentials.channel(server, CHANNEL_OPTIONS)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        tune_malloc()
        # Threads of its own: those of the loop are also for the application, which streams that hang must not keep waiting.
        self._movers = ThreadPoolExecutor(_MOST_STREAMS, "kvtier-stream")
        self._bulk = BulkConnector(self._session_channel, server, credentials, plain=identity.transport != "grpc")
        self._keeper = SessionConnection(self._session_channel, identity, timeouts.call)
        self._channel = credentials.aio_channel(server, CHANNEL_OPTIONS)
        self._closed = False
        self._local: AsyncSocketCalls | None = None
        self._calls = {
            method: self._channel.unary_unary(path_of(method), serialize, response.FromString)
            for method, response in RESPONSES.items()
        }
        self._push = self._channel.stream_unary(PUSH, None, transfer_pb2.PushResponse.FromString)
        self._pull = self._channel.unary_stream(PULL, transfer_pb2.PullRequest.SerializeToString, None)

    @property
    def link(self) -> Session | None:
        """The link, if there is one now."""
        return self._keeper.link

    def lost(self, link: Session) -> None:
        """Takes note that the server does not know the session of this link any more."""
        self._keeper.lost(link)

    async def perform(self, effect: Effect) -> Any:
        """Returns an effect's result. Raises `KVTierError`, and is cancelled as its caller is."""
        try:
            return await self._do(effect)
        except SessionLost as error:
            raise self._said(error) from None
        except grpc.RpcError as error:
            raise self._said(error_from_status(error.code(), error.details(), error.trailing_metadata())) from None
        except grpc.FutureCancelledError:
            raise self._said(SessionLost("the session has ended")) from None
        except grpc.aio.UsageError:
            raise NotConnected("the client is closed") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            # Nobody has cancelled the caller: a channel that is closed cancels its calls, and a link that falls its streams.
            if self._closed:
                raise NotConnected("the client is closed") from None
            if isinstance(effect, Push | Pull) and effect.link.fallen:
                raise SessionLost("the session has ended") from None
            raise

    def _said(self, error: KVTierError) -> KVTierError:
        """Returns what the caller is told: that the session has ended says nothing to whoever has closed the client."""
        return NotConnected("the client is closed") if self._closed and isinstance(error, SessionLost) else error

    async def _do(self, effect: Effect) -> Any:
        match effect:
            case Connect(timeout, patient):
                return await self._connect(timeout, patient=patient)
            case Push(link) if bulk := self._bulk.streams(link):
                return await self._on_thread(bulk, partial(bulk.push, effect))
            case Pull(link) if bulk := self._bulk.streams(link):
                return await self._on_thread(bulk, partial(bulk.pull, effect))
            case Call(method, request, timeout):
                return await self._call(method, request, timeout)
            case Push(link, frames, timeout):
                push = self._push(frames(), timeout=timeout)
                with link.cancelling(self._from_any_thread(push.cancel)):
                    return await push
            case Pull(link, request, take, timeout):
                pull = self._pull(request, timeout=timeout)
                with link.cancelling(self._from_any_thread(pull.cancel)):
                    # A cancellation that breaks into gRPC's own waiting leaves, one time in a hundred, a call, and the
                    # message that it was about to get, until its deadline. So the stream is cancelled, and ends by itself.
                    await _to_its_end(_taken(pull, take), pull.cancel)
            case Copy(run):
                await _to_its_end(asyncio.to_thread(run))
        return None

    async def _connect(self, timeout: float, *, patient: bool) -> Session:
        link = self._keeper.link
        if link is None:
            link = await asyncio.to_thread(self._keeper.wait, timeout, patient=patient)
        self._bulk.streams(link)  # looked for now, it is there when it is needed
        return link

    async def _call(self, method: str, request: Message, timeout: float) -> Any:
        local = self._local_calls()
        if local is not None:
            answer = await local.call(method, serialize(request), timeout)
            if answer is not None:
                return response_of(method, answer)
        return await self._calls[method](request, timeout=timeout)

    async def _on_thread(self, bulk: AnyStreams, move: Callable[[Callable[[Any], object]], Any]) -> Any:
        """Has a stream of the bulk process moved by a thread: what copies bytes holds up no loop."""
        calls: list[Any] = []
        cancelled = threading.Event()

        def begun(call: Any) -> None:
            calls.append(call)
            if cancelled.is_set():
                call.cancel()

        def run() -> Any:
            with self._bulk.watching(bulk):
                return move(begun)

        def hurry() -> None:
            cancelled.set()
            moved.cancel()  # if it has not begun
            for call in calls:
                call.cancel()

        moved = self._movers.submit(run)
        await _to_its_end(asyncio.wrap_future(moved), hurry)
        return moved.result()

    def _local_calls(self) -> AsyncSocketCalls | None:
        """Returns what this session's calls go over, if that is not gRPC."""
        link = self._keeper.link
        wanted = link.calls if link is not None else None
        if self._local is not None and self._local.calls is not wanted:
            self._local.close()
            self._local = None
        if self._local is None and wanted is not None:
            self._local = AsyncSocketCalls(wanted)
        return self._local

    def _from_any_thread(self, cancel: Callable[[], object]) -> Callable[[], object]:
        loop = asyncio.get_running_loop()

        def call() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: so is the call
                loop.call_soon_threadsafe(cancel)

        return call

    async def close(self) -> None:
        """Ends the session. Runs to its end even if cancelled, a second or two at the most."""
        self._closed = True
        await _to_its_end(self._close())

    async def _close(self) -> None:
        with ThreadPoolExecutor(1, "kvtier-close") as closer:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(closer, self._keeper.close)  # its link falls, and ends all streams
            await loop.run_in_executor(closer, self._bulk.close)
            self._movers.shutdown(wait=False)
        if self._local is not None:
            self._local.close()
        self._session_channel.close()
        await self._channel.close()


async def _taken(pull: Any, take: Callable[[bytes], None]) -> None:
    async for message in pull:
        take(message)


async def _to_its_end(work: Awaitable[object], hurry: Callable[[], object] = lambda: None) -> None:
    """Waits even if cancelled: memory that work copies from or to must stay where it is; half a close leaks the rest.

    `hurry` is called when that happens.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
            hurry()
        except BaseException:
            if cancelled is None:
                raise
            # It has ended because it was hurried: whoever was cancelled hears of that, and of nothing else.
    if cancelled is None:
        task.result()
        return
    if not task.cancelled():
        task.exception()  # or it would be reported as one that nobody has looked at
    raise cancelled
