"""A second thread for large copies: one thread does not use what the memory of most machines has to give.

`docs/decisions/0016-copies.md` has the measurements.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Helper", "usable_cores"]

Piece = TypeVar("Piece")


def usable_cores() -> int:
    """Returns on how many processors this process may run."""
    return len(os.sched_getaffinity(0))


class Helper:
    """One thread that works beside whoever asks for it, for one at a time. Any thread may ask.

    It is there from the first time on, as a daemon. A process that has forked makes another one: threads do not come along.
    """

    def __init__(self) -> None:
        """Starts nothing."""
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._jobs: SimpleQueue[_Job[object]] = SimpleQueue()
        self._taken = threading.Lock()
        """Whoever holds it is helped."""
        self._is_there: bool | None = None

    def share(self, pieces: Iterable[Piece], work: Callable[[Piece], None]) -> bool:
        """Has `work` done for every piece, here and in the helper's thread, in no order; returns when all of it is.

        Returns False, and has done nothing, where the helper is busy for somebody else, or there is but one processor.
        Raises what `work` raises first; what has been begun is over by then, and the rest is left.
        """
        if self._pid != os.getpid():  # whoever held the lock has stayed with the parent, as the thread has
            self._begin()
        if not self._taken.acquire(blocking=False):
            return False
        try:
            if self._is_there is None:
                self._is_there = usable_cores() > 1 and self._start()
            if not self._is_there:
                return False
            job = _Job(iter(list(pieces)), work)
            self._jobs.put(job)  # type: ignore[arg-type]
            try:
                job.take_part()
            finally:
                job.finish()
        finally:
            self._taken.release()
        if job.error is not None:
            raise job.error
        return True

    def _start(self) -> bool:
        try:
            threading.Thread(target=self._run, name="kvtier-copy", daemon=True).start()
        except RuntimeError:  # no more threads are to be had
            return False
        return True

    def _run(self) -> None:
        while True:
            self._jobs.get().help()


class _Job(Generic[Piece]):
    """Pieces of work that two threads take from one iterator, of a list: its `next` is one step under the GIL."""

    __slots__ = ("_helping", "_pieces", "_work", "error")

    def __init__(self, pieces: Iterator[Piece], work: Callable[[Piece], None]) -> None:
        self._pieces = pieces
        self._work = work
        self._helping = threading.Lock()
        self.error: BaseException | None = None
        """What the helper has met with."""

    def take_part(self) -> None:
        """Works until no piece is left to be taken."""
        deque(map(self._work, self._pieces), 0)

    def help(self) -> None:
        """Does so in the helper's thread; one that comes late finds nothing left."""
        with self._helping:
            try:
                self.take_part()
            except BaseException as error:  # noqa: BLE001 it is raised where the work was asked for
                self.error = error
                self._leave_the_rest()

    def finish(self) -> None:
        """Waits for the piece that the helper is at, if it is at any."""
        self._leave_the_rest()
        with self._helping:
            pass

    def _leave_the_rest(self) -> None:
        deque(self._pieces, 0)
