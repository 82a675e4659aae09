"""What is too much to be done at once goes in slices, and other events have their turn between them.

A slice that leaves something asks for the next one by a command, `ContinueWork`; there is never more than one of it on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from .bulk_eviction import EvictionRequest, EvictionSource, EvictionTask
from .commands import Command, ContinueWork
from .cpu_tier import CpuTier
from .leases import LeaseTable
from .transfers import TransferScheduler

__all__ = ["IncrementalWork"]


class IncrementalWork:
    """Resets, leases of fallen sessions, what expires, and evictions on demand, as far as they are not done yet."""

    def __init__(
        self, cpu_tier: CpuTier, transfers: TransferScheduler, leases: LeaseTable, command: Callable[[Command], None]
    ) -> None:
        self._cpu_tier = cpu_tier
        self._transfers = transfers
        self._leases = leases
        self._command = command
        self._eviction_tasks: deque[EvictionTask] = deque()
        self._asked_for = False

    def ask(self, left: bool) -> None:  # noqa: FBT001 - what a slice returns
        """Asks for the next slice, if there is something left to be done in it."""
        if left and not self._asked_for:
            self._asked_for = True
            self._command(ContinueWork())

    def work(self, now: float) -> None:
        """Does the next slice of everything. Called once for each `ContinueWork`.

        Where some of it raises, the rest is done all the same, and what is left is asked for again: not what was begun by the part
        that raised, nor an eviction on demand, which ends. What it raised is raised then.
        """
        self._asked_for = False
        slices = (
            self._make_spare_room,
            self._cpu_tier.reset_slice,
            self._leases.unpin_slice,
            partial(self._drop_expired, now),
            self._clear,
        )
        errors: list[Exception] = []
        left = [_done(slice_, errors) for slice_ in slices]
        self.ask(any(left))
        if len(errors) > 1:
            raise ExceptionGroup("several slices", errors)
        if errors:
            raise errors[0]

    def expire(self, now: float) -> None:
        """Begins to drop the blocks that were not used for too long."""
        self.ask(self._drop_expired(now))

    def evict(self, wanted: EvictionRequest, now: float) -> EvictionTask:
        """Begins to evict what somebody wants gone, behind what others want gone."""
        sources: list[EvictionSource] = [self._cpu_tier, *self._transfers.sources(self._cpu_tier.used_at)]
        clearing = EvictionTask(wanted, sources, now)
        self._eviction_tasks.append(clearing)
        self.ask(True)
        return clearing

    def _make_spare_room(self) -> bool:
        self._cpu_tier.make_spare_room()
        return False

    def _clear(self) -> bool:
        """Does a slice of the first eviction on demand; returns whether there is more of that one, or another."""
        if self._eviction_tasks and not self._eviction_tasks[0].work():
            self._eviction_tasks.popleft()
        return bool(self._eviction_tasks)

    def _drop_expired(self, now: float) -> bool:
        """Drops blocks that were not used for too long, a slice in each tier; returns whether there are more."""
        left = [self._cpu_tier.tick(now), self._transfers.tick(now, self._cpu_tier.used_at)]
        return any(left)


def _done(slice_: Callable[[], bool], errors: list[Exception]) -> bool:
    """Does a slice of something; returns whether there is more of it. That is not known of one that raises, so there may be."""
    try:
        return slice_()
    except Exception as error:  # noqa: BLE001 - what others wait for has nothing to do with it
        errors.append(error)
        return True
