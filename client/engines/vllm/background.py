"""Daemon threads that run the adapter's calls, so that none of them runs on an engine's thread."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .compat import init_logger

__all__ = ["BackgroundThreads", "LimitedLog", "leave_compute_cores"]

logger = init_logger("vllm." + __name__)


class LimitedLog:
    """Warnings of a kind at most once per ``interval_s``, with the number of those held back. Any thread."""

    def __init__(self, interval_s: float = 30.0) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warn(self, kind: str, text: str, *, exc_info: bool = False, interval_s: float | None = None) -> None:
        """Log ``text`` unless a warning of ``kind`` was logged less than ``interval_s`` ago."""
        now = time.monotonic()
        interval_s = self._interval_s if interval_s is None else interval_s
        with self._lock:
            last = self._last.get(kind)
            if last is not None and now - last < interval_s:
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._last[kind] = now
            held_back = self._held_back.pop(kind, 0)
        suffix = f" ({held_back} more like this were not logged)" if held_back else ""
        logger.warning("kvtier: %s%s", text, suffix, exc_info=exc_info)


class BackgroundThreads:
    """A queue of jobs and the daemon threads that run them in order.

    Daemon threads, not an executor: a job that waits for a hung server must not hold up the engine's exit.
    """

    def __init__(
        self, name: str, log: LimitedLog, threads: int = 1, on_start: Callable[[], None] | None = None
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
        """Queue ``job``; never blocks. What it raises is logged and goes no further."""
        self._jobs.put(job)

    def close(self, timeout_s: float = 2.0) -> None:
        """Let the queued jobs end, for at most ``timeout_s`` in all."""
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
            except Exception as error:  # noqa: BLE001 - a thread that dies would leave the engine waiting
                self._log.warn("background", f"a background job failed: {error!r}", exc_info=True)


def leave_compute_cores() -> None:
    """A CPU engine pins its main thread to a compute core, and threads started from it inherit that: let this one run anywhere."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
