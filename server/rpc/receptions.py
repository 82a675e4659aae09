"""Limit of the gRPC requests that the server receives at the same time.

gRPC buffers each request until it is complete. It has no limit for the memory of all incomplete
requests, and no time limit. But gRPC receives only the first 64 KiB of a request until its call
asks for the message. So calls wait here before they ask.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import NamedTuple

import grpc

from ...protos.error_reasons import STATUS_OF, error_details

__all__ = ["Receptions"]

_MAX_RECEPTIONS = 32
_MAX_PER_CALLER = 16
"""For each token, and for each address of callers without a token."""
_SHARE = 4
"""A caller with more receptions than this gives way to other calls early."""
_REQUEST_SECONDS = 30.0
"""Maximum time for a request to arrive, as for the socket protocol."""
_PATIENCE_SECONDS = 0.25
"""If another call waits for its place, a reception that has taken longer is ended, if its caller
has more than `_SHARE` of them."""
_LONG_PATIENCE_SECONDS = 8.0
"""The same for other callers. Four requests of 16 MiB take 5.4 s at 100 Mbit/s."""


class _Reception(NamedTuple):
    caller: str
    began_at: float
    timeout: asyncio.Timeout


class Receptions:
    """Receives the requests of gRPC calls. Runs on the event loop."""

    def __init__(self) -> None:
        self._running: dict[object, _Reception] = {}
        """The receptions, the oldest first."""
        self._callers: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[None], str] = {}

    async def receive(self, context: grpc.aio.ServicerContext, caller: str) -> bytes:
        """Returns the request of a call. `caller`: its token or address. Aborts on a time-out.

        gRPC frees the received part of the request when the call is aborted.
        """
        loop = asyncio.get_running_loop()
        while not self._has_room(caller):
            self._end_oldest(caller)
            future = loop.create_future()
            self._waiting[future] = caller
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(future, _PATIENCE_SECONDS)
            finally:
                del self._waiting[future]
        key = object()
        self._callers[caller] += 1
        try:
            async with asyncio.timeout(_REQUEST_SECONDS) as timeout:
                self._running[key] = _Reception(caller, loop.time(), timeout)
                message = await context.read()
        except TimeoutError:
            text = "the request did not arrive in time"
            details = error_details("LIMIT_EXCEEDED", text)
            await context.abort(STATUS_OF["LIMIT_EXCEEDED"], text, details)
        finally:
            del self._running[key]
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
            self._wake()
        if not isinstance(message, bytes):  # `grpc.aio.EOF`: the call has no request
            text = "the call has no request"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text, error_details("INVALID_ARGUMENT", text))
        return bytes(message)

    def _wake(self) -> None:
        # The latest first: a caller that stays within the limits does not wait behind many calls.
        for future, caller in reversed(self._waiting.items()):
            if not future.done() and self._has_room(caller):
                future.set_result(None)
                break

    def _has_room(self, caller: str) -> bool:
        return len(self._running) < _MAX_RECEPTIONS and self._callers[caller] < _MAX_PER_CALLER

    def _end_oldest(self, caller: str) -> None:
        """Ends the oldest reception in the way of a caller, if it has taken long."""
        is_full, now = len(self._running) >= _MAX_RECEPTIONS, asyncio.get_running_loop().time()
        for reception in self._running.values():
            if reception.began_at > now - _PATIENCE_SECONDS:
                return
            patience = _PATIENCE_SECONDS if self._callers[reception.caller] > _SHARE else _LONG_PATIENCE_SECONDS
            if reception.began_at > now - patience:
                continue
            if (is_full or reception.caller == caller) and not reception.timeout.expired():
                reception.timeout.reschedule(now)
                return
