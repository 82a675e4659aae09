"""Worker threads of one tier.

A call that hangs in a storage library cannot be stopped. Therefore the threads are daemon threads,
which do not block the exit of the process. To detect hanging calls, each running call is recorded
with its start time.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ..telemetry.logs import get_logger

__all__ = ["TierThreads", "WorkQueue"]

_log = get_logger(__name__)


class WorkQueue(enum.Enum):
    """Queue of calls. Its calls start in order; calls of different queues run in parallel."""

    STORE = "store"
    """Stores and removals, in submission order. A tier that is not shared has one thread for them,
    so each ends before the next one starts."""
    LOAD = "load"
    LOOKUP = "lookup"
    """Queries to a shared tier. They do not wait for loads."""
    CHECK = "check"
    VOTE = "vote"
    """Votes of third-party tiers. They run on a thread because they may block."""


@dataclass(slots=True, eq=False)
class _Call:
    kind: WorkQueue
    operation: str
    run: Callable[[], object]
    abandoned: Callable[[], object]
    started: float = 0.0


class TierThreads:
    """Queues of one tier's calls, and the threads that run them.

    Only the event loop calls `submit` and `abandon`. The other methods are thread-safe.
    """

    def __init__(self, name: str, *, stores: int = 1, loads: int = 2) -> None:
        """`stores` and `loads` are the numbers of threads of these queues; others have one thread.

        Starts no thread; `submit` starts threads when they are needed.
        """
        self._name = name
        self._sizes = {WorkQueue.STORE: stores, WorkQueue.LOAD: loads}
        self._queues: dict[WorkQueue, SimpleQueue[_Call | None]] = {kind: SimpleQueue() for kind in WorkQueue}
        self._threads: dict[WorkQueue, list[threading.Thread]] = {kind: [] for kind in WorkQueue}
        self._running: set[_Call] = set()
        self._changing = threading.Lock()

    def submit(
        self,
        kind: WorkQueue,
        operation: str,
        run: Callable[[], object],
        abandoned: Callable[[], object] = lambda: None,
    ) -> None:
        """Queues `run`, which must not raise. If `abandon` removes it, `abandoned` runs instead.

        Raises RuntimeError if no thread is available; then the call is not queued.
        """
        threads = self._threads[kind]
        if len(threads) < self._sizes.get(kind, 1):
            thread = threading.Thread(
                target=self._work, args=(self._queues[kind],), name=f"kvtier-{self._name}-{kind.value}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                if not threads:
                    raise
            else:
                threads.append(thread)
        self._queues[kind].put(_Call(kind, operation, run, abandoned))

    def abandon(self, kind: WorkQueue) -> None:
        for call in self._take_all(kind):
            call.abandoned()

    def overdue(self, seconds: float) -> dict[WorkQueue, str]:
        """Returns, per queue, a call that has been running for `seconds`."""
        since = time.monotonic() - seconds
        with self._changing:
            return {call.kind: call.operation for call in self._running if call.started <= since}

    def close(self, seconds: float) -> bool:
        """Drops waiting calls except votes, and waits, at most `seconds`, for running calls.

        Returns whether all threads have ended. Dropped calls report nothing: neither `run` nor
        `abandoned` runs.
        """
        deadline = time.monotonic() + seconds
        for kind, threads in self._threads.items():
            if kind is not WorkQueue.VOTE:  # a dropped vote would leave its future without result
                self._take_all(kind)
            for _ in threads:
                self._queues[kind].put(None)
        for threads in self._threads.values():
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for threads in self._threads.values() for thread in threads)

    def _take_all(self, kind: WorkQueue) -> list[_Call]:
        queue = self._queues[kind]
        calls: list[_Call] = []
        while True:
            try:
                call = queue.get_nowait()
            except Empty:
                return calls
            if call is not None:
                calls.append(call)

    def _work(self, queue: SimpleQueue[_Call | None]) -> None:
        while (call := queue.get()) is not None:
            call.started = time.monotonic()
            with self._changing:
                self._running.add(call)
            try:
                call.run()
            except BaseException as error:  # noqa: BLE001 - the thread must not end
                _log.error("tier failed", tier=self._name, operation=call.operation, exc_info=error)
            with self._changing:
                self._running.discard(call)
            del call  # releases the views of the region before the wait for the next call
