"""Background threads, which make all remote calls, and rate-limited warnings."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ... import InvalidRequest, LimitExceeded
from ..failures import RateLimitedWarnings
from .compat import init_logger

__all__ = ["BackgroundThreads", "Circuit", "RateLimitedLog", "leave_compute_cores"]

logger = init_logger("vllm." + __name__)

_CIRCUIT_OPEN_S = 2.0


class RateLimitedLog(RateLimitedWarnings):
    """Warnings at a limited rate in the log of vLLM."""

    def __init__(self, interval_s: float = 30.0) -> None:
        super().__init__(logger, interval_s)


class Circuit:
    """Pauses calls to a server that has just failed. Thread-safe."""

    def __init__(self) -> None:
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._open_until

    def open(self, error: Exception | None = None) -> None:
        """Pauses calls for 2 seconds, unless `error` concerns a single request."""
        if not isinstance(error, (InvalidRequest, LimitExceeded)):
            self._open_until = time.monotonic() + _CIRCUIT_OPEN_S


class BackgroundThreads:
    """FIFO job queue with daemon threads.

    At the exit of the engine, Python waits for the jobs of an executor, so a job that waits for a
    hung server would delay the exit. Python does not wait for daemon threads.
    """

    def __init__(
        self, name: str, log: RateLimitedLog, threads: int = 1, on_start: Callable[[], None] | None = None
    ) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._log = log
        self._on_start = on_start
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtier-{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues `job` without blocking. An exception of the job is logged."""
        self._jobs.put(job)

    def close(self, timeout_s: float = 2.0) -> None:
        """Waits at most `timeout_s` seconds for all queued jobs. Later jobs are not run."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - if the thread died, the engine would wait for ever
                self._log.warn("background", f"a background job failed: {error!r}", exc_info=True)


def leave_compute_cores() -> None:
    """Undoes the pinning to one core that new threads inherit from a CPU engine's main thread."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
