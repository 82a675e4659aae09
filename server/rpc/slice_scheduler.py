"""Scheduler of long calls: runs them in slices, so that other calls need not wait for their end.

A call with 65,536 keys takes 20 to 400 ms, and all calls share the event loop. A handler therefore
processes the keys of a long call in slices of about 1 ms, and waits for its turn before each slice.
Each turn of the event loop runs one slice, or several short ones, of at most one long call. Tenants
take turns, and so do the long calls of a tenant. While other sessions call, the loop is theirs
after a turn for as long as the turn has taken, so that long calls use at most half of its time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ...tiers.types import EngineSession
from .sessions import SessionRegistry

__all__ = ["SliceScheduler", "slices_of"]

T = TypeVar("T")

_TURN_SECONDS = 0.0005
"""Short slices share a turn for so long, because a wait for the next turn takes at least 1 ms."""

_ACTIVE_SECONDS = 0.05
"""For so long after a call, the loop keeps time free for further calls of the session."""


class SliceScheduler:
    """Grants turns to the slices of long calls. Runs on the event loop."""

    def __init__(self, sessions: SessionRegistry) -> None:
        self._sessions = sessions
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting slices per tenant. The first tenant is next."""
        self._is_granting = False
        self._owner: EngineSession | None = None
        self._began = 0.0
        self.turns = 0
        """Number of granted turns."""

    async def turn(self, session: EngineSession) -> float:
        """Waits until a call may run its next slice, up to its next `await`.

        Returns the time, on the clock of `time.monotonic`, until which the call may run further
        short slices in this turn. Raises `Refused` if the session has ended meanwhile.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session.tenant, deque()).append(future)
        if not self._is_granting:
            self._is_granting = True
            self._grant()
        await future
        self._owner, self._began = session, time.monotonic()
        self._sessions.check(session)
        return self._began + _TURN_SECONDS

    def _grant(self) -> None:
        """Grants a turn to the next call that still waits, and continues after its slice."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            future = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the other tenants
            if not future.done():
                self.turns += 1
                self._owner = None
                future.set_result(None)  # its task runs next, before `_continue`
                loop.call_soon(self._continue)
                return
        self._is_granting = False

    def _continue(self) -> None:
        """Runs after a slice. Waits as long as it took, if other sessions need the event loop."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self._owner is not None and now - self._sessions.others_heard_at(self._owner) < _ACTIVE_SECONDS:
            loop.call_later(now - self._began, self._grant)
        else:
            loop.call_soon(self._grant)


def slices_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yields the items in slices; all of them at once if there are at most `size`."""
    if len(items) <= size:
        yield items
        return
    for start in range(0, len(items), size):
        yield items[start : start + size]
