"""Frees the memory of gRPC batches that fail or whose call is cancelled.

A batch is a group of operations of one call, such as "receive a message". In `grpc.aio` the
coroutine `execute_batch` starts a batch, waits for it, and then frees its operations. If the batch
fails, or the task that waits is cancelled, the coroutine ends at its `await`: 80 bytes per
operation stay allocated for ever, and the message if one was received. So a client that cancels its
calls would use up the memory of the server: 15 % of the calls that are reset at once left a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from grpc._cython import cygrpc

__all__ = ["free_all_batches"]


def free_all_batches() -> bool:
    """Makes `grpc.aio` free each batch of this process. Returns False if this grpcio differs.

    `grpc.aio` looks up `execute_batch` in its module at each call. May be called repeatedly.
    """
    original = getattr(cygrpc, "execute_batch", None)
    if original is None or original is _execute_batch:
        return original is not None
    _Batch.original = staticmethod(original)
    cygrpc.execute_batch = _execute_batch  # pyright: ignore[reportAttributeAccessIssue]
    return True


async def _execute_batch(call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> None:
    await _Batch(call, operations, loop).ended


class _Batch:
    """A running batch. It resumes the original coroutine when the batch has ended, in any case.

    The original coroutine takes this object for its event loop, and for the future that it awaits.
    """

    __slots__ = ("_coroutine", "_failure", "_loop", "ended")

    original: Any

    def __init__(self, call: Any, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        """Cancelled if the call's task is cancelled."""
        self._failure: BaseException | None = None
        self._coroutine: Coroutine[Any, Any, None] = self.original(call, operations, self)
        self._coroutine.send(None)

    def create_future(self) -> _Batch:
        return self

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        """Called by gRPC in the thread of an event loop, usually of this batch's."""
        if asyncio.get_running_loop() is self._loop:
            callback(*args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)

    def __await__(self) -> Generator[None, None, None]:
        yield

    def cancelled(self) -> bool:
        return False

    def set_exception(self, error: BaseException) -> None:
        """Called by gRPC if the batch has failed."""
        self._failure = error
        self.set_result(None)

    def set_result(self, _: None) -> None:
        """Called by gRPC when the batch has ended."""
        try:
            self._coroutine.send(None)
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - belongs to the call's task
            self._failure = self._failure or error
        failure, self._failure = self._failure, None
        if self.ended.done():
            return
        if failure is not None:
            self.ended.set_exception(failure)
        else:
            self.ended.set_result(None)
