"""Incremental work: runs resets and expiry in slices, to keep the event loop free.

A slice that leaves work behind requests the next one with a `ContinueWork` command. At most one
such command is outstanding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .commands import Command, ContinueWork
from .cpu_tier import CpuTier
from .transfers import TransferScheduler
from .unpin_queue import UnpinQueue

__all__ = ["IncrementalWork"]


class IncrementalWork:
    """Unfinished resets, unpins and expiries."""

    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        transfers: TransferScheduler,
        commands: list[Command],
    ) -> None:
        self._cpu_tier = cpu_tier
        self._transfers = transfers
        self.unpins = UnpinQueue(self.continue_if)
        self._commands = commands
        self._continue_requested = False

    def continue_if(self, more: bool) -> None:  # noqa: FBT001 - the return value of a slice
        if more and not self._continue_requested:
            self._continue_requested = True
            self._commands.append(ContinueWork())

    def work(self, now: float) -> None:
        """Runs the next slice of every operation. Called once for each `ContinueWork`.

        If one operation raises, the others still run, and the next slice is requested. Then the
        error is raised.
        """
        self._continue_requested = False
        slices: tuple[Callable[[], bool], ...] = (
            self._cpu_tier.make_spare_room,
            self._cpu_tier.reset_slice,
            self.unpins.unpin_slice,
            partial(self._drop_expired, now),
        )
        errors: list[Exception] = []
        more = [_run(slice_, errors) for slice_ in slices]
        self.continue_if(any(more))
        if len(errors) > 1:
            raise ExceptionGroup("several slices", errors)
        if errors:
            raise errors[0]

    def expire(self, now: float) -> None:
        self.continue_if(self._drop_expired(now))

    def _drop_expired(self, now: float) -> bool:
        """Drops expired blocks, one slice per tier; returns whether expired blocks are left."""
        more = [self._cpu_tier.tick(now), self._transfers.tick(now, self._cpu_tier.used_at)]
        return any(more)


def _run(slice_: Callable[[], bool], errors: list[Exception]) -> bool:
    """Returns whether a slice left work. Adds an exception to `errors` and then returns True."""
    try:
        return slice_()
    except Exception as error:  # noqa: BLE001 - the other operations must run
        errors.append(error)
        return True
