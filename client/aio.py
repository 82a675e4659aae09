"""The asyncio client: the same operations, performed without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from ..cuda.copy import HostBuffer
from ..cuda.malloc import tune_malloc
from ..protos.credentials import Credentials
from ..protos.endpoint import client_endpoint
from ..protos.v1 import admin_pb2, transfer_pb2
from .bulk import AnyStreams, BulkRoute
from .device_calls import AsyncDeviceCalls
from .effects import Call, Connect, Copy, Effect, Operation, Pull, Push
from .errors import InvalidRequest, KVTierError, NotConnected, SessionLost, error_from_status
from .keeper import Identity, Keeper, Transport
from .link import Link
from .local_calls_aio import AsyncLocalCalls
from .namespace import Namespace
from .operations import Operations
from .results import (
    HandoffDirection,
    HoldName,
    LookupResult,
    Publication,
    ReadBatch,
    RequestOutcome,
    TierFilter,
    WriteBatch,
)
from .timeouts import Timeouts
from .wire import CHANNEL_OPTIONS, PULL, PUSH, RESPONSES, path_of, response_of, serialize

__all__ = ["AsyncClient", "AsyncLease"]

T = TypeVar("T")

_MOST_STREAMS = 64
"""Streams to the bulk process at a time; more wait for their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLease(LookupResult):
    """What a lookup found; an asynchronous context manager that releases it at its end."""

    client: AsyncClient

    async def release(self) -> None:
        """Gives the lease back; never raises: what cannot be released now falls by itself."""
        if self.id:
            with contextlib.suppress(KVTierError):
                await self.client.release(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncClient(AsyncDeviceCalls):
    """A client for one event loop; construct it there. Each method is that of `Client`, awaited.

    The session is kept by a thread, so that a loop which is busy for long does not lose it.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        namespace: Namespace,
        name: str = "python-asyncio",
        engine_id: str | None = None,
        rank: int | None = None,
        transport: Transport = "auto",
        timeouts: Timeouts | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """See `Client`."""
        credentials = credentials or Credentials.from_environment()
        try:
            server = client_endpoint(endpoint)
            self._session_channel = credentials.channel(server, CHANNEL_OPTIONS)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self.namespace = namespace
        self.engine_id = engine_id or uuid.uuid4().hex
        self.timeouts = timeouts or Timeouts()
        tune_malloc()
        # Threads of its own: those of the loop are also for the application, which streams that hang must not keep waiting.
        self._movers = ThreadPoolExecutor(_MOST_STREAMS, "kvtier-stream")
        self._bulk = BulkRoute(self._session_channel, server, credentials, plain=transport != "grpc")
        identity = Identity(namespace, name, self.engine_id, rank, transport)
        self._keeper = Keeper(self._session_channel, identity, self.timeouts.call)
        self._operations = Operations(namespace, self.timeouts, self._keeper.lost)
        self._channel = credentials.aio_channel(server, CHANNEL_OPTIONS)
        self._closed = False
        self._local: AsyncLocalCalls | None = None
        self._calls = {
            method: self._channel.unary_unary(path_of(method), serialize, response.FromString)
            for method, response in RESPONSES.items()
        }
        self._push = self._channel.stream_unary(PUSH, None, transfer_pb2.PushResponse.FromString)
        self._pull = self._channel.unary_stream(PULL, transfer_pb2.PullRequest.SerializeToString, None)

    @property
    def connected(self) -> bool:
        """Whether there is a session now."""
        return self._keeper.link is not None

    @property
    def epoch(self) -> int | None:
        """Which life of which server answers, a random number; None while there is no session."""
        link = self._keeper.link
        return link.ref.epoch if link is not None else None

    @property
    def transport(self) -> str | None:
        """How bytes move now: "shm", "tcp" over plain sockets, or "grpc"; None while there is no session."""
        link = self._keeper.link
        return link.transport if link is not None else None

    async def wait_until_connected(self, timeout: float | None = None) -> None:
        """See `Client.wait_until_connected`."""
        await self._perform(Connect(self.timeouts.connect if timeout is None else timeout, patient=True))

    async def begin_request(
        self,
        request_id: str,
        keys: Sequence[bytes] = (),
        *,
        prompt_tokens: int = 0,
        priority: int = 0,
        kv_transfer_params: Mapping[str, Any] | None = None,
        wait: float = 0.0,
        prefix: bool = True,
        lease: float | None = None,
        exclude: TierFilter | None = None,
        min_hits: int = 0,
        retain_for: float | None = None,
    ) -> AsyncLease:
        """See `Client.begin_request`."""
        return await self._lease(
            self._operations.begin_request(
                request_id,
                keys,
                prompt_tokens=prompt_tokens,
                priority=priority,
                kv_transfer_params=kv_transfer_params,
                wait=wait,
                prefix=prefix,
                lease=lease,
                exclude=exclude,
                min_hits=min_hits,
                retain_for=retain_for,
            )
        )

    async def lookup(
        self,
        keys: Sequence[bytes],
        *,
        request_id: str = "",
        wait: float = 0.0,
        prefix: bool = True,
        lease: float | None = None,
        exclude: TierFilter | None = None,
        min_hits: int = 0,
        retain_for: float | None = None,
    ) -> AsyncLease:
        """See `Client.lookup`."""
        return await self._lease(
            self._operations.lookup(
                keys,
                request_id=request_id,
                wait=wait,
                prefix=prefix,
                lease=lease,
                exclude=exclude,
                min_hits=min_hits,
                retain_for=retain_for,
            )
        )

    @contextlib.asynccontextmanager
    async def read(self, lease: LookupResult | int, items: Sequence[int]) -> AsyncIterator[ReadBatch]:
        """See `Client.read`."""
        with ExitStack() as held:
            reading = await self._run(self._operations.begin_read(held, lease, items))
            yield reading.batch
            await self._run(self._operations.end_read(reading))

    async def load(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str = "", wait: float = 0.0
    ) -> int:
        """See `Client.load`."""
        with ExitStack() as held:
            return await self._run(self._operations.load(held, keys, buffers, request_id=request_id, wait=wait))

    @contextlib.asynccontextmanager
    async def write(
        self, keys: Sequence[bytes], *, request_id: str = "", retain_for: float | None = None
    ) -> AsyncIterator[WriteBatch]:
        """See `Client.write`."""
        with ExitStack() as held:
            writing = await self._run(
                self._operations.begin_write(held, keys, request_id=request_id, retain_for=retain_for)
            )
            try:
                yield writing.batch
            except BaseException:
                with contextlib.suppress(KVTierError):
                    await self._run(self._operations.end_write(writing, abort=True))
                raise
            await self._run(self._operations.end_write(writing))

    async def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[HostBuffer],
        *,
        request_id: str = "",
        retain_for: float | None = None,
    ) -> bytes:
        """See `Client.store`."""
        with ExitStack() as held:
            return await self._run(
                self._operations.store(held, keys, buffers, request_id=request_id, retain_for=retain_for)
            )

    async def flush(self, keys: Sequence[bytes], *, wait: float = 10.0) -> bytes:
        """See `Client.flush`."""
        return await self._run(self._operations.flush(keys, wait=wait))

    async def touch(self, *lease_ids: int, lease: float | None = None) -> list[int]:
        """See `Client.touch`."""
        return await self._run(self._operations.touch(lease_ids, lease=lease))

    async def release(self, *lease_ids: int) -> None:
        """See `Client.release`."""
        await self._run(self._operations.release(lease_ids))

    async def publish(
        self,
        request_id: str,
        keys: Sequence[bytes],
        positions: Sequence[int],
        *,
        num_tokens: int,
        direction: HandoffDirection = HandoffDirection.PREFILL_TO_DECODE,
        hold_for: float | None = None,
    ) -> Publication:
        """See `Client.publish`."""
        return await self._run(
            self._operations.publish(
                request_id, keys, positions, num_tokens=num_tokens, direction=direction, hold_for=hold_for
            )
        )

    async def claim(
        self,
        hold: HoldName,
        *,
        request_id: str = "",
        first_positions: Sequence[int] = (),
        wait: float = 0.0,
        lease: float | None = None,
    ) -> AsyncLease:
        """See `Client.claim`."""
        return await self._lease(
            self._operations.claim(hold, request_id=request_id, first_positions=first_positions, wait=wait, lease=lease)
        )

    async def renew_holds(self, *holds: HoldName, extension: float | None = None) -> list[HoldName]:
        """See `Client.renew_holds`."""
        return await self._run(self._operations.renew_holds(holds, extension=extension))

    async def release_holds(self, *holds: HoldName) -> None:
        """See `Client.release_holds`."""
        await self._run(self._operations.release_holds(holds))

    async def finish_request(self, request_id: str, *, wait: float = 0.0) -> RequestOutcome:
        """See `Client.finish_request`."""
        return await self._run(self._operations.finish_request(request_id, wait=wait))

    async def reset(self, *, wait: float = 0.0) -> int:
        """See `Client.reset`."""
        return await self._run(self._operations.reset(wait=wait))

    async def status(self) -> admin_pb2.GetStatusResponse:
        """See `Client.status`."""
        return await self._run(self._operations.status())

    async def close(self) -> None:
        """Ends the session; what it has pinned falls. Runs to its end even if cancelled, a second or two at the most."""
        self._closed = True
        await _to_its_end(self._close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
        self._operations.close()

    async def _lease(self, operation: Operation[LookupResult]) -> AsyncLease:
        found = await self._run(operation)
        return AsyncLease(client=self, **{field.name: getattr(found, field.name) for field in fields(found)})

    async def _run(self, operation: Operation[T]) -> T:
        try:
            effect = next(operation)
            while True:
                try:
                    result = await self._perform(effect)
                except BaseException as error:  # noqa: BLE001 - the operation tidies up, and raises it again
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as done:
            answer: T = done.value
            return answer

    async def _perform(self, effect: Effect) -> Any:
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

    async def _connect(self, timeout: float, *, patient: bool) -> Link:
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

    def _local_calls(self) -> AsyncLocalCalls | None:
        """Returns what this session's calls go over, if that is not gRPC."""
        link = self._keeper.link
        wanted = link.calls if link is not None else None
        if self._local is not None and self._local.calls is not wanted:
            self._local.close()
            self._local = None
        if self._local is None and wanted is not None:
            self._local = AsyncLocalCalls(wanted)
        return self._local

    def _from_any_thread(self, cancel: Callable[[], object]) -> Callable[[], object]:
        loop = asyncio.get_running_loop()

        def call() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: so is the call
                loop.call_soon_threadsafe(cancel)

        return call


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
