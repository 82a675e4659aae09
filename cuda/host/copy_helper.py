"""A second thread for large copies: one thread does not use what the memory of most machines has to give.

`docs/decisions/0016-copies.md` has the measurements.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from .cgroup import own_groups

__all__ = ["Helper", "usable_cores"]

Piece = TypeVar("Piece")


def usable_cores() -> int:
    """Returns how many processors this process can keep busy, by its affinity and its cgroups' quotas (v1, v2); 1 at least.

    Of a quota only whole ones count: with one and a half, two busy threads are stopped for a part of the time.
    """
    quotas = (_quota(version, group) for version, group in own_groups("cpu"))
    bounds = [int(quota) for quota in quotas if quota is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *bounds]))


def _quota(version: int, group: Path) -> float | None:
    """Returns how many processors a cgroup has time for; None where that has no bound."""
    try:
        if version == 1:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # one that is not bound says "max"
        return None


class Helper:
    """One thread that works beside whoever asks for it. Any thread may ask; two that ask at a time are two without it.

    It is there from the first time on, as a daemon. A process that has forked makes another one: threads do not come along.
    """

    def __init__(self) -> None:
        """Starts nothing."""
        self._begin()
        # Whoever held the lock has stayed with the parent, as the thread has.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._helped: _Job[Any] | None = None
        self._at_work: set[_Job[Any]] = set()
        """Jobs that somebody is at now."""
        self._is_there: bool | None = None

    def share(self, pieces: Iterable[Piece], work: Callable[[Piece], None]) -> bool:
        """Has `work` done for every piece, here and maybe in the helper's thread, in no order; returns when all of it is.

        Returns False, and has done nothing, where there is but one processor. Raises what `work` raises first, or what breaks in,
        as a signal's handler may anywhere; what has been begun is over by then, and the rest is left.
        """
        if not self._can_help():
            return False
        job = _Job(iter(list(pieces)), work)
        try:
            self._enter(job)
            job.take_part()
        finally:
            late: BaseException | None = None
            while not job.over:
                try:
                    self._leave(job)
                except BaseException as error:  # noqa: BLE001 it is raised when nobody is at that memory any more
                    late = error
            if late is not None:
                raise late
        if job.error is not None:
            raise job.error
        return True

    def _can_help(self) -> bool:
        if self._is_there is None:
            with self._lock:
                if self._is_there is None:
                    self._is_there = usable_cores() > 1 and self._start()
        return self._is_there

    def _enter(self, job: _Job[Any]) -> None:
        """Begins a job, with the helper's help if nobody else is at work; who is helped until now goes on alone."""
        with self._lock:
            self._at_work.add(job)
            if len(self._at_work) == 1:
                self._helped = job
                self._jobs.put(job)
            elif self._helped is not None:
                self._helped.dismiss()

    def _leave(self, job: _Job[Any]) -> None:
        """Ends a job, whether it has begun or not. Called again where something has broken in."""
        job.finish()
        with self._lock:
            self._at_work.discard(job)
            if self._helped is job:
                self._helped = None
        job.over = True

    def _start(self) -> bool:
        if sys.is_finalizing():  # it would be waited for, and never run
            return False
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

    __slots__ = ("_dismissed", "_helping", "_pieces", "_work", "error", "over")

    def __init__(self, pieces: Iterator[Piece], work: Callable[[Piece], None]) -> None:
        self._pieces = pieces
        self._work = work
        self._helping = threading.Lock()
        self._dismissed = False
        self.error: BaseException | None = None
        """What the helper has met with."""
        self.over = False
        """Whether nobody is at a piece of it any more."""

    def take_part(self) -> None:
        """Works until no piece is left to be taken."""
        deque(map(self._work, self._pieces), 0)

    def help(self) -> None:
        """Does so in the helper's thread, until it is dismissed; one that comes late finds nothing left."""
        with self._helping:
            try:
                while not self._dismissed:
                    self._work(next(self._pieces))
            except StopIteration:
                pass
            except BaseException as error:  # noqa: BLE001 it is raised where the work was asked for
                self.error = error
                self._leave_the_rest()

    def dismiss(self) -> None:
        """Has the helper take no more pieces."""
        self._dismissed = True

    def finish(self) -> None:
        """Waits for the piece that the helper is at, if it is at any."""
        self._leave_the_rest()
        with self._helping:
            pass

    def _leave_the_rest(self) -> None:
        deque(self._pieces, 0)
