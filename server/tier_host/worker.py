"""What one tier is asked to do: on its threads, with the result brought back to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...tiers.base import BlockBytes, Outcome, SecondaryTier, TierError
from ...tiers.core.secondary import Name
from ..telemetry.logs import get_logger
from ..telemetry.metrics import JobObserver
from .guard import CheckedTier, describe_error
from .threads import TierThreads, WorkQueue

__all__ = ["TierWorker", "close_all"]


_log = get_logger(__name__)


_CALLS_SECONDS = 3.0
"""For what still runs at the end; the drain has waited for jobs before."""


_CLOSE_SECONDS = 15.0


Finished = Callable[[Sequence[Outcome]], None]


T = TypeVar("T")


def _ignore_job(tier: str, operation: str, seconds: float, nbytes: int, outcomes: Sequence[Outcome], /) -> None:
    """Stands in until somebody observes jobs."""


class TierWorker:
    """Keeps one tier at work. Belongs to the event loop, but for `close`."""

    def __init__(self, tier: SecondaryTier) -> None:
        self._threads = TierThreads(tier.name)
        self.tier = CheckedTier(tier, self._threads)
        self.observe_job: JobObserver = _ignore_job
        self.jobs = 0
        """Stores and loads that were begun and have not been taken note of; who hears of their end counts them down."""
        self.left_behind = ""
        """What the tier was doing when `close` stopped waiting for it."""
        self.stalled = False
        """Whether the tier is known not to come back from a job."""

    def store(self, blocks: Sequence[BlockBytes], finished: Finished) -> None:
        """Writes blocks; `finished` hears what became of them, once and on the thread that did it."""
        self._begin(WorkQueue.STORE, self.tier.store, blocks, finished)

    def load(self, blocks: Sequence[BlockBytes], finished: Finished) -> None:
        """Fills blocks, likewise."""
        self._begin(WorkQueue.LOAD, self.tier.load, blocks, finished)

    def look_up(self, keys: Sequence[Name], answered: Callable[[Sequence[bool]], None]) -> None:
        """Asks for blocks; `answered` hears on that thread, once, which of them are there: none where that went wrong."""

        def run() -> None:
            there: Sequence[bool] = []
            try:
                there = self.tier.lookup(keys)
            except BaseException as error:  # noqa: BLE001 - as in `_begin`
                self._note_failure("lookup", error)
            finally:
                answered(there)

        try:
            self._threads.submit(WorkQueue.LOAD, "lookup", run, lambda: answered([]))
        except RuntimeError as error:  # no thread to be had
            self._note_failure("lookup", error)
            answered([])

    def remove(self, keys: Sequence[Name]) -> None:
        """Has the tier forget blocks, before any store that is asked for later.

        What goes wrong here is logged, and no more: what was not removed is removed when the tier is opened again.
        """
        with contextlib.suppress(RuntimeError):
            self._threads.submit(WorkQueue.STORE, "remove", lambda: self.tier.remove(keys))

    def check(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Has the tier look at itself, beside its jobs; returns what comes of it.

        That goes on to its end also where nobody waits for it any more, and `close` waits for it. The future must not be
        cancelled: shield it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result = error = None
            try:
                result = work()
            except BaseException as failure:  # noqa: BLE001 - whoever waits is told
                # A future takes no StopIteration, and what is no Exception would end who waits for it.
                proper = isinstance(failure, Exception) and not isinstance(failure, StopIteration)
                error = failure if proper else TierError(describe_error(failure))
            with contextlib.suppress(RuntimeError):  # as in `_begin`
                loop.call_soon_threadsafe(settle, result, error)

        self._threads.submit(WorkQueue.CHECK, "check", run)
        return future

    def watch(self, seconds: float) -> bool:
        """Looks whether calls have been running for so long, and says so of the tier; returns whether it moves no blocks then.

        Loads that have not begun fail: whoever waits for them had better compute.
        """
        overdue = self._threads.overdue(seconds)
        calls = ", ".join(sorted(overdue.values()))
        self.tier.note("stalled", f"{calls}: no end for more than {seconds:g} s" if calls else None)
        self.stalled = WorkQueue.STORE in overdue or WorkQueue.LOAD in overdue
        if self.stalled:
            self._threads.abandon(WorkQueue.LOAD)
        return self.stalled

    def close(self) -> bool:
        """Waits for what runs and closes the tier; returns whether that came to an end in time. Called once, on any thread.

        A tier that is still at work is not closed: it may be in the middle of anything. That is for it as if the
        process had been killed.
        """
        ended = self._threads.close(_CALLS_SECONDS)
        if ended:
            closer = threading.Thread(target=self._close_tier, name=f"kvtier-{self.tier.name}-close", daemon=True)
            closer.start()
            closer.join(_CLOSE_SECONDS)
            ended = not closer.is_alive()
        if not ended:
            running = self._threads.overdue(0)
            self.left_behind = ", ".join(sorted(running.values())) or "close"
            _log.error(
                "tier is left behind: it does not come to an end", tier=self.tier.name, operation=self.left_behind
            )
        return ended

    def _note_failure(self, operation: str, error: BaseException) -> None:
        """Says it of the tier. Without a traceback: one that shows variables would look at what nobody has looked at yet."""
        self.tier.note(operation, f"{operation} failed: {describe_error(error)}")

    def _close_tier(self) -> None:
        try:
            self.tier.close()
        except BaseException as error:  # noqa: BLE001 - the others are closed all the same
            _log.error("tier failed", tier=self.tier.name, operation="close", exc_info=error)

    def _begin(
        self,
        line: WorkQueue,
        move: Callable[[Sequence[BlockBytes]], list[Outcome]],
        blocks: Sequence[BlockBytes],
        finished: Finished,
    ) -> None:
        self.jobs += 1

        def fail() -> None:
            finished([Outcome.FAILED] * len(blocks))

        def run() -> None:
            outcomes: Sequence[Outcome] = [Outcome.FAILED] * len(blocks)
            try:
                outcomes = self._run(line.value, move, blocks)
            except BaseException as error:  # noqa: BLE001 - a job without an end would keep its blocks pinned for good
                self._note_failure(line.value, error)
            finally:
                finished(outcomes)

        try:
            self._threads.submit(line, line.value, run, fail)
        except RuntimeError as error:  # no thread to be had
            self._note_failure(line.value, error)
            fail()

    def _run(
        self, operation: str, move: Callable[[Sequence[BlockBytes]], list[Outcome]], blocks: Sequence[BlockBytes]
    ) -> Sequence[Outcome]:
        """Runs on a worker thread."""
        nbytes = sum(block.nbytes for block in blocks)  # a tier may release the views that it is given
        started = time.monotonic()
        outcomes = move(blocks)
        try:
            self.observe_job(self.tier.name, operation, time.monotonic() - started, nbytes, outcomes)
        except Exception as error:  # noqa: BLE001 - a figure less, not a job that never ends
            _log.error("job not observed", exc_info=error)
        return outcomes


def close_all(workers: Sequence[TierWorker]) -> None:
    """Closes all tiers side by side, in bounded time; each says of itself whether it was left behind."""
    closers = [threading.Thread(target=worker.close, daemon=True) for worker in workers]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
