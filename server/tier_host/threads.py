"""The threads on which a tier works.

A call that hangs in somebody's storage cannot be ended from outside. So these threads are daemons, which the end of the
process does not wait for, and each says what it is doing and since when.
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
    """Calls of one line wait for one another; those of two lines run side by side."""

    STORE = "store"
    """Stores and removals, in the order of the commands: one thread."""
    LOAD = "load"
    CHECK = "check"
    VOTE = "vote"
    """What the event loop would ask of the tier itself, if the tier could be relied on not to block."""


_THREADS = {WorkQueue.STORE: 1, WorkQueue.LOAD: 2, WorkQueue.CHECK: 1, WorkQueue.VOTE: 1}


@dataclass(slots=True, eq=False)
class _Call:
    """Something that a tier is asked to do."""

    line: WorkQueue
    operation: str
    run: Callable[[], object]
    abandoned: Callable[[], object]
    started: float = 0.0


class TierThreads:
    """The threads of one tier. `submit` and `abandon` belong to one thread, the event loop's; the rest may be called on any."""

    def __init__(self, name: str) -> None:
        """Starts no thread: they come as they are needed."""
        self._name = name
        self._queues: dict[WorkQueue, SimpleQueue[_Call | None]] = {line: SimpleQueue() for line in WorkQueue}
        self._threads: dict[WorkQueue, list[threading.Thread]] = {line: [] for line in WorkQueue}
        self._running: set[_Call] = set()
        self._changing = threading.Lock()

    def submit(
        self,
        line: WorkQueue,
        operation: str,
        run: Callable[[], object],
        abandoned: Callable[[], object] = lambda: None,
    ) -> None:
        """Has something done behind what its line has to do already. `run` sees to its own errors.

        `abandoned` is called instead where it is taken back by `abandon`.

        Raises:
            RuntimeError: there is no thread to be had; nothing will be done.
        """
        threads = self._threads[line]
        if len(threads) < _THREADS[line]:
            thread = threading.Thread(
                target=self._work, args=(self._queues[line],), name=f"kvtier-{self._name}-{line.value}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                if not threads:
                    raise
            else:
                threads.append(thread)
        self._queues[line].put(_Call(line, operation, run, abandoned))

    def abandon(self, line: WorkQueue) -> None:
        """Takes back what a line has not begun yet."""
        for call in self._take_all(line):
            call.abandoned()

    def overdue(self, seconds: float) -> dict[WorkQueue, str]:
        """Returns, per line, a call that has been running for so long."""
        since = time.monotonic() - seconds
        with self._changing:
            return {call.line: call.operation for call in self._running if call.started <= since}

    def close(self, seconds: float) -> bool:
        """Begins nothing more, and waits for what runs; returns whether all of it has ended in time."""
        deadline = time.monotonic() + seconds
        for line, threads in self._threads.items():
            if line is not WorkQueue.VOTE:  # these take no time, and there is nothing to make up for them
                self._take_all(line)
            for _ in threads:
                self._queues[line].put(None)
        for threads in self._threads.values():
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for threads in self._threads.values() for thread in threads)

    def _take_all(self, line: WorkQueue) -> list[_Call]:
        queue = self._queues[line]
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
            except BaseException as error:  # noqa: BLE001 - whatever it is, the thread goes on
                _log.error("tier failed", tier=self._name, operation=call.operation, exc_info=error)
            with self._changing:
                self._running.discard(call)
            del call  # and with it the views into the region, while the next may be long in coming
