"""Runs the jobs of one tier on its threads and reports the results."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...tiers.core.presence_cache import Name
from ...tiers.secondary_tier import BlockBytes, Outcome, SecondaryTier, TierError
from ...tiers.types import tenant_of
from ..telemetry.logs import get_logger
from ..telemetry.metrics import JobObserver
from .guard import CheckedTier, describe_error
from .threads import TierThreads, WorkQueue

__all__ = ["TierWorker", "close_all"]

_log = get_logger(__name__)

_CALLS_SECONDS = 3.0
"""Maximum time that `close` waits for running calls. The drain has already waited for jobs."""
_CLOSE_SECONDS = 15.0
_QUERY_SECONDS = 1.0
"""Maximum time that a query waits for the lookup thread. Then engines recompute the blocks."""
_MERGED_NAMES = 4096
"""Waiting queries are merged into one call of the tier until the call has this number of names."""
_MAX_QUERIES = 4096
"""Maximum number of waiting queries, of at most 512 names each. A tenant gets at most as many as
are then free."""

Answered = Callable[[Sequence[bool]], None]
Finished = Callable[[Sequence[Outcome]], None]
ReadBlocks = Callable[[], Sequence[BlockBytes]]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Query:
    keys: Sequence[Name]
    answered: Answered
    until: float


class _QueryQueue:
    """Waiting queries of all tenants, which take turns. Thread-safe."""

    def __init__(self) -> None:
        self._of_tenant: dict[bytes, deque[_Query]] = {}
        """Queries by the tag of the tenant, oldest first; the next tenant comes first."""
        self._count = 0
        self._lock = threading.Lock()

    def put(self, query: _Query) -> bool:
        """Adds a query. Returns False if its tenant has as many as there are free places."""
        tenant = tenant_of(query.keys[0][0])
        with self._lock:
            own = self._of_tenant.get(tenant, ())
            if len(own) >= _MAX_QUERIES - self._count:
                return False
            self._of_tenant.setdefault(tenant, deque()).append(query)
            self._count += 1
            return True

    def take(self) -> _Query | None:
        """Removes the oldest query of the next tenant; None if no query waits."""
        with self._lock:
            tenant = next(iter(self._of_tenant), None)
            if tenant is None:
                return None
            own = self._of_tenant.pop(tenant)
            query = own.popleft()
            if own:
                self._of_tenant[tenant] = own
            self._count -= 1
            return query


class TierWorker:
    """Runs the calls of one tier on its threads. Only `close` may run outside the event loop."""

    def __init__(self, tier: SecondaryTier) -> None:
        self._threads = TierThreads(tier.name, stores=tier.parallel_stores, loads=tier.parallel_loads)
        self.tier = CheckedTier(tier, self._threads)
        self.observe_job: JobObserver = lambda *_: None
        self.jobs = 0
        """Number of stores and loads whose end the runtime has not processed yet. The runtime
        decrements this number."""
        self.left_behind = ""
        """Calls that were still running when `close` stopped waiting."""
        self.stalled = False
        """Whether `watch` has found a store or load that takes too long."""
        self.free_disk_bytes: int | None = None
        """Free bytes of the tier's disk at the last measurement; None if unknown."""
        self._measuring = False
        self._queries = _QueryQueue()
        """Queries that wait for the lookup thread."""

    def store(self, blocks: ReadBlocks, number: int, finished: Finished) -> None:
        """Stores a number of blocks; calls `finished` once with the outcomes, on the worker thread.

        `blocks` is called on that thread, because views of 1,024 blocks take milliseconds.
        """
        self._begin(WorkQueue.STORE, self.tier.store, blocks, number, finished)

    def load(self, blocks: ReadBlocks, number: int, finished: Finished) -> None:
        self._begin(WorkQueue.LOAD, self.tier.load, blocks, number, finished)

    def look_up(self, keys: Sequence[Name], answered: Answered) -> None:
        """Looks blocks up; calls `answered` once with the answers, or with [] if there are none.

        There are none after an error, after `_QUERY_SECONDS`, and if too many queries of the tenant
        wait. The first key decides the tenant.
        """
        if not self._queries.put(_Query(keys, answered, time.monotonic() + _QUERY_SECONDS)):
            answered([])
            return
        try:
            self._threads.submit(WorkQueue.LOOKUP, "lookup", self._answer_queries)
        except RuntimeError as error:  # no thread available
            self._note_failure("lookup", error)
            self._drop_queries()

    def remove(self, keys: Sequence[Name]) -> None:
        """Removes blocks. Stores that are submitted later run after the removal."""
        with contextlib.suppress(RuntimeError):
            self._threads.submit(WorkQueue.STORE, "remove", lambda: self.tier.remove(keys))

    def check(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Runs `work`, a check of the tier, on a separate thread in parallel to the tier's jobs.

        Returns a future of the result; shield it from cancellation. The check always runs to its
        end, and `close` waits for this end.
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
            except BaseException as failure:  # noqa: BLE001 - passed to the future
                # A future accepts no StopIteration; other BaseExceptions would end the task that
                # awaits it.
                proper = isinstance(failure, Exception) and not isinstance(failure, StopIteration)
                error = failure if proper else TierError(describe_error(failure))
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(settle, result, error)

        self._threads.submit(WorkQueue.CHECK, "check", run)
        return future

    def measure_disk(self) -> None:
        """Updates `free_disk_bytes` on a thread, unless an earlier measurement still runs."""
        if self._measuring:
            return

        def run() -> None:
            self.free_disk_bytes = self.tier.free_disk_bytes()
            self._measuring = False

        self._measuring = True
        try:
            self._threads.submit(WorkQueue.CHECK, "free_disk_bytes", run)
        except RuntimeError:  # no thread available
            self._measuring = False

    def watch(self, seconds: float) -> bool:
        """Reports calls that take longer than `seconds`; returns whether the tier is stalled.

        If the tier is stalled, loads and lookups that have not begun fail. So engines recompute
        blocks instead of waiting for them.
        """
        overdue = self._threads.overdue(seconds)
        calls = ", ".join(sorted(overdue.values()))
        self.tier.report("stalled", f"{calls}: still running after {seconds:g} s" if calls else None)
        self.stalled = not overdue.keys().isdisjoint((WorkQueue.STORE, WorkQueue.LOAD, WorkQueue.LOOKUP))
        if self.stalled:
            self._threads.abandon(WorkQueue.LOAD)
            self._threads.abandon(WorkQueue.LOOKUP)
            self._drop_queries()
        return self.stalled

    def close(self) -> bool:
        """Waits for running calls, then closes the tier. Returns whether that succeeded in time.

        Called once, on any thread. If a call does not end in time, the tier is not closed. The next
        start of the server then treats the tier like the tier of a killed server.
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
            _log.error("tier is not closed: a call does not end", tier=self.tier.name, operation=self.left_behind)
        return ended

    def _note_failure(self, operation: str, error: BaseException) -> None:
        """Records an error. Formats no traceback, as that could call a third party's `__repr__`."""
        self.tier.report(operation, f"{operation} failed: {describe_error(error)}")

    def _close_tier(self) -> None:
        try:
            self.tier.close()
        except BaseException as error:  # noqa: BLE001 - the other tiers are still closed
            _log.error("tier failed", tier=self.tier.name, operation="close", exc_info=error)

    def _answer_queries(self) -> None:
        """Answers waiting queries by one call of the tier.

        It runs once per query. If the tier is slow, earlier runs have answered several each.
        """
        queries: list[_Query] = []
        names: list[Name] = []
        while len(names) < _MERGED_NAMES and (each := self._queries.take()) is not None:
            if time.monotonic() >= each.until:
                each.answered([])
            else:
                queries.append(each)
                names += each.keys
        if not queries:
            return
        there: Sequence[bool] = []
        try:
            there = self.tier.lookup(names)
        except BaseException as error:  # noqa: BLE001 - the core waits for the answers
            self._note_failure("lookup", error)
        finally:
            start = 0
            for each in queries:
                each.answered(there[start : start + len(each.keys)])
                start += len(each.keys)

    def _drop_queries(self) -> None:
        while (query := self._queries.take()) is not None:
            query.answered([])

    def _begin(
        self,
        kind: WorkQueue,
        move: Callable[[Sequence[BlockBytes]], list[Outcome]],
        blocks: ReadBlocks,
        number: int,
        finished: Finished,
    ) -> None:
        self.jobs += 1

        def fail() -> None:
            finished([Outcome.FAILED] * number)

        def run() -> None:
            outcomes: Sequence[Outcome] = [Outcome.FAILED] * number
            try:
                outcomes = self._run(kind.value, move, blocks())
            except BaseException as error:  # noqa: BLE001 - a job that never ends would pin its blocks forever
                self._note_failure(kind.value, error)
            finally:
                finished(outcomes)

        try:
            self._threads.submit(kind, kind.value, run, fail)
        except RuntimeError as error:  # no thread available
            self._note_failure(kind.value, error)
            fail()

    def _run(
        self, operation: str, move: Callable[[Sequence[BlockBytes]], list[Outcome]], blocks: Sequence[BlockBytes]
    ) -> Sequence[Outcome]:
        # Before the tier releases its views.
        nbytes = sum([part.nbytes for block in blocks for part in block.parts])
        started = time.monotonic()
        outcomes = move(blocks)
        try:
            self.observe_job(self.tier.name, operation, time.monotonic() - started, nbytes, outcomes)
        except Exception as error:  # noqa: BLE001 - losing a metric must not lose the outcomes
            _log.error("job not observed", exc_info=error)
        return outcomes


def close_all(workers: Sequence[TierWorker]) -> None:
    """Closes all tiers in parallel and in bounded time. Busy tiers get a `left_behind` text."""
    closers = [threading.Thread(target=worker.close, daemon=True) for worker in workers]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
