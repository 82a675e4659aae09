"""Draining on demand: a server that takes no new work, and then ends, or stays, or takes work again.

A signal that ends the server does the same by way of `Server.stop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .refused import Refused
from .rpc.sessions import SessionRegistry
from .runtime import TierRuntime
from .telemetry.logs import get_logger

__all__ = ["DRAIN_SECONDS", "Drain"]

DRAIN_SECONDS = 20.0
"""How long a drain waits for what is under way."""

_log = get_logger(__name__)


class Drain:
    """The drain of one server. Lives on the event loop."""

    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, end: Callable[[], object]) -> None:
        """`end` has the process end as a signal does, which drains the server as well."""
        self.ending = False
        """Whether the server is about to end, and not to be held up."""
        self.complete = True
        """Whether all that was under way when the last drain began came to its end in time."""
        self._runtime = runtime
        self._sessions = sessions
        self._end = end
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """Whether there is nothing to wait for: the server is drained, or takes work."""
        return self._sessions.ended.is_set() if self.ending else self._task is None

    def end(self) -> None:
        """Has the server end; it drains first."""
        _log.info("drain begins", then="end")
        self.ending = True
        self._sessions.drain_began.set()
        self._end()

    def stay(self) -> None:
        """Takes no new work from now on, and finishes what is under way."""
        if self.ending or self._sessions.drain_began.is_set():
            return
        _log.info("drain begins", then="stay")
        self._sessions.drain_began.set()
        self._task = asyncio.get_running_loop().create_task(self._drain())

    def undo(self) -> None:
        """Takes new work again. Raises `Refused` where the server is about to end."""
        if self.ending or self._sessions.ended.is_set():
            raise Refused("DRAINING", "the server is shutting down, which cannot be undone")
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._sessions.draining:
            _log.info("drain undone")
        self._sessions.drain_began.clear()
        self.complete = True

    async def finish(self) -> None:
        """Drains a server that ends: waits for what is under way, then ends the sessions."""
        self.ending = True
        if self._task is not None:
            self._task.cancel()
        self._sessions.drain_began.set()
        self.complete = await self._runtime.drain(DRAIN_SECONDS)
        if not self.complete:
            _log.warning("stores or jobs were still running when the time to drain was over", seconds=DRAIN_SECONDS)
        self._sessions.ended.set()

    async def _drain(self) -> None:
        self.complete = False
        try:
            self.complete = await self._runtime.drain(DRAIN_SECONDS)
            _log.info("drained", complete=self.complete)
        finally:
            if self._task is asyncio.current_task():  # one that was undone has no say any more
                self._task = None
