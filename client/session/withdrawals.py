"""Withdrawals: ends, in the background, what the server granted to calls without a known answer.

A call that is interrupted or times out may have been granted a lease or a store. The client chose
the id of this grant, so it can end the grant without the answer. The caller does not wait for it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import grpc

from ...protos.error_reasons import reason_of
from ...protos.v1 import cache_pb2
from .session import ClientSession

__all__ = ["Withdrawals"]

_METHOD = "/kvtier.v1.CacheService/WithdrawGrants"
_CALL_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_MAX_IDS = 256
"""Maximum number of ids in one call."""


class Withdrawals:
    """Queue of grants to end, and the thread that calls the server. Any thread may use it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._call = channel.unary_unary(
            _METHOD,
            cache_pb2.WithdrawGrantsRequest.SerializeToString,
            cache_pb2.WithdrawGrantsResponse.FromString,
        )
        self._lock = threading.Lock()
        self._queue: deque[tuple[ClientSession, int]] = deque()
        self._thread: threading.Thread | None = None
        self._running: Any = None
        self._closing = threading.Event()

    def add(self, session: ClientSession, grant_id: int) -> None:
        """Queues a grant and returns at once. Raises RuntimeError if no thread can be started."""
        with self._lock:
            self._queue.append((session, grant_id))
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="kvtier-withdrawals", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Ends the thread. The end of the session ends its grants."""
        with self._lock:
            self._closing.set()
            running, thread = self._running, self._thread
        if running is not None:
            running.cancel()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._drop_ended()
                if not self._queue or self._closing.is_set():
                    self._thread = None
                    return
                session = self._queue[0][0]
                batch = [grant_id for other, grant_id in self._queue if other is session][:_MAX_IDS]
            request = cache_pb2.WithdrawGrantsRequest(session=session.ref, grant_ids=batch)
            # Not while holding the lock: `add` must not wait for gRPC.
            self._running = call = self._call.future(request, timeout=_CALL_SECONDS)
            if self._closing.is_set():  # `close` ran before this call existed
                call.cancel()
            if not self._has_ended(call):
                self._closing.wait(_RETRY_SECONDS)
                continue
            with self._lock:
                done = {(session, grant_id) for grant_id in batch}
                self._queue = deque(each for each in self._queue if each not in done)

    def _drop_ended(self) -> None:
        self._queue = deque(each for each in self._queue if not each[0].ended)

    @staticmethod
    def _has_ended(call: Any) -> bool:
        """Returns whether the server has answered. Not if the answer is that it is too busy."""
        try:
            call.result()
        except grpc.RpcError as error:
            reason = reason_of(error.trailing_metadata()) if isinstance(error, grpc.Call) else None
            return (
                reason not in (None, "RATE_LIMITED", "LIMIT_EXCEEDED") or error.code() is grpc.StatusCode.UNIMPLEMENTED
            )
        except grpc.FutureCancelledError:
            return False
        return True
