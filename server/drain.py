"""Drain of a server: it refuses new work and finishes running work; then it ends, if requested.

SIGTERM and SIGINT also drain the server, through `Server.stop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .core_runtime import TierRuntime
from .refused import Refused
from .rpc.sessions import SessionRegistry
from .telemetry.logs import get_logger

__all__ = ["DRAIN_SECONDS", "Drain"]

DRAIN_SECONDS = 20.0

_log = get_logger(__name__)


class Drain:
    """Drain of one server. All calls must come from the event loop."""

    def __init__(self, runtime: TierRuntime, sessions: SessionRegistry, end: Callable[[], object]) -> None:
        """`end` must make the process end, as SIGTERM does."""
        self.ending = False
        """Whether the server is ending. A drain that only refuses new work leaves this False."""
        self.complete = True
        """Whether the last drain finished all running work within `DRAIN_SECONDS`."""
        self._runtime = runtime
        self._sessions = sessions
        self._end = end
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self._sessions.ended.is_set() if self.ending else self._task is None

    def end(self) -> None:
        """Makes the server refuse new work and finish running work, then end."""
        _log.info("drain begins", then="end")
        self.ending = True
        self._sessions.drain_began.set()
        self._end()

    def stay(self) -> None:
        """Makes the server refuse new work and finish running work, without ending."""
        if self.ending or self._sessions.drain_began.is_set():
            return
        _log.info("drain begins", then="stay")
        self._sessions.drain_began.set()
        self._task = asyncio.get_running_loop().create_task(self._drain())

    def undo(self) -> None:
        """Makes the server accept new work again. Raises `Refused` if the server is ending."""
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
        """Drains a server that is ending: waits for running work, then ends the sessions."""
        self.ending = True
        if self._task is not None:
            self._task.cancel()
        self._sessions.drain_began.set()
        self.complete = await self._runtime.drain(DRAIN_SECONDS)
        if not self.complete:
            _log.warning("stores or jobs are still running at the end of the drain", seconds=DRAIN_SECONDS)
        self._sessions.ended.set()

    async def _drain(self) -> None:
        self.complete = False
        try:
            self.complete = await self._runtime.drain(DRAIN_SECONDS)
            _log.info("drained", complete=self.complete)
        finally:
            if self._task is asyncio.current_task():  # False if `undo` has cancelled this drain
                self._task = None
